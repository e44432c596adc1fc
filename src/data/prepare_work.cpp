#include "data/prepare_work.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

constexpr int kVersion = 1;
constexpr size_t kBufferBytes = size_t{1} << 20;

}  // namespace

PrepareWork::PrepareWork(const fs::path& out, nlohmann::json identity)
    : folder_(out / ".prepare"), identity_(std::move(identity)) {
  identity_["version"] = kVersion;
  make_writable_directory(folder_);
  // Held until the process ends, however it ends.
  lock_ = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0 || ::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    if (lock_ >= 0) ::close(lock_);
    fail("{} is in use: another process is preparing {}", folder_.string(), out.string());
  }
  try {
    if (const auto found = load()) {
      state = *found;
      saved_ = true;
    } else {
      std::error_code ignored;
      fs::remove(folder_ / "journal.json", ignored);
    }
    open_files(state);
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

PrepareWork::~PrepareWork() {
  if (!saved_ || !keep_) {
    tokens_.reset();
    records_.reset();
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  ::close(lock_);
}

std::optional<PrepareState> PrepareWork::load() {
  const fs::path path = folder_ / "journal.json";
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  try {
    const nlohmann::json journal = parse_json(read_text(path), path.string());
    if (journal.at("identity") != identity_) {
      spdlog::info("{} holds work on other inputs or with other options: starting from the beginning",
                   folder_.string());
      return std::nullopt;
    }
    PrepareState at;
    at.position = {journal.at("file").get<size_t>(), journal.at("record").get<uint64_t>()};
    at.documents = journal.at("documents").get<uint64_t>();
    at.empty_documents = journal.at("empty_documents").get<uint64_t>();
    at.token_bytes = journal.at("token_bytes").get<uint64_t>();
    at.complete = journal.at("complete").get<bool>();
    // Both must be there in full before either is cut.
    const auto there = [&](const char* name) {
      const auto bytes = fs::file_size(folder_ / name, error);
      return error ? 0 : bytes;
    };
    if (there("tokens") < at.token_bytes || there("records") / sizeof(DocumentRecord) < at.documents)
      fail("the files beside it are too short");
    return at;
  } catch (const std::exception& e) {
    spdlog::warn("{} cannot be continued ({}): starting from the beginning", path.string(), e.what());
    return std::nullopt;
  }
}

void PrepareWork::open_files(const PrepareState& at) {
  tokens_ = std::make_unique<WorkFile>(folder_ / "tokens", at.token_bytes);
  records_ = std::make_unique<WorkFile>(folder_ / "records", at.documents * sizeof(DocumentRecord));
}

void PrepareWork::add(const TokenParts& tokens, uint64_t split_key, uint64_t text_key, uint64_t text_bytes) {
  uint64_t bytes = 0;
  for (const auto& part : tokens) bytes += part.size();
  record_buffer_.push_back({split_key, text_key, state.token_bytes, bytes, text_bytes});
  ++state.documents;
  state.token_bytes += bytes;
  for (const auto& part : tokens) {
    if (token_buffer_.size() + part.size() > kBufferBytes) flush();
    if (part.size() > kBufferBytes)
      tokens_->append(part.data(), part.size());
    else
      token_buffer_.insert(token_buffer_.end(), part.begin(), part.end());
  }
}

void PrepareWork::flush() {
  tokens_->append(token_buffer_.data(), token_buffer_.size());
  token_buffer_.clear();
  records_->append(record_buffer_.data(), record_buffer_.size() * sizeof(DocumentRecord));
  record_buffer_.clear();
}

void PrepareWork::save() {
  flush();
  tokens_->sync();
  records_->sync();
  write_atomically(folder_ / "journal.json",
                   dump_json(nlohmann::json{{"identity", identity_},
                                            {"file", state.position.file},
                                            {"record", state.position.record},
                                            {"documents", state.documents},
                                            {"empty_documents", state.empty_documents},
                                            {"token_bytes", state.token_bytes},
                                            {"complete", state.complete}}) +
                       "\n");
  saved_ = true;
}

}  // namespace sps
