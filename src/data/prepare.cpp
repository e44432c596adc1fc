#include "data/prepare.h"

#include <algorithm>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "data/data_tokenizer.h"
#include "data/prepare_passes.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

// What stands in `out` already, if it may only be replaced by the same content. Refuses at once where the new
// content cannot be the same.
std::optional<TokenMeta> existing_data_set(const PrepareOptions& options, const Tokenizer& tokenizer,
                                           const std::string& tokenizer_text) {
  const fs::path& out = options.out;
  if (options.force) return std::nullopt;
  if (is_there(out / "meta.json")) {
    if (is_marked_unfinished(out)) return std::nullopt;
    const TokenMeta old = *read_token_meta(out);
    const auto refuse = [&](std::string_view what, const auto& was, const auto& is) {
      fail(
          "{} already holds a data set with {} {}, not {}; choose another folder or add --force to replace "
          "it",
          out.string(), what, was, is);
    };
    if (old.tokenizer != tokenizer.name()) refuse("the tokenizer", old.tokenizer, tokenizer.name());
    if (old.fingerprint != tokenizer.fingerprint())
      refuse("the tokenizer fingerprint", old.fingerprint, tokenizer.fingerprint());
    if (old.seed != options.seed) refuse("the seed", old.seed, options.seed);
    if (old.val_fraction != options.val_fraction)
      refuse("val_fraction", old.val_fraction, options.val_fraction);
    if (old.split_by != options.split_by)
      refuse("a split by", split_by_name(old.split_by), split_by_name(options.split_by));
    if (old.format != options.format)
      refuse("the format", token_format_name(old.format), token_format_name(options.format));
    return old;
  }
  for (const char* name : {"train.bin", "val.bin"})
    if (is_there(out / name))
      fail(
          "{} already exists, without a meta.json that tells what it is; choose another folder or add "
          "--force to "
          "replace it",
          (out / name).string());
  const fs::path tokenizer_path = out / kDataTokenizerFile;
  if (!tokenizer_text.empty() && is_there(tokenizer_path) && read_text(tokenizer_path) != tokenizer_text)
    fail("{} already exists and is another tokenizer; choose another folder or add --force to replace it",
         tokenizer_path.string());
  return std::nullopt;
}

// Puts the three files in place. A kill in between leaves a folder that readers refuse; an error leaves what
// was there before, or, once the first file of an existing data set is replaced, a folder that readers
// refuse.
void publish(const fs::path& out, OrderedFiles& files, const std::string& tokenizer_text,
             const TokenMeta& meta) {
  files.train->flush();
  files.val->flush();
  const fs::path meta_path = out / "meta.json", tokenizer_path = out / kDataTokenizerFile;
  std::vector<fs::path> paths{meta_path, out / "train.bin", out / "val.bin"};
  const bool fresh = std::none_of(paths.begin(), paths.end(), is_there);
  if (!tokenizer_text.empty() && !is_there(tokenizer_path)) paths.push_back(tokenizer_path);
  const std::optional<std::string> old_meta =
      is_there(meta_path) ? std::optional(read_text(meta_path)) : std::nullopt;
  bool replaced = false;
  std::error_code ignored;
  mark_unfinished(out);
  try {
    files.train->commit();
    replaced = true;
    files.val->commit();
    if (!tokenizer_text.empty())
      write_atomically(tokenizer_path, tokenizer_text);
    else if (old_meta)
      fs::remove(tokenizer_path, ignored);  // of the data set that is replaced
    write_token_meta(out, meta);
  } catch (...) {
    if (fresh) {
      for (const fs::path& path : paths) fs::remove(path, ignored);
    } else if (!replaced) {
      if (old_meta)
        write_atomically(meta_path, *old_meta);
      else
        fs::remove(meta_path, ignored);
    }
    throw;
  }
}

TokenMeta description(const PrepareOptions& options, const Tokenizer& tokenizer,
                      const DocumentReader& reader) {
  TokenMeta meta;
  meta.tokenizer = tokenizer.name();
  meta.fingerprint = tokenizer.fingerprint();
  meta.vocab_size = tokenizer.vocab_size();
  meta.eot = tokenizer.eot();
  meta.type = token_type_for(meta.vocab_size);
  meta.format = options.format;
  meta.seed = options.seed;
  meta.val_fraction = options.val_fraction;
  meta.split_by = options.split_by;
  meta.text_field = options.text_field;
  meta.id_field = options.id_field;
  meta.inputs = options.inputs;
  for (const InputFile& file : reader.input_files()) meta.files.push_back({file.path.string(), file.size});
  return meta;
}

