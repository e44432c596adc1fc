// sps tokenizer: train a byte-level BPE, and turn text into ids and ids into text.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cli/cli.h"
#include "data/documents.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/bpe_trainer.h"
#include "tokenizer/save_tokenizer_json.h"
#include "tokenizer/tokenizer.h"

namespace sps {

namespace fs = std::filesystem;

namespace {

// Texts of a corpus in batches that are worth several threads. With a limit, the first texts of each file, as
// many as its share of all bytes on disk allows: the same ones every time, and the rest is not read.
class TextBatches {
 public:
  TextBatches(const std::vector<std::string>& inputs, const std::string& text_field, int64_t max_bytes)
      : reader_(inputs, text_field), max_bytes_(max_bytes) {
    double sum = 0;
    for (const InputFile& file : reader_.input_files()) limits_.push_back(sum += double(file.size));
    for (double& limit : limits_) limit = sum > 0 ? double(max_bytes) * (limit / sum) : double(max_bytes);
  }

  bool next(std::vector<std::string>& texts) {
    size_t count = 0, bytes = 0;
    for (; count < kBatchTexts && bytes < kBatchBytes; ++count) {
      if (raw_.size() == count) raw_.emplace_back();
      if (!next_raw(raw_[count])) break;
      bytes += raw_[count].bytes.size();
    }
    texts.resize(count);
    std::vector<std::exception_ptr> errors(count);
    parallel_for(int64_t(count), [&](int64_t i) {
      try {
        Document document;
        reader_.parse(raw_[size_t(i)], document);
        texts[size_t(i)] = std::move(document.text);
      } catch (...) {
        errors[size_t(i)] = std::current_exception();
      }
    });
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
    return count > 0;
  }

  const DocumentReader& reader() const { return reader_; }

 private:
  static constexpr size_t kBatchTexts = 16384, kBatchBytes = size_t{32} << 20;

  bool next_raw(RawDocument& raw) {
    while (max_bytes_ > 0) {
      const size_t file = reader_.position().file;
      if (file >= limits_.size() || double(taken_) < limits_[file]) break;
      if (file + 1 == limits_.size()) return false;
      reader_.seek({file + 1, 0});
    }
    if (!reader_.next_raw(raw)) return false;
    taken_ += raw.bytes.size();
    return true;
  }

  DocumentReader reader_;
  int64_t max_bytes_;
  std::vector<double> limits_;  // of the bytes taken from all files up to this one
  uint64_t taken_ = 0;
  std::vector<RawDocument> raw_;
};

struct TrainArguments {
  std::vector<std::string> inputs;
  BpeTrainerOptions options;
  std::string out, text_field = "text";
  int64_t max_bytes = 0;
  int threads = 0;
  bool force = false, json = false;
};

// The files of a new tokenizer: complete or not there. A folder that had to be made goes again if nothing
// comes.
class TokenizerOutput {
 public:
  TokenizerOutput(const std::string& out, bool force) : force_(force) {
    fs::path path = out;
    std::error_code ignored;
    if (path.extension() != ".json" || fs::is_directory(path, ignored)) {
      if (!fs::exists(fs::symlink_status(path, ignored))) made_ = path;
      make_writable_directory(path);
      config_ = path / "tokenizer_config.json";
      path /= "tokenizer.json";
    }
    path_ = path;
    AtomicFile{path_};  // an error now rather than after all the work
  }
  ~TokenizerOutput() {
    std::error_code ignored;
    if (!made_.empty()) fs::remove(made_, ignored);  // only if it is empty
  }

  void write(const BpeModel& model) {
    const std::string text = to_tokenizer_json(model), config = to_tokenizer_config_json(model);
    check(path_, text);
    if (!config_.empty()) {
      check(config_, config);
      write_atomically(config_, config);
    }
    write_atomically(path_, text);
  }
  const fs::path& path() const { return path_; }

 private:
  void check(const fs::path& path, const std::string& text) const {
    std::error_code ignored;
    if (!force_ && fs::exists(fs::symlink_status(path, ignored)) && read_text(path) != text)
      fail("{} is there already with other content; choose another name or add --force to replace it",
           path.string());
  }

