#include <unistd.h>

#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/threads.h"
#include "cli/cli.h"
#include "cli/generate_session.h"
#include "data/documents.h"
#include "infer/engine.h"
#include "infer/stop_strings.h"
#include "model/load.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/tokenizer.h"

namespace sps {

namespace {

struct GenerateArguments {
  std::string checkpoint, prompt, file, tokenizer, dtype = "auto", weights, device = "auto";
  std::string text_field = "prompt";
  GenerateOptions options;
  std::vector<std::string> stops;
  int64_t sequences = 8;
  int threads = 0;
  bool json = false, log_probabilities = false, memory = false, interactive = false;
};

// The one that was asked for, the checkpoint's own, or bytes where the model was trained on those.
std::unique_ptr<Tokenizer> tokenizer_for(const std::string& given, const LoadedModel& loaded) {
  const int32_t eot = loaded.model->config().eot;
  std::string source = given;
  if (source.empty() && loaded.checkpoint.has_tokenizer)
    source = (loaded.checkpoint.path / kTokenizerFile).string();
  if (source.empty() && eot == ByteTokenizer().eot()) source = ByteTokenizer().name();
  if (source.empty())
    fail("{} does not come with its tokenizer: name one with --tokenizer", loaded.checkpoint.path.string());
  // The data set may have been made with another end of text than the tokenizer's files give away.
  auto tokenizer = make_tokenizer(source, {.eot_id = eot});
  if (tokenizer->eot() != eot)
    fail("{} was trained with the end-of-text id {}, the tokenizer '{}' has {}",
         loaded.checkpoint.path.string(), eot, source, tokenizer->eot());
  if (tokenizer->vocab_size() > loaded.model->config().vocab)
    fail("{} was trained with {} ids, the tokenizer '{}' has {}", loaded.checkpoint.path.string(),
         loaded.model->config().vocab, source, tokenizer->vocab_size());
  return tokenizer;
}

// A prompt and what has become of it.
struct Job {
  Document document;
  int32_t previous = -1;  // the last id of prompt and text
  size_t prompt_tokens = 0, new_tokens = 0;
  StopStrings stops;
  std::string text, finish;
  std::vector<double> log_probabilities;
};

// The prompts of a file. An empty one in JSON is a new document as on the command line, so that there is a
// text for each; a file without a prompt is an error.
class PromptReader {
 public:
  PromptReader(const std::string& file, const std::string& text_field)
      : file_(file), reader_({file}, text_field) {}
  bool next(Document& document) {
    while (reader_.next_raw(raw_)) {
      const bool json = !raw_.place.empty();
      reader_.parse(raw_, document);
      if (!json && document.text.empty()) continue;
      any_ = true;
      return true;
    }
    if (!any_) fail("{} holds no prompt", file_ == "-" ? "standard input" : file_);
    return false;
  }

 private:
  std::string file_;
  DocumentReader reader_;
  RawDocument raw_;
  bool any_ = false;
};

class Generation {
 public:
  Generation(const GenerateArguments& args, LoadedModel& loaded, const Tokenizer& tokenizer)
      : args_(args), model_(*loaded.model), tokenizer_(tokenizer), terminal_(tokenizer) {}

  // `next` gives the prompts. All texts grow together.
  void run(const std::function<bool(Document&)>& next, const EngineOptions& options) {
    Engine engine(model_.config(), model_.parameters(), model_.store(), options);
    if (args_.memory) spdlog::info("{}", memory_text(model_, engine.memory()));
    bool more = true;
    while (true) {
      // As many wait as may be generated at once, however many there are.
      Document document;
      while (more && engine.waiting() < options.max_sequences && (more = next(document)))
        engine.add(begin(std::move(document)));  // its handles count like ours
      if (engine.idle()) break;
      for (const Drawn& d : engine.step()) {
        Job& job = jobs_.at(d.handle);
        if (d.finish == Finish::failed) fail("{}: {}", job.document.id, d.error);
        const bool text = d.id >= 0 && d.finish != Finish::end_of_text && d.finish != Finish::stop_id;
        if (text && !take(d.handle, d.id, d.log_probability)) {
          engine.cancel(d.handle);
          end(d.handle, "stop_string");
        } else if (d.finish != Finish::no) {
          end(d.handle, name_of(d.finish));
        }
      }
    }
  }

