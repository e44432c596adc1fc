#include "train/metrics.h"

#include <string>
#include <string_view>

#include "base/error.h"
#include "base/log.h"

namespace sps {

namespace {

namespace fs = std::filesystem;

// Whether the line belongs to a step that will not be run again. Damaged lines belong to none.
bool survives(std::string_view line, std::optional<int64_t> resumed_tokens,
              std::optional<int64_t> evaluated_tokens) {
  if (!resumed_tokens) return false;
  const auto value = nlohmann::json::parse(line.begin(), line.end(), nullptr, false);
  if (!value.is_object() || !value.contains("tokens") || !value["tokens"].is_number_integer()) return false;
  const auto tokens = value["tokens"].get<int64_t>();
  if (value.contains("val_loss") && evaluated_tokens && tokens > *evaluated_tokens) return false;
  return tokens <= *resumed_tokens;
}

fs::path shortened(const fs::path& path, std::optional<int64_t> resumed_tokens,
                   std::optional<int64_t> evaluated_tokens) {
  std::error_code error;
  if (!fs::exists(path, error)) return path;
  const std::string text = read_text(path);
  std::string kept;
  size_t dropped = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;  // the torn last line
    const std::string_view line(text.data() + begin, end - begin);
    if (survives(line, resumed_tokens, evaluated_tokens))
      kept.append(text, begin, end + 1 - begin);
    else
      ++dropped;
    begin = end + 1;
  }
  if (kept.size() == text.size()) return path;
  write_atomically(path, kept);
  if (dropped > 0) spdlog::info("{}: dropped {} lines of steps that are run again", path.string(), dropped);
  return path;
}

}  // namespace

MetricsLog::MetricsLog(const fs::path& path, std::optional<int64_t> resumed_tokens,
                       std::optional<int64_t> evaluated_tokens)
    : file_(shortened(path, resumed_tokens, evaluated_tokens)) {}

void MetricsLog::write(const nlohmann::ordered_json& line) {
  SPS_CHECK(line.is_object() && line.contains("tokens") && line["tokens"].is_number_integer());
  file_.line(dump_json(line));
}

}  // namespace sps