  bool force_;
  fs::path path_, config_, made_;
};

void train(const TrainArguments& args) {
  if (args.max_bytes < 0) usage_error("--max-bytes {}: expected 0 (all) or more", args.max_bytes);
  if (args.threads > 0) set_thread_count(args.threads);
  const double began = monotonic_seconds();
  BpeTrainer trainer(args.options);
  TextBatches batches(args.inputs, args.text_field, args.max_bytes);
  TokenizerOutput output(args.out, args.force);
  const BpeTrainerStats& stats = trainer.stats();
  // The last line says what came of it, so the steps have no closing lines: an error stands alone.
  {
    const DocumentReader& reader = batches.reader();
    Progress progress("counting words", int64_t(reader.total_bytes()), "B");
    const auto found = [&] {
      return fmt::format("{} different words", human_count(double(stats.different_words)));
    };
    for (std::vector<std::string> texts; batches.next(texts);) {
      trainer.add(texts);
      progress.update(int64_t(reader.bytes_read()), found());
    }
  }
  std::optional<BpeModel> model;
  {
    Progress progress("merging", args.options.vocab_size, "token");
    model = trainer.train([&](int64_t ids) { progress.update(ids); });
  }
  if (stats.dropped_words > 0)
    spdlog::warn("the table of words was full: {} words were dropped, each seen at most {} times",
                 stats.dropped_words, stats.dropped_frequency);
  const auto tokens = int64_t(model->tokens.size());
  if (tokens < args.options.vocab_size)
    spdlog::warn("the text gives only {} of the {} tokens: no further pair occurs {} times", tokens,
                 args.options.vocab_size, args.options.min_frequency);
  output.write(*model);
  const BpeTokenizer tokenizer(std::move(*model));
  if (args.json) {
    fmt::print("{}\n", dump_json(nlohmann::ordered_json{{"out", output.path().string()},
                                                        {"vocab_size", tokens},
                                                        {"eot", tokenizer.eot()},
                                                        {"merges", tokenizer.model().merges.size()},
                                                        {"fingerprint", tokenizer.fingerprint()},
                                                        {"texts", stats.texts},
                                                        {"text_bytes", stats.text_bytes},
                                                        {"words", stats.words},
                                                        {"different_words", stats.different_words},
                                                        {"dropped_words", stats.dropped_words},
                                                        {"seconds", monotonic_seconds() - began}}));
    return;
  }
  fmt::print("{}: {} tokens, end of text {}, from {} of text in {}\n", output.path().string(), tokens,
             tokenizer.eot(), human_bytes(double(stats.text_bytes)),
             human_duration(monotonic_seconds() - began));
}

std::string read_standard_input() {
  std::string text;
  char buffer[1 << 16];
  size_t n = 0;
  while ((n = std::fread(buffer, 1, sizeof buffer, stdin)) > 0) text.append(buffer, n);
  if (std::ferror(stdin)) fail("standard input cannot be read");
  return text;
}

struct EncodeArguments {
  std::string tokenizer = "bytes", file, text_field = "text";
  TokenizerOptions tokenizer_options;
  std::vector<std::string> documents;
  std::optional<std::string> text;
  SpecialText special = SpecialText::plain;
  bool json = false;
};

// One line for each document, in their order; an empty one for a document without text.
void encode_documents(const EncodeArguments& args, const Tokenizer& tokenizer) {
  TextBatches batches(args.documents, args.text_field, 0);
  std::vector<std::string> lines;
  for (std::vector<std::string> texts; batches.next(texts);) {
    lines.resize(texts.size());
    parallel_for(int64_t(texts.size()), [&](int64_t i) {
      std::vector<int32_t> ids;
      tokenizer.encode(texts[size_t(i)], ids, args.special);
      lines[size_t(i)] =
          args.json ? fmt::format("[{}]\n", fmt::join(ids, ",")) : fmt::format("{}\n", fmt::join(ids, " "));
    });
    for (const std::string& line : lines) fmt::print("{}", line);
  }
}

void encode(const EncodeArguments& args) {
  if (args.text && !args.file.empty())
    usage_error("a text and --file {} are given; expected one of them", args.file);
  if (!args.documents.empty() && (args.text || !args.file.empty()))
    usage_error("--documents {} and another text are given; expected one of them", args.documents[0]);
  const auto tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_options);
  if (!args.documents.empty()) return encode_documents(args, *tokenizer);
  const std::string text = args.text           ? *args.text
                           : args.file.empty() ? read_standard_input()
                                               : read_text(args.file);
  std::vector<int32_t> ids;
  tokenizer->encode(text, ids, args.special);
  if (args.json)
    fmt::print(
        "{}\n",
        dump_json(nlohmann::ordered_json{
            {"tokenizer", tokenizer->name()}, {"bytes", text.size()}, {"tokens", ids.size()}, {"ids", ids}}));
  else
    fmt::print("{}\n", fmt::join(ids, " "));
}

struct DecodeArguments {
  std::string tokenizer = "bytes";
  TokenizerOptions tokenizer_options;
  std::vector<std::string> ids;
  bool json = false;
};

// Numbers between white space, commas and brackets.
void parse_ids(std::string_view text, int32_t vocab_size, std::vector<int32_t>& ids) {
  constexpr std::string_view kBetween = " \t\r\n,[]";
  for (size_t at = 0; (at = text.find_first_not_of(kBetween, at)) != text.npos;) {
    const std::string_view word =
        text.substr(at, std::min(text.find_first_of(kBetween, at), text.size()) - at);
    int32_t id = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc{} || end != word.data() + word.size() || id < 0 || id >= vocab_size)
      usage_error("'{}' is no id; expected numbers from 0 to {}", word.substr(0, 40), vocab_size - 1);
    ids.push_back(id);
    at += word.size();
  }
}

