#include "model/checkpoint_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"

namespace sps {

namespace fs = std::filesystem;

namespace {

using nlohmann::json;

constexpr int kFormat = 1;
constexpr size_t kDigits = 15;
constexpr std::string_view kRolling = "rolling", kNamed = "tokens";

struct KindRow {
  CheckpointKind kind;
  std::string_view prefix, suffix, name;
};
constexpr std::array kKinds{
    KindRow{CheckpointKind::rolling, kRolling, "", "rolling"},
    KindRow{CheckpointKind::named, kNamed, "", "named"},
    KindRow{CheckpointKind::pre_decay, kNamed, "-pre-decay", "pre-decay"},
    KindRow{CheckpointKind::final, kNamed, "-final", "final"},
};

const KindRow& row_of(CheckpointKind kind) {
  for (const KindRow& row : kKinds)
    if (row.kind == kind) return row;
  SPS_CHECK(!"a checkpoint kind is missing in the table");
  return kKinds[0];
}

// state.json, checked: its own checksum, its format, and the fields that the reader relies on.
struct Manifest {
  CheckpointName name;
  json state;
  std::vector<CheckpointFile> files;
};

std::string self_check(json manifest) {
  manifest.erase("check");
  return hex(hash64(dump_json(manifest)));
}

std::optional<uint64_t> from_hex(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Manifest read_manifest(const fs::path& path) {
  const fs::path file = path / kStateFile;
  std::error_code error;
  if (!fs::exists(file, error))
    fail("{} is not a complete checkpoint: {} is missing", path.string(), kStateFile);
  const json value = parse_json(read_text(file), file.string());
  if (!value.is_object() || !value.contains("check") || value["check"] != self_check(value))
    fail("{} is damaged: its contents do not match its checksum", file.string());
  if (value.value("format", json()) != kFormat)
    fail("{} has format {}, expected {}", file.string(), dump_json(value.value("format", json())), kFormat);
  Manifest manifest;
  try {
    const auto& kind = value.at("kind").get_ref<const std::string&>();
    const auto row =
        std::find_if(kKinds.begin(), kKinds.end(), [&](const KindRow& r) { return r.name == kind; });
    if (row == kKinds.end()) fail("{} has the unknown kind '{}'", file.string(), kind);
    manifest.name = {row->kind, value.at("tokens").get<int64_t>()};
    manifest.state = value.at("state");
    for (const auto& [name, entry] : value.at("files").items()) {
      const auto hash = from_hex(entry.at("xxh3").get<std::string>());
      if (!hash) fail("{} gives no valid hash for {}", file.string(), name);
      manifest.files.push_back({name, {entry.at("bytes").get<uint64_t>(), *hash}});
    }
  } catch (const json::exception& e) {
    fail("{} is not the state of a checkpoint: {}", file.string(), e.what());
  }
  return manifest;
}

void check_sizes(const fs::path& path, const Manifest& manifest) {
  for (const CheckpointFile& file : manifest.files) {
    std::error_code error;
    const uint64_t bytes = fs::file_size(path / file.name, error);
    if (error) fail("{} cannot be read: {}", (path / file.name).string(), error.message());
    if (bytes != file.written.bytes)
      fail("{} has {} bytes, expected {}", (path / file.name).string(), bytes, file.written.bytes);
  }
}

void check_hash(const fs::path& path, const Manifest& manifest, const char* name) {
  const auto file = std::find_if(manifest.files.begin(), manifest.files.end(),
                                 [&](const CheckpointFile& f) { return f.name == name; });
  if (file == manifest.files.end()) fail("{} does not list {}", (path / kStateFile).string(), name);
  const MappedFile mapped(path / name);
  const uint64_t hash = hash64(mapped.bytes().data(), mapped.bytes().size());
  if (hash != file->written.hash)
    fail("{} is damaged: its hash is {}, expected {}", (path / name).string(), hex(hash),
         hex(file->written.hash));
}

bool lists(const Manifest& manifest, const char* name) {
  return std::any_of(manifest.files.begin(), manifest.files.end(),
                     [&](const CheckpointFile& f) { return f.name == name; });
}

}  // namespace

std::string CheckpointName::text() const {
  const KindRow& row = row_of(kind);
  return fmt::format("{}-{:0{}}{}", row.prefix, tokens, kDigits, row.suffix);
}

std::optional<CheckpointName> CheckpointName::parse(std::string_view text) {
  for (const KindRow& row : kKinds) {
    if (text.size() != row.prefix.size() + 1 + kDigits + row.suffix.size()) continue;
    if (!text.starts_with(row.prefix) || !text.ends_with(row.suffix)) continue;
    CheckpointName name{row.kind, 0};
    const std::string_view digits = text.substr(row.prefix.size() + 1, kDigits);
    if (digits.find_first_not_of("0123456789") != std::string_view::npos) continue;
    for (const char c : digits) name.tokens = 10 * name.tokens + (c - '0');
    if (name.text() == text) return name;
  }
  return std::nullopt;
}

fs::path checkpoints_dir(const fs::path& run_dir) {
  return run_dir / "checkpoints";
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run_dir) {
  std::vector<CheckpointInfo> found;
  const fs::path dir = checkpoints_dir(run_dir);
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = CheckpointName::parse(entry->path().filename().string());
    if (!name) continue;
    try {
      const Manifest manifest = read_manifest(entry->path());
      check_sizes(entry->path(), manifest);
      if (manifest.name != *name)
        fail("{} holds the checkpoint {}", entry->path().string(), manifest.name.text());
      found.push_back({*name, entry->path()});
    } catch (const Error& e) {
      spdlog::warn("ignoring an incomplete checkpoint: {}", e.what());
    }
  }
  if (error && error != std::errc::no_such_file_or_directory)
    fail("the checkpoints in {} cannot be listed: {}", dir.string(), error.message());
  std::sort(found.begin(), found.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.name.before(b.name); });
  return found;
}