 private:
  Request begin(Document document) {
    Request request;
    request.prompt = prompt_ids(model_.config(), tokenizer_, document.text);
    request.options = args_.options;
    request.options.sampling.seed += uint64_t(begun_);  // of a file, each prompt draws for itself
    request.log_probabilities = args_.log_probabilities;
    try {
      checked_prompt(model_.config(), request.prompt, request.options);
    } catch (const Error& e) {
      if (document.id.empty()) throw;
      throw Error(e.kind(), fmt::format("{}: {}", document.id, e.what()));
    }
    const int32_t previous = request.prompt.empty() ? -1 : request.prompt.back();
    Job job{std::move(document), previous, request.prompt.size(), 0, StopStrings(args_.stops), "", "", {}};
    jobs_.emplace(begun_++, std::move(job));
    return request;
  }

  // False: the text has come to a stop string.
  bool take(int64_t handle, int32_t id, double log_probability) {
    Job& job = jobs_.at(handle);
    ++job.new_tokens;
    if (args_.log_probabilities) job.log_probabilities.push_back(log_probability);
    const std::string text = job.stops.feed(tokenizer_.text_of(id, std::exchange(job.previous, id)));
    job.text += text;
    show(job, text);
    return !job.stops.stopped();
  }

  void end(int64_t handle, std::string_view finish) {
    Job& job = jobs_.at(handle);
    const std::string rest = job.stops.flush();
    job.text += rest;
    job.finish = finish;
    if (!json()) {
      show(job, rest);
      fmt::print("{}\n", terminal_.flush());
      jobs_.erase(handle);
      return;
    }
    // In the order of the prompts.
    for (auto first = jobs_.begin(); first != jobs_.end() && !first->second.finish.empty();
         first = jobs_.begin()) {
      print(first->second);
      jobs_.erase(first);
    }
    flush_output();
  }

  bool json() const { return args_.json || !args_.file.empty(); }

  // The text appears as it is drawn, after the prompt; nothing does if there is an error instead.
  void show(const Job& job, const std::string& text) {
    if (json()) return;
    if (!std::exchange(shown_, true)) fmt::print("{}", job.document.text);
    // A terminal gets whole characters, a file or a pipe the bytes.
    static const bool is_terminal = isatty(STDOUT_FILENO) == 1;
    fmt::print("{}", is_terminal ? terminal_.feed(text) : text);
    flush_output();
  }

  void print(const Job& job) const {
    nlohmann::ordered_json line;
    if (!args_.file.empty()) line["id"] = job.document.id;
    line["prompt"] = job.document.text;
    line["prompt_tokens"] = job.prompt_tokens;
    line["new_tokens"] = job.new_tokens;
    line["text"] = job.text;
    line["finish"] = job.finish;
    if (args_.log_probabilities) line["log_probabilities"] = job.log_probabilities;
    fmt::print("{}\n", dump_json(line));
  }