void decode(const DecodeArguments& args) {
  const auto tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_options);
  std::vector<int32_t> ids;
  if (args.ids.empty()) parse_ids(read_standard_input(), tokenizer->vocab_size(), ids);
  for (const std::string& word : args.ids) parse_ids(word, tokenizer->vocab_size(), ids);
  const std::string text = tokenizer->decode(ids);
  if (args.json) {
    fmt::print("{}\n", dump_json(nlohmann::ordered_json{
                           {"tokens", ids.size()}, {"bytes", text.size()}, {"text", text}}));
    return;
  }
  // Elsewhere than on a terminal the bytes alone, so that decoding undoes encoding.
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (isatty(STDOUT_FILENO) == 1) fmt::print("\n");
}

struct InfoArguments {
  std::string tokenizer, text_field = "text";
  TokenizerOptions tokenizer_options;
  std::vector<std::string> inputs;
  int threads = 0;
  bool json = false;
};

std::vector<int32_t> longest_tokens(const Tokenizer& tokenizer, size_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(tokenizer.vocab_size()));
  std::iota(ids.begin(), ids.end(), 0);
  const auto longer = [&](int32_t a, int32_t b) {
    const size_t bytes_a = tokenizer.token_bytes(a).size(), bytes_b = tokenizer.token_bytes(b).size();
    return bytes_a != bytes_b ? bytes_a > bytes_b : a < b;
  };
  count = std::min(count, ids.size());
  std::partial_sort(ids.begin(), ids.begin() + std::ptrdiff_t(count), ids.end(), longer);
  ids.resize(count);
  return ids;
}

