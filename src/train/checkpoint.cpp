#include "train/checkpoint.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"

namespace sps {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kTemporary = ".tmp-";

fs::path temporary_for(const fs::path& path) {
  return fmt::format("{}{}{}", path.string(), kTemporary, ::getpid());
}

// The process in "<checkpoint>.tmp-<pid>"; 0 for other names.
pid_t writer_of(const std::string& name) {
  const size_t at = name.rfind(kTemporary);
  if (at == std::string::npos || !CheckpointName::parse(name.substr(0, at))) return 0;
  const char* begin = name.data() + at + kTemporary.size();
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), pid);
  return error == std::errc() && end == name.data() + name.size() && pid > 0 ? pid : 0;
}

bool runs(pid_t pid) {
  return ::kill(pid, 0) == 0 || errno != ESRCH;
}

void remove_or_warn(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) spdlog::warn("cannot remove {}: {}", path.string(), error.message());
}

// A folder that disappears unless it has been published.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {
    remove_or_warn(path_);
    std::error_code error;
    fs::create_directory(path_, error);
    if (error) fail("cannot create the folder {}: {}", path_.string(), error.message());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

CheckpointFile write_text(const fs::path& folder, const char* name, const std::string& text) {
  write_atomically(folder / name, text);
  return {name, {text.size(), hash64(text)}};
}

void remove_older_rolling(const fs::path& dir, int64_t tokens) {
  std::vector<fs::path> older;
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = CheckpointName::parse(entry->path().filename().string());
    if (name && name->kind == CheckpointKind::rolling && name->tokens < tokens)
      older.push_back(entry->path());
  }
  for (const fs::path& path : older) {
    // A kill in the middle must not leave half of a checkpoint under its name.
    const fs::path condemned = temporary_for(path);
    fs::rename(path, condemned, error);
    if (error)
      spdlog::warn("cannot remove {}: {}", path.string(), error.message());
    else
      remove_or_warn(condemned);
  }
}

// The process that was writing a file which AtomicFile has not moved to its place
// (".config.toml.123-0.partial"); 0 for other files.
pid_t writer_of_partial(const std::string& name) {
  constexpr std::string_view suffix = ".partial";
  if (!name.starts_with('.') || !name.ends_with(suffix)) return 0;
  const std::string_view stem = std::string_view(name).substr(0, name.size() - suffix.size());
  const std::string_view writer = stem.substr(stem.rfind('.') + 1);
  pid_t pid = 0;
  const auto [end, ec] = std::from_chars(writer.data(), writer.data() + writer.size(), pid);
  return ec == std::errc() && end != writer.data() + writer.size() && *end == '-' ? pid : 0;
}

}  // namespace

void write_checkpoint(const fs::path& path, const Checkpoint& checkpoint) {
  const CheckpointName name{checkpoint.kind, checkpoint.tokens};
  SPS_CHECK(CheckpointName::parse(name.text()) == name);
  try {
    const TemporaryFolder temporary(temporary_for(path));
    const fs::path& folder = temporary.path();
    std::vector<CheckpointFile> files;
    files.push_back(write_text(folder, kConfigFile, storable_json(checkpoint.config, "the configuration")));
    if (!checkpoint.tokenizer.empty())
      files.push_back(write_text(folder, kTokenizerFile, checkpoint.tokenizer));
    const Metadata metadata{{"format", "sps"}};
    files.push_back({kWeightsFile, write_safetensors(folder / kWeightsFile, checkpoint.weights, metadata)});
    if (!checkpoint.optimizer.empty())
      files.push_back(
          {kOptimizerFile, write_safetensors(folder / kOptimizerFile, checkpoint.optimizer, metadata)});
    write_atomically(folder / kStateFile, checkpoint_state_text(name, checkpoint.state, files));
    publish_directory(folder, path);
  } catch (const Error& e) {
    fail("the checkpoint {} could not be saved: {}", path.string(), e.what());
  }
}

void save_checkpoint(const fs::path& run_dir, const Checkpoint& checkpoint) {
  const fs::path dir = checkpoints_dir(run_dir);
  make_writable_directory(dir);
  write_checkpoint(dir / CheckpointName{checkpoint.kind, checkpoint.tokens}.text(), checkpoint);
  if (checkpoint.kind == CheckpointKind::rolling) remove_older_rolling(dir, checkpoint.tokens);
}

void remove_leftovers(const fs::path& run_dir) {
  std::vector<fs::path> leftovers;
  const auto collect = [&](const fs::path& folder, pid_t (*writer)(const std::string&)) {
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      // This process is not saving now: what carries its number is from an earlier one that had the same.
      const pid_t pid = writer(entry->path().filename().string());
      if (pid != 0 && (pid == ::getpid() || !runs(pid))) leftovers.push_back(entry->path());
    }
  };
  collect(checkpoints_dir(run_dir), writer_of);
  collect(run_dir, writer_of_partial);
  for (const fs::path& path : leftovers) {
    spdlog::info("removing {}, left by a process that was stopped while saving", path.string());
    remove_or_warn(path);
  }
}

}  // namespace sps