// What pass 1 depends on. val_fraction and the format matter in pass 2 alone.
nlohmann::json identity_of(const TokenMeta& meta, const DocumentReader& reader) {
  nlohmann::json files = nlohmann::json::array();
  for (const InputFile& file : reader.input_files())
    files.push_back({file.path.string(), file.id, file.size, file.modified});
  return {{"tokenizer", meta.tokenizer},
          {"fingerprint", meta.fingerprint},
          {"seed", meta.seed},
          {"split_by", split_by_name(meta.split_by)},
          {"text_field", meta.text_field},
          {"id_field", meta.id_field},
          {"files", files}};
}

// Both passes; `meta` describes their result then.
OrderedFiles run_passes(const PrepareOptions& options, const Tokenizer& tokenizer, DocumentReader& reader,
                        bool resumable, PrepareWork& work, const PrepareHooks& hooks,
                        const std::optional<TokenMeta>& old, TokenMeta& meta) {
  if (!work.state.complete) tokenise_documents(reader, tokenizer, options, resumable, work, hooks);
  meta.empty_documents = work.state.empty_documents;
  if (work.state.documents == 0) {
    work.give_up();
    fail("there is no text in the input: {} files, {} empty documents", reader.files(), meta.empty_documents);
  }
  if (meta.empty_documents > 0) spdlog::info("skipped {} empty documents", meta.empty_documents);
  OrderedFiles files = write_in_order(options, work, meta, hooks);
  if (old && (old->train.hash != meta.train.hash || old->val.hash != meta.val.hash)) {
    work.give_up();
    fail(
        "{} already holds a data set of {} training tokens with other content (the new one has {}); choose "
        "another folder or add --force to replace it",
        options.out.string(), old->train.tokens, meta.train.tokens);
  }
  return files;
}

}  // namespace

std::optional<TokenMeta> prepare_until(const PrepareOptions& options, const volatile std::sig_atomic_t* stop,
                                       const PrepareReport& progress) {
  if (!(options.val_fraction >= 0 && options.val_fraction < 1))
    usage_error("val_fraction is {}, but a number from 0 up to, not including, 1 is expected",
                options.val_fraction);
  if (options.out.empty()) usage_error("no output folder is given");
  const auto tokenizer = make_tokenizer(options.tokenizer, options.tokenizer_options);
  if (options.format == TokenFormat::raw && token_type_for(tokenizer->vocab_size()) != TokenType::u16)
    usage_error("the format raw has ids of 2 bytes, but the tokenizer {} has {} ids: use sps or llmc",
                tokenizer->name(), tokenizer->vocab_size());
  DocumentReader reader(options.inputs, {.text_field = options.text_field, .id_field = options.id_field});
  const auto& inputs = reader.input_files();
  const bool resumable =
      std::none_of(inputs.begin(), inputs.end(), [](const InputFile& f) { return f.standard_input(); });
  const bool new_folder = !is_there(options.out);
  const std::string tokenizer_text = tokenizer->to_json();
  const auto old = existing_data_set(options, *tokenizer, tokenizer_text);
  make_writable_directory(options.out);

  TokenMeta meta = description(options, *tokenizer, reader);
  bool finished = false;
  try {
    PrepareWork work(options.out, identity_of(meta, reader));
    if (work.saved())
      spdlog::info("going on after {} documents that an earlier run tokenised", work.state.documents);
    try {
      OrderedFiles files =
          run_passes(options, *tokenizer, reader, resumable, work, {progress, stop}, old, meta);
      publish(options.out, files, tokenizer_text, meta);
      work.give_up();  // it has become the data set
      finished = true;
    } catch (const PrepareStopped&) {
      if (resumable && !work.saved()) work.save();
    }
  } catch (...) {
    std::error_code ignored;
    if (new_folder) fs::remove(options.out, ignored);  // only if it is empty
    throw;
  }
  if (finished) return meta;
  std::error_code ignored;
  if (new_folder) fs::remove(options.out, ignored);
  return std::nullopt;
}

TokenMeta prepare(const PrepareOptions& options, const PrepareReport& progress) {
  return *prepare_until(options, nullptr, progress);
}

}  // namespace sps