void info(const InfoArguments& args) {
  if (args.threads > 0) set_thread_count(args.threads);
  const auto tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_options);
  nlohmann::ordered_json j{{"name", tokenizer->name()},
                           {"vocab_size", tokenizer->vocab_size()},
                           {"eot", tokenizer->eot()},
                           {"fingerprint", tokenizer->fingerprint()}};
  if (const auto* bpe = dynamic_cast<const BpeTokenizer*>(tokenizer.get())) {
    const BpeModel& model = bpe->model();
    j["merges"] = model.merges.size();
    auto& splits = j["splits"] = nlohmann::ordered_json::array();
    for (const SplitStep& step : model.splits)
      splits.push_back(step.kind == SplitStep::Kind::digits ? "single digits" : step.pattern);
    j["nfc"] = model.nfc;
    auto& added = j["added"] = nlohmann::ordered_json::object();
    for (const AddedToken& token : model.added) added[token.text] = token.id;
  }
  auto& longest = j["longest_tokens"] = nlohmann::ordered_json::array();
  for (const int32_t id : longest_tokens(*tokenizer, 10))
    longest.push_back(std::string(tokenizer->token_bytes(id)));
  if (!args.inputs.empty()) {
    TextBatches batches(args.inputs, args.text_field, 0);
    uint64_t bytes = 0, tokens = 0;
    double seconds = 0;  // of encoding alone
    Progress progress("encoding", int64_t(batches.reader().total_bytes()), "B");
    for (std::vector<std::string> texts; batches.next(texts);) {
      std::vector<uint64_t> counts(texts.size());
      const double began = monotonic_seconds();
      parallel_for(int64_t(texts.size()), [&](int64_t i) {
        std::vector<int32_t> ids;
        tokenizer->encode(texts[size_t(i)], ids);
        counts[size_t(i)] = ids.size();
      });
      seconds += monotonic_seconds() - began;
      for (size_t i = 0; i < texts.size(); ++i) bytes += texts[i].size(), tokens += counts[i];
      progress.update(int64_t(batches.reader().bytes_read()));
    }
    if (tokens == 0) fail("there is no text in the input: {} files", batches.reader().files());
    progress.finish(int64_t(batches.reader().bytes_read()));
    j["text_bytes"] = bytes;
    j["text_tokens"] = tokens;
    j["bytes_per_token"] = double(bytes) / double(tokens);
    j["encode_seconds"] = seconds;
  }
  if (args.json) {
    fmt::print("{}\n", dump_json(j));
    return;
  }
  for (const auto& [key, value] : j.items()) {
    if (!value.is_structured()) {
      fmt::print("{:<17}{}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
      continue;
    }
    std::string label = key;
    for (const auto& [name, part] : value.items()) {
      const std::string text = dump_json(part);
      fmt::print("{:<17}{}{}\n", std::exchange(label, ""), value.is_object() ? fmt::format("{} ", name) : "",
                 text);
    }
  }
}

}  // namespace

void add_tokenizer_options(CLI::App* cmd, TokenizerOptions& options) {
  cmd->add_option("--eot", options.eot,
                  "The token that ends a text, where the tokenizer's files do not say it");
  cmd->add_option_function<std::string>(
      "--pattern", [&options](const std::string& name) { options.pattern = named_pattern(name)[0].pattern; },
      "How texts are cut into words, where the tokenizer's files do not say it");
}