  const GenerateArguments& args_;
  Model& model_;
  const Tokenizer& tokenizer_;
  StreamDecoder terminal_;
  std::map<int64_t, Job> jobs_;  // by handle: the number of the prompt
  int64_t begun_ = 0;
  bool shown_ = false;
};

void run_generate(GenerateArguments& args) {
  check(args.options.sampling);
  if (args.log_probabilities && !args.json && args.file.empty())
    usage_error("--log-probabilities: they are printed in JSON alone, expected --json or --file");
  if (args.threads > 0) set_thread_count(args.threads);
  const Device device = compute_device(args.device);
  const DType dtype = compute_dtype(args.dtype, device);
  if (!args.weights.empty()) check_int8_serves("--weights int8", dtype, device);
  // The engine brings its own memory: no text passes through the model.
  LoadedModel loaded =
      load_model(args.checkpoint, dtype, 1, device, args.weights.empty() ? Masters::needed : Masters::all);
  const ModelConfig& c = loaded.model->config();
  const auto tokenizer = tokenizer_for(args.tokenizer, loaded);
  args.options.ids = tokenizer->vocab_size();
  std::optional<Int8Weights> in_8_bits;
  if (!args.weights.empty()) in_8_bits.emplace(loaded.model->parameters(), loaded.model->store());
  const Int8Weights* int8 = in_8_bits ? &*in_8_bits : nullptr;
  if (args.interactive)
    return run_generate_session(*loaded.model, int8, *tokenizer, args.options, args.stops, args.memory);
  Generation generation(args, loaded, *tokenizer);
  if (!args.file.empty()) {
    PromptReader reader(args.file, args.text_field);
    return generation.run([&](Document& d) { return reader.next(d); },
                          {.max_sequences = args.sequences, .int8 = int8});
  }
  const std::vector<int32_t> prompt = prompt_ids(c, *tokenizer, args.prompt);
  const auto tokens = int64_t(checked_prompt(c, prompt, args.options).size()) + args.options.max_new;
  bool given = false;
  generation.run(
      [&](Document& d) {
        d.text = args.prompt;
        return !std::exchange(given, true);
      },
      {.max_sequences = 1, .cache_tokens = tokens, .int8 = int8});
}

}  // namespace

void add_generate(CLI::App& app) {
  auto args = std::make_shared<GenerateArguments>();
  CLI::App* cmd =
      app.add_subcommand("generate", "Continue a prompt, a file of them, or lines as they are typed");
  cmd->footer(
      "Texts of a file are generated together and printed in its order; prompt i draws with seed + i.\n"
      "JSON: id (of a file's prompt: its own or FILE:LINE), prompt, prompt_tokens, new_tokens, text, finish\n"
      "(length, end_of_text or stop_string) and, if asked for, log_probabilities.\n"
      "Examples:\n"
      "  sps generate runs/demo_sps_w16_tok_4m --prompt 'The list' --tokens 200 --temperature 0.8\n"
      "  sps generate runs/demo_sps_w16_tok_4m --file prompts.jsonl --stop . > texts.jsonl\n"
      "  sps generate runs/demo_sps_w16_tok_4m --interactive --temperature 0.8");
  cmd->add_option("checkpoint", args->checkpoint, "Checkpoint, or run directory (its latest)")->required();
  CLI::Option* prompt =
      cmd->add_option("-p,--prompt", args->prompt, "Text to continue; empty starts a new document");
  CLI::Option* file =
      cmd->add_option("--file", args->file,
                      "Prompts: JSON lines or one text; - = standard input. Prints a JSON line for each")
          ->excludes(prompt);
  cmd->add_option("--text-field", args->text_field, "Field of the JSON lines that holds the prompt")
      ->capture_default_str()
      ->needs(file);
  CLI::Option* interactive =
      cmd->add_flag(
             "--interactive", args->interactive,
             "Continue lines as they are typed, all in one text; so it is on a terminal without a prompt")
          ->excludes(prompt)
          ->excludes(file);
  cmd->add_option("-n,--tokens", args->options.max_new, "New tokens at the most")->capture_default_str();
  add_sampling_options(cmd, args->options.sampling);
  cmd->add_option("--stop", args->stops, "The text ends before this string; may be repeated")
      ->take_all()
      ->expected(1);
  cmd->add_option("--sequences", args->sequences, "Texts of --file that are generated at the same time")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  cmd->add_option("--tokenizer", args->tokenizer,
                  "bytes, or a tokenizer's file; otherwise the checkpoint's own");
  cmd->add_option("--dtype", args->dtype, "auto, bf16, f32, f64")->capture_default_str();
  cmd->add_option("--weights", args->weights, "int8: products read 8 bits (CPU, bf16); otherwise as dtype")
      ->check(CLI::IsMember({"int8"}));
  cmd->add_option("--device", args->device, "auto (a GPU if there is one), cpu, cuda")->capture_default_str();
  add_threads_option(cmd, args->threads);
  cmd->add_flag("--json", args->json, "Print one JSON object")->excludes(interactive);
  cmd->add_flag("--log-probabilities", args->log_probabilities,
                "In the JSON: the logarithm of each new token's probability, before any rule of choosing");
  cmd->add_flag("--memory", args->memory, "Say on standard error what memory is planned");
  cmd->callback([args, prompt, file] {
    if (!file->empty() && args->file.empty()) usage_error("--file is empty: expected a file's name or -");
    if (prompt->empty() && file->empty() && !args->json && isatty(STDIN_FILENO) == 1)
      args->interactive = true;
    run_generate(*args);
  });
}

}  // namespace sps
