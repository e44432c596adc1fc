#include "model/family.h"
#include "base/error.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace sps {

namespace {

// How a family's windowed bands follow from w; {} where the family has no prediction tower.
enum class Kind { standard, sps, delayed, reverse, pause, tower };

struct Preset {
  std::string_view name;
  Kind kind;
  ReadLevel level;
  std::string_view kv, input, share, readout;
  bool tie_head;
};

constexpr Preset kPresets[] = {
    {"standard", Kind::standard, ReadLevel::same, "state", "row", "all", "x", true},
    {"sps", Kind::sps, ReadLevel::same, "state", "row", "all", "p", true},
    {"delayed_state", Kind::delayed, ReadLevel::same, "state", "row", "all", "p", true},
    {"reverse_sps", Kind::reverse, ReadLevel::same, "state", "row", "all", "x", true},
    {"free_pause", Kind::pause, ReadLevel::same, "state", "vector", "all", "p", true},
    {"two_tower", Kind::tower, ReadLevel::post, "own", "table", "none", "p", false},
    {"sequential", Kind::tower, ReadLevel::final, "own", "table", "none", "p", false},
};

constexpr Scale kScales[] = {
    {"demo", 4, 256, 4, 4, 768, 256},    {"xs", 8, 512, 8, 8, 1536, 4096},
    {"s", 12, 768, 12, 12, 2304, 4096},  {"m", 24, 1024, 16, 16, 3072, 4096},
    {"l", 36, 1280, 20, 20, 3840, 4096}, {"xl", 48, 1600, 25, 25, 4800, 4096},
    {"1b", 24, 1536, 16, 8, 6144, 8192},
};

const Preset& find_preset(std::string_view name) {
  for (const Preset& p : kPresets)
    if (p.name == name) return p;
  usage_error("model.family = '{}': expected one of {}", name, fmt::join(family_names(), ", "));
}

template <class T>
void if_auto(T& field, const T& automatic, const T& value) {
  if (field == automatic) field = value;
}
void if_auto(std::string& field, std::string_view value) {
  if (field.empty()) field = value;
}

}  // namespace

const std::vector<std::string>& family_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Preset& p : kPresets) all.emplace_back(p.name);
    return all;
  }();
  return names;
}

ModelKeys apply_family(ModelKeys k) {
  const Preset& preset = find_preset(k.family);
  const bool pooled = k.ffn == "pooled";
  // 64 is the first paper's window (tuned at S); the second paper's free pause has none.
  if_auto(k.window, kWindowAuto, preset.kind == Kind::pause ? int64_t{0} : int64_t{64});
  const Band windowed{0, k.window == kWindowFull ? Band::kInf : k.window};

  if_auto<int64_t>(k.state_layers, -1, k.layers);
  if_auto<int64_t>(k.pred_layers, -1, preset.kind == Kind::standard ? 0 : k.state_layers);
  if_auto<int64_t>(k.pred_width, -1, k.d_model);
  if (k.d_ffn.empty()) k.d_ffn = {3 * k.d_model};
  // Lists of widths say nothing about a tower of another depth: there the first width serves all blocks.
  if (k.pred_ffn.empty()) k.pred_ffn = k.pred_layers == k.state_layers ? k.d_ffn : std::vector{k.d_ffn[0]};
  if_auto(k.ffn, "separate");

  switch (preset.kind) {
    case Kind::standard:
      if_auto(k.band_xx, "0:inf");
      break;
    case Kind::sps:
      if_auto(k.band_xx, "0:inf");
      if_auto(k.band_xp, band_text({1, windowed.hi}));
      if_auto(k.band_px, "0:inf");
      if_auto(k.band_pp, band_text(windowed));
      break;
    case Kind::delayed:
    case Kind::reverse:
      if_auto(k.band_xx, band_text(windowed));
      if_auto(k.band_xp, "1:inf");
      if_auto(k.band_px, band_text(windowed));
      if_auto(k.band_pp, "0:inf");
      break;
    case Kind::pause:
      // w = 0 is the papers' free pause: no prediction keys at all, not even a row's own.
      if_auto(k.band_xx, "0:inf");
      if_auto(k.band_px, "0:inf");
      if_auto(k.band_pp, k.window == 0 ? "none" : band_text(windowed));
      break;
    case Kind::tower:
      if_auto(k.band_xx, "0:inf");
      if_auto(k.band_px, "0:inf");
      break;
  }
  for (std::string* band : {&k.band_xx, &k.band_xp, &k.band_px, &k.band_pp}) if_auto(*band, "none");

  const ReadLevel level =
      preset.level == ReadLevel::post && k.state_layers != k.pred_layers ? ReadLevel::top : preset.level;
  if_auto(k.read_level, name_of(level));
  if_auto(k.read_kv, preset.kv);
  if_auto(k.pred_input, preset.input);
  if_auto(k.share, pooled && preset.share == "all" ? "attention,norms" : preset.share);
  if_auto(k.readout, preset.readout);
  if_auto(k.tie_head, preset.tie_head ? "true" : "false");
  return k;
}

int64_t family_window(const ModelConfig& c) {
  Band band = Band::none();
  switch (find_preset(c.family).kind) {
    case Kind::standard:
    case Kind::tower:
      break;
    case Kind::sps:
    case Kind::pause:
      band = c.pp;
      break;
    case Kind::delayed:
    case Kind::reverse:
      band = c.xx;
      break;
  }
  if (band.empty()) return 0;
  return band.hi == Band::kInf ? kWindowFull : band.hi;
}

const Scale* find_scale(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kScales), std::end(kScales), [&](const Scale& s) { return s.name == name; });
  return found == std::end(kScales) ? nullptr : found;
}

std::string scale_names() {
  std::vector<std::string_view> names;
  for (const Scale& s : kScales) names.push_back(s.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace sps