void add_tokenizer(CLI::App& app) {
  CLI::App* cmd = app.add_subcommand("tokenizer", "Train a tokenizer, encode and decode text");
  cmd->require_subcommand(1);
  cmd->footer(
      "Examples:\n  sps tokenizer train books/ --vocab-size 32768 --out tok\n"
      "  sps tokenizer encode --tokenizer tok 'Hello there'\n"
      "  sps tokenizer info tok --file books/");

  auto t = std::make_shared<TrainArguments>();
  BpeTrainerOptions& options = t->options;
  CLI::App* train_cmd = cmd->add_subcommand("train", "Train a byte-level BPE and write its tokenizer.json");
  train_cmd->footer("Example:\n  sps tokenizer train books/ articles.jsonl.zst --vocab-size 32768 --out tok");
  train_cmd->add_option("inputs", t->inputs, "Texts as sps prepare reads them; - is standard input")
      ->required();
  train_cmd->add_option("-o,--out", t->out, "A .json file, or a folder for tokenizer.json")->required();
  train_cmd->add_option("--vocab-size", options.vocab_size, "Ids in all, with bytes and special tokens")
      ->capture_default_str();
  train_cmd
      ->add_option("--pattern", options.pattern,
                   "How texts are cut into words: gpt2, llama3, qwen2, o200k, or a regular expression")
      ->capture_default_str();
  train_cmd->add_option("--eot", options.eot, "The special token that ends a text")->capture_default_str();
  train_cmd->add_option("--special", options.special, "A further special token; may be repeated")
      ->allow_extra_args(false);
  train_cmd->add_option("--min-frequency", options.min_frequency, "Of a pair that becomes a token")
      ->capture_default_str();
  train_cmd->add_option("--max-token-bytes", options.max_token_bytes, "Longest token")->capture_default_str();
  train_cmd
      ->add_option("--max-bytes", t->max_bytes,
                   "About this much of the text, from each file's beginning; 0 = all")
      ->capture_default_str();
  train_cmd
      ->add_option("--text-field", t->text_field, "Field of JSON and Parquet records that holds the text")
      ->capture_default_str();
  add_threads_option(train_cmd, t->threads);
  train_cmd->add_flag("--force", t->force, "Replace a tokenizer with other content");
  train_cmd->add_flag("--json", t->json, "Print one JSON object");
  train_cmd->callback([t] { train(*t); });

  auto e = std::make_shared<EncodeArguments>();
  CLI::App* encode_cmd = cmd->add_subcommand("encode", "Print the ids of a text");
  encode_cmd->footer(
      "Examples:\n  sps tokenizer encode --tokenizer tok 'Hello there'\n"
      "  sps tokenizer encode --tokenizer tok --documents articles.jsonl.zst");
  encode_cmd->add_option("text", e->text, "The text as it stands: no escapes; without it, standard input");
  encode_cmd->add_option("--tokenizer", e->tokenizer, "bytes, or a tokenizer's file or folder")
      ->capture_default_str();
  add_tokenizer_options(encode_cmd, e->tokenizer_options);
  encode_cmd->add_option("--file", e->file, "Take the text from this file, as it stands");
  encode_cmd->add_option("--documents", e->documents,
                         "Documents as sps prepare reads them; a line of ids for each");
  encode_cmd
      ->add_option("--text-field", e->text_field, "Field of JSON and Parquet records that holds the text")
      ->capture_default_str();
  encode_cmd
      ->add_option_function<std::string>(
          "--special",
          [e](const std::string& how) {
            e->special = how == "parse" ? SpecialText::parsed : SpecialText::plain;
          },
          "Text that spells a special token: plain text, or parse")
      ->check(CLI::IsMember({"plain", "parse"}))
      ->default_str("plain");
  encode_cmd->add_flag("--json", e->json, "Print one JSON object; a JSON list for each of --documents");
  encode_cmd->callback([e] { encode(*e); });

  auto d = std::make_shared<DecodeArguments>();
  CLI::App* decode_cmd = cmd->add_subcommand("decode", "Print the text of ids");
  decode_cmd->footer("Example:\n  sps tokenizer decode --tokenizer tok 39 1045 262");
  decode_cmd->add_option("ids", d->ids, "Ids; without them, from standard input");
  decode_cmd->add_option("--tokenizer", d->tokenizer, "bytes, or a tokenizer's file or folder")
      ->capture_default_str();
  add_tokenizer_options(decode_cmd, d->tokenizer_options);
  decode_cmd->add_flag("--json", d->json, "Print one JSON object");
  decode_cmd->callback([d] { decode(*d); });

  auto i = std::make_shared<InfoArguments>();
  CLI::App* info_cmd = cmd->add_subcommand("info", "What a tokenizer is and how well it compresses a text");
  info_cmd->footer("Example:\n  sps tokenizer info tok --file books/");
  info_cmd->add_option("tokenizer", i->tokenizer, "bytes, or a tokenizer's file or folder")->required();
  add_tokenizer_options(info_cmd, i->tokenizer_options);
  info_cmd->add_option("--file", i->inputs, "Texts to measure bytes per token on");
  info_cmd->add_option("--text-field", i->text_field, "Field of JSON and Parquet records that holds the text")
      ->capture_default_str();
  add_threads_option(info_cmd, i->threads);
  info_cmd->add_flag("--json", i->json, "Print one JSON object");
  info_cmd->callback([i] { info(*i); });
}

}  // namespace sps
