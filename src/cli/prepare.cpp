#include "data/prepare.h"

#include <algorithm>

#include "base/log.h"
#include "base/progress.h"
#include "base/signals.h"
#include "base/threads.h"
#include "cli/cli.h"

namespace sps {

namespace {

struct PrepareArguments {
  PrepareOptions options;
  std::string split_by = "text", format = "sps";
  int threads = 0;
};

void run_prepare(PrepareArguments& args) {
  PrepareOptions& options = args.options;
  options.split_by = split_by(args.split_by);
  options.format = token_format(args.format);
  if (args.threads > 0) set_thread_count(args.threads);
  const volatile std::sig_atomic_t* stop = catch_stop_signals();
  std::unique_ptr<Progress> progress;
  std::string_view pass;
  uint64_t done = 0;
  const auto meta = prepare_until(options, stop, [&](const PrepareProgress& p) {
    if (p.pass != pass) {
      if (progress) progress->finish(int64_t(done));
      progress = std::make_unique<Progress>(std::string(p.pass), int64_t(p.total), "B", int64_t(p.done));
      pass = p.pass;
    }
    done = p.done;
    progress->update(int64_t(done), fmt::format("{} documents", p.documents));
  });
  if (meta && progress) progress->finish(int64_t(done));
  progress.reset();
  if (!meta) {
    const bool pipe = std::find(options.inputs.begin(), options.inputs.end(), "-") != options.inputs.end();
    fmt::print("stopped while {}; {}\n", pass.empty() ? "starting" : pass,
               pipe ? "what came from standard input has to be read again"
                    : "the same command continues from there");
    set_exit_status(128 + *stop);
    return;
  }
  fmt::print("{}: {} training tokens in {} documents, {} validation tokens in {} documents\n",
             options.out.string(), human_count(double(meta->train.tokens)), meta->train.documents,
             human_count(double(meta->val.tokens)), meta->val.documents);
}

}  // namespace

void add_prepare(CLI::App& app) {
  auto args = std::make_shared<PrepareArguments>();
  PrepareOptions& options = args->options;
  CLI::App* cmd = app.add_subcommand("prepare", "Turn text into token files");
  cmd->footer(
      "Examples:\n"
      "  sps prepare books/ articles.jsonl --out data/text\n"
      "  sps prepare 'shards/*.parquet' --tokenizer tokenizer.json --out data/web\n"
      "  zcat big.gz | sps prepare - --out data/big\n\n"
      "A preparation that was stopped, for whatever reason, continues when the same command is given again.");
  cmd->add_option("inputs", options.inputs,
                  "Files (.txt .md .jsonl .json .parquet, .gz, .zst), folders, patterns; -: standard input")
      ->required();
  cmd->add_option("-o,--out", options.out, "Folder for train.bin, val.bin and meta.json")->required();
  cmd->add_option("--tokenizer", options.tokenizer, "bytes, or a tokenizer's file or folder")
      ->capture_default_str();
  add_tokenizer_options(cmd, options.tokenizer_options);
  cmd->add_option("--text-field", options.text_field, "Field of JSON objects and rows that holds the text")
      ->capture_default_str();
  cmd->add_option("--id-field", options.id_field, "Field that holds the id")->capture_default_str();
  cmd->add_option("--val-fraction", options.val_fraction, "Share of documents kept for validation")
      ->capture_default_str();
  cmd->add_option("--split-by", args->split_by,
                  "What decides a document's side: text (equal texts stay together) or id")
      ->capture_default_str();
  cmd->add_option("--format", args->format, "sps, raw (ids of 2 bytes always) or llmc (with llm.c's header)")
      ->capture_default_str();
  cmd->add_option("--seed", options.seed, "Seed of the split and of the order")->capture_default_str();
  add_threads_option(cmd, args->threads);
  cmd->add_option("--save-every", options.save_seconds, "Seconds between two places to continue from")
      ->capture_default_str();
  cmd->add_flag("--force", options.force, "Replace a data set with other content");
  cmd->callback([args] { run_prepare(*args); });
}

}  // namespace sps