std::optional<CheckpointInfo> latest_checkpoint(const fs::path& run_dir) {
  std::vector<CheckpointInfo> all = list_checkpoints(run_dir);
  if (all.empty()) return std::nullopt;
  return std::move(all.back());
}

fs::path find_checkpoint(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) usage_error("the checkpoint {} does not exist", path.string());
  if (fs::exists(path / kStateFile, ignored)) return path;
  if (fs::is_directory(path, ignored))
    if (const auto latest = latest_checkpoint(path)) return latest->path;
  usage_error("{} is neither a checkpoint nor a run with a complete checkpoint", path.string());
}

LoadedCheckpoint load_checkpoint(const fs::path& path, CheckpointParts parts) {
  const Manifest manifest = read_manifest(path);
  check_sizes(path, manifest);
  const bool with_optimizer = parts == CheckpointParts::all && lists(manifest, kOptimizerFile);
  check_hash(path, manifest, kConfigFile);
  check_hash(path, manifest, kWeightsFile);
  const bool has_tokenizer = lists(manifest, kTokenizerFile);
  if (has_tokenizer) check_hash(path, manifest, kTokenizerFile);
  if (with_optimizer) check_hash(path, manifest, kOptimizerFile);
  const fs::path config = path / kConfigFile;
  LoadedCheckpoint loaded{.path = path,
                          .kind = manifest.name.kind,
                          .tokens = manifest.name.tokens,
                          .config = parse_json(read_text(config), config.string()),
                          .state = manifest.state,
                          .weights = SafeTensors(path / kWeightsFile),
                          .has_tokenizer = has_tokenizer,
                          .optimizer = {}};
  if (with_optimizer) loaded.optimizer.emplace(path / kOptimizerFile);
  return loaded;
}

std::string checkpoint_state_text(const CheckpointName& name, const json& state,
                                  const std::vector<CheckpointFile>& files) {
  json manifest = {{"format", kFormat},
                   {"kind", row_of(name.kind).name},
                   {"tokens", name.tokens},
                   {"state", state},
                   {"files", json::object()}};
  for (const CheckpointFile& file : files)
    manifest["files"][file.name] = {{"bytes", file.written.bytes}, {"xxh3", hex(file.written.hash)}};
  manifest["check"] = self_check(manifest);
  return storable_json(manifest, "the trainer state");
}

}  // namespace sps
