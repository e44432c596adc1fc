#include "tokenizer/load_score_bpe.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/json.h"

namespace sps {

namespace {

using nlohmann::json;
using Kind = ScoredPiece::Kind;

constexpr std::string_view kFormat = "sps-score-bpe";
constexpr int kVersion = 1;
constexpr int32_t kLlamaBos = 1, kLlamaControls = 3;
constexpr std::string_view kByteKind = "byte", kControlKind = "control";

}  // namespace

void choose_eot(ScoreBpeModel& model, const TokenizerOptions& options, std::string_view what) {
  if (!options.pattern.empty()) usage_error("{}: a vocabulary with scores takes no pattern", what);
  const auto control = [](const ScoredPiece& piece) { return piece.kind == Kind::control; };
  if (!options.eot.empty()) {
    const auto found = std::find_if(model.pieces.begin(), model.pieces.end(), [&](const ScoredPiece& piece) {
      return control(piece) && piece.text == options.eot;
    });
    if (found == model.pieces.end()) usage_error("{} has no control token '{}'", what, options.eot);
    model.eot = int32_t(found - model.pieces.begin());
  } else if (options.eot_id >= 0 && size_t(options.eot_id) < model.pieces.size() &&
             control(model.pieces[size_t(options.eot_id)])) {
    model.eot = options.eot_id;
  }
}

ScoreBpeModel parse_llama2c_tokenizer(std::string_view bytes, std::string_view what,
                                      const TokenizerOptions& options) {
  const auto bad = [&](const std::string& why) { fail("{} is no tokenizer of llama2.c: {}", what, why); };
  uint32_t longest = 0;
  if (bytes.size() < sizeof longest) bad(fmt::format("it has {} bytes", bytes.size()));
  std::memcpy(&longest, bytes.data(), sizeof longest);
  bytes.remove_prefix(sizeof longest);
  ScoreBpeModel model{.pieces = {}, .bos = kLlamaBos, .eot = kLlamaBos};
  while (!bytes.empty()) {
    const size_t id = model.pieces.size();
    float score = 0;
    int32_t length = 0;
    if (bytes.size() < sizeof score + sizeof length)
      bad(fmt::format("it ends in the middle of piece {}", id));
    std::memcpy(&score, bytes.data(), sizeof score);
    std::memcpy(&length, bytes.data() + sizeof score, sizeof length);
    bytes.remove_prefix(sizeof score + sizeof length);
    if (length < 0 || uint32_t(length) > longest)
      bad(fmt::format("piece {} has {} bytes, but the longest is said to have {}", id, length, longest));
    if (size_t(length) > bytes.size())
      bad(fmt::format("piece {} has {} bytes, but the file has {} more", id, length, bytes.size()));
    ScoredPiece piece{std::string(bytes.substr(0, size_t(length))), score};
    bytes.remove_prefix(size_t(length));
    if (id < size_t(kLlamaControls)) piece.kind = Kind::control;
    if (id >= size_t(kLlamaControls) && id < size_t(kLlamaControls) + 256) {
      piece.kind = Kind::byte;
      const std::string expected = fmt::format("<0x{:02X}>", id - size_t(kLlamaControls));
      if (piece.text != expected) bad(fmt::format("piece {} is not {}", id, expected));
    }
    model.pieces.push_back(std::move(piece));
  }
  choose_eot(model, options, what);
  return model;
}

bool is_score_bpe_json(std::string_view text) {
  constexpr size_t kBeginning = 128;
  return text.substr(0, kBeginning).find(fmt::format("\"{}\"", kFormat)) != std::string_view::npos;
}

std::string to_score_bpe_json(const ScoreBpeModel& model) {
  // A line for each piece. What tells the format stands first.
  std::string text = fmt::format(
      "{{\n  \"format\": \"{}\",\n  \"version\": {},\n  \"bos\": {},\n  \"eot\": {},\n  \"pieces\": [",
      kFormat, kVersion, model.bos, model.eot);
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const ScoredPiece& piece = model.pieces[i];
    json row{piece.text, double(piece.score)};
    if (piece.kind != Kind::text) row.push_back(piece.kind == Kind::byte ? kByteKind : kControlKind);
    text += fmt::format("{}\n    {}", i > 0 ? "," : "", dump_json(row));
  }
  return text + "\n  ]\n}\n";
}

ScoreBpeModel parse_score_bpe_json(std::string_view text, std::string_view what,
                                   const TokenizerOptions& options) {
  const json file = parse_json(text, what);
  const auto at = [&](const char* key) -> const json& {
    if (!file.is_object() || !file.contains(key)) fail("{} has no '{}'", what, key);
    return file[key];
  };
  if (at("format") != kFormat)
    fail("{} has the format {}, expected '{}'", what, dump_json(at("format")), kFormat);
  if (at("version") != kVersion)
    fail("{} has version {} of its format, expected {}", what, dump_json(at("version")), kVersion);
  const auto id_at = [&](const char* key) {
    const json& id = at(key);
    if (!id.is_number_integer() || id < -1 || id > INT32_MAX)
      fail("{}: {} is {}, expected an id", what, key, dump_json(id));
    return id.get<int32_t>();
  };
  ScoreBpeModel model{.pieces = {}, .bos = id_at("bos"), .eot = id_at("eot")};
  const json& pieces = at("pieces");
  if (!pieces.is_array()) fail("{}: 'pieces' is no list", what);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const json& row = pieces[i];
    const bool plain = row.is_array() && row.size() == 2, marked = row.is_array() && row.size() == 3;
    if (!(plain || marked) || !row[0].is_string() || !row[1].is_number() ||
        (marked && row[2] != kByteKind && row[2] != kControlKind))
      fail("{}: piece {} is {}, expected a text, a score and perhaps \"byte\" or \"control\"", what, i,
           dump_json(row).substr(0, 60));
    model.pieces.push_back({row[0].get<std::string>(), row[1].get<float>(),
                            plain                 ? Kind::text
                            : row[2] == kByteKind ? Kind::byte
                                                  : Kind::control});
  }
  choose_eot(model, options, what);
  return model;
}

}  // namespace sps
