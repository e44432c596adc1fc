#include "data/prepare.h"
#include "base/log.h"
#include "base/progress.h"
#include "cli/cli.h"

namespace sps {

void add_prepare(CLI::App& app) {
  auto options = std::make_shared<PrepareOptions>();
  CLI::App* cmd = app.add_subcommand("prepare", "Turn text into token files");
  cmd->footer("Example:\n  sps prepare books/ articles.jsonl --out data/text");
  cmd->add_option("inputs", options->inputs, "Text files, .jsonl files, folders or patterns")->required();
  cmd->add_option("-o,--out", options->out, "Folder for train.bin, val.bin and meta.json")->required();
  cmd->add_option("--tokenizer", options->tokenizer, "Tokenizer: bytes")->capture_default_str();
  cmd->add_option("--text-field", options->text_field, "Field of .jsonl records that holds the text")
      ->capture_default_str();
  cmd->add_option("--val-fraction", options->val_fraction, "Share of documents kept for validation")
      ->capture_default_str();
  cmd->add_option("--seed", options->seed, "Seed of the split and of the order")->capture_default_str();
  cmd->add_flag("--force", options->force, "Replace a data set with other content");
  cmd->callback([options] {
    std::unique_ptr<Progress> progress;
    std::string_view pass;
    uint64_t total = 0;
    const auto meta = prepare(*options, [&](const PrepareProgress& p) {
      if (p.pass != pass) {
        if (progress) progress->finish(int64_t(total));
        progress = std::make_unique<Progress>(std::string(p.pass), int64_t(p.total), "B");
        pass = p.pass, total = p.total;
      }
      progress->update(int64_t(p.done), fmt::format("{} documents", p.documents));
    });
    if (progress) progress->finish(int64_t(total));
    progress.reset();
    fmt::print("{}: {} training tokens in {} documents, {} validation tokens in {} documents\n",
               options->out.string(), human_count(double(meta.train.tokens)), meta.train.documents,
               human_count(double(meta.val.tokens)), meta.val.documents);
  });
}

}  // namespace sps
