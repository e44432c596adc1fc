#include "data/check_ids.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/threads.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

// What a file was like when it was looked at, and for which vocabulary.
nlohmann::json state_of(const TokenFile& file) {
  std::error_code error;
  const auto modified = fs::last_write_time(file.path(), error).time_since_epoch().count();
  return {{"tokens", file.size()}, {"modified", int64_t(modified)}, {"vocab_size", file.vocab_size()}};
}

bool needs_look(const TokenFile& file) {
  return !file.meta() && !(file.type() == TokenType::u16 && file.vocab_size() > UINT16_MAX);
}

void look_at(const TokenFile& file) {
  constexpr int64_t kPiece = int64_t{1} << 22, kBlock = int64_t{1} << 14;
  spdlog::info("checking the ids of {} ({}) against the vocabulary", file.path().string(),
               human_count(double(file.size())));
  std::vector<std::exception_ptr> errors(size_t((file.size() + kPiece - 1) / kPiece));
  parallel_chunks(file.size(), kPiece, [&](int64_t begin, int64_t end) {
    try {
      std::vector<int32_t> ids(static_cast<size_t>(kBlock));
      for (; begin < end; begin += kBlock) file.read(begin, std::min(kBlock, end - begin), ids.data());
    } catch (...) {
      errors[size_t((end - 1) / kPiece)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

nlohmann::json read_note(const fs::path& note) {
  try {
    return parse_json(read_text(note), note.string());
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

void check_ids(std::span<const TokenFile* const> files, const fs::path& note) {
  const nlohmann::json before = read_note(note);
  nlohmann::json now = nlohmann::json::object();
  bool looked = false;
  for (const TokenFile* file : files) {
    if (!needs_look(*file)) continue;
    const std::string path = file->path().string();
    const nlohmann::json state = state_of(*file);
    if (!before.is_object() || !before.contains(path) || before[path] != state) {
      look_at(*file);
      looked = true;
    }
    now[path] = state;
  }
  if (!looked) return;
  try {
    write_atomically(note, dump_json(now) + "\n");
  } catch (const Error& e) {
    spdlog::warn("the ids will be looked at again: {}", e.what());
  }
}

}  // namespace sps
