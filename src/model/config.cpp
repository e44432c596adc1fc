#include "model/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "base/error.h"
#include "model/family.h"

namespace sps {

namespace {

template <class E>
struct Names {
  E value;
  std::string_view name;
};
constexpr Names<ReadLevel> kReadLevels[] = {{ReadLevel::same, "same"},
                                            {ReadLevel::post, "post"},
                                            {ReadLevel::top, "top"},
                                            {ReadLevel::final, "final"},
                                            {ReadLevel::list, "list"}};
constexpr Names<ReadKv> kReadKvs[] = {{ReadKv::state, "state"}, {ReadKv::own, "own"}};
constexpr Names<PredInput> kPredInputs[] = {{PredInput::row, "row"},
                                            {PredInput::vector, "vector"},
                                            {PredInput::table, "table"},
                                            {PredInput::token, "token"},
                                            {PredInput::state, "state"}};
constexpr Names<FfnMode> kFfnModes[] = {{FfnMode::separate, "separate"}, {FfnMode::pooled, "pooled"}};
constexpr Names<Readout> kReadouts[] = {{Readout::state, "x"}, {Readout::pred, "p"}};

template <class E, size_t N>
std::string_view name_in(const Names<E> (&names)[N], E value) {
  for (const auto& n : names)
    if (n.value == value) return n.name;
  return "?";
}

template <class E, size_t N>
E value_in(const Names<E> (&names)[N], std::string_view key, std::string_view text) {
  std::string known;
  for (const auto& n : names) {
    if (n.name == text) return n.value;
    if (n.name != "list") known += (known.empty() ? "" : ", ") + std::string(n.name);
  }
  usage_error("{} = '{}': expected one of {}", key, text, known);
}

bool parse_int(std::string_view text, int64_t& out) {
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), out);
  return ec == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> split(std::string_view text, char sep) {
  std::vector<std::string_view> parts;
  for (size_t at = 0;;) {
    const size_t next = text.find(sep, at);
    parts.push_back(text.substr(at, next == std::string_view::npos ? next : next - at));
    if (next == std::string_view::npos) return parts;
    at = next + 1;
  }
}

Share parse_share(std::string_view text) {
  if (text == "all") return {true, true, true};
  Share share;
  if (text == "none") return share;
  for (const std::string_view part : split(text, ',')) {
    if (part == "attention")
      share.attention = true;
    else if (part == "norms")
      share.norms = true;
    else if (part == "ffn")
      share.ffn = true;
    else
      usage_error("model.share = '{}': expected all, none, or a list of attention, norms, ffn", text);
  }
  return share;
}

bool parse_bool(std::string_view key, std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  usage_error("{} = '{}': expected true or false", key, text);
}

void positive(std::string_view key, int64_t value) {
  if (value < 1) usage_error("{} = {}: expected a positive number", key, value);
}

// Beyond any model, and small enough that products of them stay far below 2^63 and lists of blocks are short.
void check_sizes(const ModelKeys& k) {
  constexpr int64_t layers = 4096, width = int64_t{1} << 20, ffn = int64_t{1} << 24,
                    rows = std::numeric_limits<int32_t>::max(), context = int64_t{1} << 30;
  const auto at_most = [](std::string_view key, int64_t value, int64_t most) {
    if (value > most) usage_error("{} = {}: expected at most {}", key, value, most);
  };
  at_most("model.layers", k.layers, layers);
  at_most("model.state_layers", k.state_layers, layers);
  at_most("model.pred_layers", k.pred_layers, layers);
  at_most("model.d_model", k.d_model, width);
  at_most("model.pred_width", k.pred_width, width);
  at_most("model.heads", k.heads, width);
  at_most("model.kv_heads", k.kv_heads, width);
  at_most("model.head_dim", k.head_dim, width);
  for (const int64_t w : k.d_ffn) at_most("model.d_ffn", w, ffn);
  for (const int64_t w : k.pred_ffn) at_most("model.pred_ffn", w, ffn);
  at_most("model.vocab", k.vocab, rows);
  at_most("model.eot", k.eot, rows);
  at_most("model.bos", k.bos, rows);
  at_most("model.context", k.context, context);
}

std::vector<int64_t> per_block(std::string_view key, const std::vector<int64_t>& widths, int64_t layers) {
  for (const int64_t w : widths)
    if (w < 0) usage_error("{} has the width {}: expected 0 (no feed-forward part) or more", key, w);
  if (widths.size() == 1) return std::vector<int64_t>(size_t(layers), widths[0]);
  if (int64_t(widths.size()) != layers)
    usage_error("{} lists {} widths: expected one, or one for each of the {} blocks", key, widths.size(),
                layers);
  return widths;
}

void resolve_levels(ModelConfig& c, const std::string& text) {
  const int64_t ls = c.state.layers, lp = c.pred.layers;
  if (c.read_level != ReadLevel::list) {
    const bool equal = ls == lp;
    if ((c.read_level == ReadLevel::same || c.read_level == ReadLevel::post) && !equal)
      usage_error(
          "model.read.level = {} needs state and prediction towers of the same depth, found {} and {}: use "
          "top or final",
          name_of(c.read_level), ls, lp);
    if (c.read_level == ReadLevel::top && lp > ls)
      usage_error(
          "model.read.level = top needs at most as many prediction blocks as state blocks, found {} and {}",
          lp, ls);
    for (int64_t i = 0; i < lp; ++i) {
      switch (c.read_level) {
        case ReadLevel::same:
          c.levels.push_back(i);
          break;
        case ReadLevel::post:
          c.levels.push_back(i + 1);
          break;
        case ReadLevel::top:
          c.levels.push_back(ls - lp + 1 + i);
          break;
        default:
          c.levels.push_back(ls);
          break;
      }
    }
    return;
  }
  for (const std::string_view part : split(text, ',')) {
    int64_t level = 0;
    if (!parse_int(part, level))
      usage_error(
          "model.read.level = '{}': expected same, post, top, final, or a list of levels such as 6,6,4",
          text);
    if (level < 0 || level > ls)
      usage_error("model.read.level names level {}: the state tower has levels 0 to {}", level, ls);
    c.levels.push_back(level);
  }
  if (int64_t(c.levels.size()) != lp)
    usage_error("model.read.level lists {} levels: expected one for each of the {} prediction blocks",
                c.levels.size(), lp);
  // One spelling for one model: a list that says what a word says becomes the word.
  for (const ReadLevel word : {ReadLevel::same, ReadLevel::post, ReadLevel::top, ReadLevel::final}) {
    if ((word == ReadLevel::same || word == ReadLevel::post) && ls != lp) continue;
    if (word == ReadLevel::top && lp > ls) continue;
    ModelConfig other = c;
    other.read_level = word;
    other.levels.clear();
    resolve_levels(other, "");
    if (other.levels == c.levels) {
      c.read_level = word;
      return;
    }
  }
}

void check_backbone(const ModelConfig& c) {
  const auto tower = [&](const Tower& t, std::string_view width_key, std::string_view heads_key) {
    positive(width_key, t.width);
    if (t.width % c.head_dim != 0)
      usage_error("{} = {} is no multiple of model.head_dim = {}", width_key, t.width, c.head_dim);
    positive(heads_key, t.heads);
    if (t.kv_heads < 1 || t.heads % t.kv_heads != 0)
      usage_error("{} = {} heads cannot share {} key heads evenly (model.kv_heads)", heads_key, t.heads,
                  t.kv_heads);
  };
  positive("model.head_dim", c.head_dim);
  if (c.head_dim % 2 != 0) usage_error("model.head_dim = {}: rotary pairs need an even number", c.head_dim);
  if (c.head_dim > 256) usage_error("model.head_dim = {}: at most 256 is supported", c.head_dim);
  positive("model.state_layers", c.state.layers);
  tower(c.state, "model.d_model", "model.heads");
  if (c.has_pred()) tower(c.pred, "model.pred_width", "model.pred_width / model.head_dim");
  positive("model.context", c.context);
  if (c.vocab < 2) usage_error("model.vocab = {}: expected at least 2", c.vocab);
  if (c.eot < 0 || c.eot >= c.vocab)
    usage_error("model.vocab = {} is too small: the end-of-text id is {}", c.vocab, c.eot);
  if (c.bos < -1 || c.bos >= c.vocab)
    usage_error("model.bos = {}: expected -1 (none) or an id below model.vocab = {}", c.bos, c.vocab);
  if (c.pred_input == PredInput::row && c.has_pred() && (c.pred_row < 0 || c.pred_row >= c.vocab))
    usage_error("model.vocab = {} is too small: pred_input = row starts from row {}", c.vocab, c.pred_row);
  if (!(c.rope_fraction > 0 && c.rope_fraction <= 1))
    usage_error("model.rope_fraction = {}: expected a number above 0 and at most 1", c.rope_fraction);
  if (!(c.rope_theta > 0)) usage_error("model.rope_theta = {}: expected a positive number", c.rope_theta);
  if (!(c.norm_eps > 0)) usage_error("model.norm_eps = {}: expected a positive number", c.norm_eps);
  if (c.sliding_window < 0)
    usage_error("model.sliding_window = {}: expected 0 (none) or more", c.sliding_window);
  if (c.full_attention_every < 0)
    usage_error("model.full_attention_every = {}: expected 0 (never) or more", c.full_attention_every);
}

// Two-tower spec, section 5.2.
void check_keys(const ModelConfig& c) {
  if (c.xx.empty() || c.xx.lo != 0)
    usage_error("model.band.xx = {}: a state row must see itself (0:...)", band_text(c.xx));
  if (!c.has_pred()) {
    if (c.readout == Readout::pred)
      usage_error("model.readout = p needs a prediction tower (model.pred_layers > 0)");
    return;
  }
  const bool equal = c.state.layers == c.pred.layers && c.state.width == c.pred.width;
  if (!c.xp.empty() && c.xp.lo < 1)
    usage_error(
        "model.band.xp = {}: p_i comes after x_i, so a state row sees prediction rows from 1 step back",
        band_text(c.xp));
  const auto sees_self = [](Band b) { return !b.empty() && b.lo == 0; };
  if (!sees_self(c.px) && !sees_self(c.pp))
    usage_error("model.band.px = {} and model.band.pp = {}: a prediction row must see step 0 in one of them",
                band_text(c.px), band_text(c.pp));
  if ((!c.xp.empty() || c.ffn == FfnMode::pooled) && (c.read_level != ReadLevel::same || !equal))
    usage_error(
        "{} needs read.level = same and towers of equal depth and width: the streams advance together",
        c.xp.empty() ? "model.ffn = pooled" : "model.band.xp");
  if (c.read_kv == ReadKv::state && c.state.width != c.pred.width)
    usage_error("model.read.kv = state needs towers of equal width, found {} and {}: use own", c.state.width,
                c.pred.width);
  if (c.share.any() && !equal)
    usage_error("model.share = {} needs towers of equal depth and width", share_text(c.share));
  for (size_t b = 0; c.share.norms && b < c.state.ffn.size(); ++b)
    if ((c.state.ffn[b] == 0) != (c.pred.ffn[b] == 0))
      usage_error(
          "model.share = {} needs a second norm in both towers or in none: block {} has widths {} "
          "(model.d_ffn) and {} "
          "(model.pred_ffn)",
          share_text(c.share), b, c.state.ffn[b], c.pred.ffn[b]);
  if (c.ffn == FfnMode::pooled) {
    if (c.readout == Readout::state) usage_error("model.ffn = pooled needs model.readout = p");
    if (c.share.ffn)
      usage_error("model.ffn = pooled and share = ffn exclude each other: a pooled layer has one FFN");
    for (const int64_t w : c.state.ffn)
      if (w != c.state.ffn[0] || w == 0)
        usage_error("model.ffn = pooled needs one positive FFN width for all blocks");
  }
  if ((c.share.ffn || c.ffn == FfnMode::pooled) && c.state.ffn != c.pred.ffn)
    usage_error("sharing the FFN needs equal widths (model.d_ffn, model.pred_ffn) in both towers");
  if (c.tie_head && (c.readout == Readout::pred ? c.pred.width : c.state.width) != c.state.width)
    usage_error("model.tie_head = true needs a prediction tower as wide as the embedding ({}), found {}",
                c.state.width, c.pred.width);
  if (c.pred_input == PredInput::state && (!c.xp.empty() || c.ffn == FfnMode::pooled))
    usage_error(
        "model.pred_input = state starts from the last state residual, so the state cannot depend on p ({})",
        c.xp.empty() ? "model.ffn = pooled" : "model.band.xp");
  if ((c.pred_input == PredInput::state || c.pred_input == PredInput::token ||
       c.pred_input == PredInput::row) &&
      c.state.width != c.pred.width)
    usage_error("model.pred_input = {} needs towers of equal width, found {} and {}", name_of(c.pred_input),
                c.state.width, c.pred.width);
  if (c.read_kv == ReadKv::state && c.read_level != ReadLevel::same && c.sliding_window > 0 &&
      c.rope_fraction < 1)
    usage_error(
        "model.read.kv = state with a sliding window and rope_fraction < 1 needs read.level = same: the keys "
        "of other "
        "blocks are rotated differently");
  if (c.readout == Readout::state && c.xp.empty())
    usage_error(
        "model.readout = x with a prediction tower needs model.band.xp: nothing would read the prediction "
        "stream");
}

}  // namespace

std::string_view name_of(ReadLevel v) {
  return name_in(kReadLevels, v);
}
std::string_view name_of(ReadKv v) {
  return name_in(kReadKvs, v);
}
std::string_view name_of(PredInput v) {
  return name_in(kPredInputs, v);
}
std::string_view name_of(FfnMode v) {
  return name_in(kFfnModes, v);
}
std::string_view name_of(Readout v) {
  return name_in(kReadouts, v);
}

Band parse_band(std::string_view key, std::string_view text) {
  if (text == "none") return Band::none();
  Band band;
  const size_t colon = text.find(':');
  const bool two = colon != std::string_view::npos;
  const std::string_view hi = two ? text.substr(colon + 1) : "";
  if (!two || !parse_int(text.substr(0, colon), band.lo) || !(hi == "inf" || parse_int(hi, band.hi)))
    usage_error("{} = '{}': expected none, lo:hi or lo:inf in steps back, such as 0:64", key, text);
  if (hi == "inf") band.hi = Band::kInf;
  if (band.lo < 0 || band.hi < 0) usage_error("{} = '{}': steps back cannot be negative", key, text);
  if (band.empty()) usage_error("{} = '{}': no key is that far back, write none if that is meant", key, text);
  return band;
}

std::string band_text(Band band) {
  if (band.empty()) return "none";
  if (band.hi == Band::kInf) return fmt::format("{}:inf", band.lo);
  return fmt::format("{}:{}", band.lo, band.hi);
}

std::string share_text(Share share) {
  if (share == Share{true, true, true}) return "all";
  std::string text;
  const auto add = [&](bool on, const char* name) {
    if (on) text += (text.empty() ? "" : ",") + std::string(name);
  };
  add(share.attention, "attention");
  add(share.norms, "norms");
  add(share.ffn, "ffn");
  return text.empty() ? "none" : text;
}

bool ModelConfig::full_attention(int64_t block) const {
  return sliding_window == 0 || (full_attention_every > 0 && (block + 1) % full_attention_every == 0);
}

// Our tokenizers' last id is end of text and the rows behind it are padding; imported ones with a begin of
// text have both in front.
int64_t ModelConfig::text_ids() const {
  return bos >= 0 ? vocab : eot + 1;
}

int64_t ModelConfig::rotary_width(int64_t block) const {
  if (!full_attention(block)) return head_dim;
  return std::max<int64_t>(2, int64_t(double(head_dim) * rope_fraction / 2 + 0.5) * 2);
}

Band ModelConfig::band_xx(int64_t block) const {
  return full_attention(block) ? xx : xx.intersect({0, sliding_window - 1});
}
Band ModelConfig::band_px(int64_t block) const {
  return full_attention(block) || px.empty() ? px : px.intersect({0, sliding_window - 1});
}

ModelConfig resolve(const ModelKeys& keys) {
  if (keys.window < kWindowAuto) usage_error("model.window = {}: expected 0 or more, or full", keys.window);
  check_sizes(keys);
  const ModelKeys k = apply_family(keys);

  ModelConfig c;
  c.family = k.family;
  c.qk_norm = k.qk_norm;
  c.rope_theta = k.rope_theta;
  c.rope_fraction = k.rope_fraction;
  if (k.rope_pairs == "adjacent")
    c.rope_pairs = ops::RopePairs::adjacent;
  else if (k.rope_pairs == "half_split")
    c.rope_pairs = ops::RopePairs::half_split;
  else
    usage_error("model.rope_pairs = '{}': expected adjacent or half_split", k.rope_pairs);
  c.sliding_window = k.sliding_window;
  c.full_attention_every = k.full_attention_every;
  c.norm_eps = k.norm_eps;
  c.context = k.context;
  c.vocab = k.vocab == -1 ? kGpt2Vocab : k.vocab;
  c.eot = k.eot == -1 ? kGpt2Eot : k.eot;
  c.bos = k.bos;
  c.pred_row = k.pred_row == -1 ? c.eot + 1 : k.pred_row;

  positive("model.layers", k.layers);
  positive("model.heads", k.heads);
  positive("model.d_model", k.d_model);
  c.state.layers = k.state_layers;
  c.state.width = k.d_model;
  c.head_dim = k.head_dim == -1 ? k.d_model / k.heads : k.head_dim;
  positive("model.head_dim", c.head_dim);
  if (c.head_dim * k.heads != k.d_model)
    usage_error("model.heads = {} times model.head_dim = {} is not model.d_model = {}", k.heads, c.head_dim,
                k.d_model);
  c.state.heads = k.heads;
  c.state.kv_heads = k.kv_heads == -1 ? k.heads : k.kv_heads;
  positive("model.kv_heads", c.state.kv_heads);
  positive("model.state_layers", c.state.layers);
  c.state.ffn = per_block("model.d_ffn", k.d_ffn, c.state.layers);

  if (k.pred_layers < 0) usage_error("model.pred_layers = {}: expected 0 or more", k.pred_layers);
  c.pred.layers = k.pred_layers;
  if (c.has_pred()) {
    c.pred.width = k.pred_width;
    c.pred.heads = k.pred_width / c.head_dim;
    c.pred.kv_heads = std::max<int64_t>(1, c.pred.heads * c.state.kv_heads / c.state.heads);
    c.pred.ffn = per_block("model.pred_ffn", k.pred_ffn, c.pred.layers);
    c.read_kv = value_in(kReadKvs, "model.read.kv", k.read_kv);
    c.pred_input = value_in(kPredInputs, "model.pred_input", k.pred_input);
    c.share = parse_share(k.share);
    c.ffn = value_in(kFfnModes, "model.ffn", k.ffn);
    c.xp = parse_band("model.band.xp", k.band_xp);
    c.px = parse_band("model.band.px", k.band_px);
    c.pp = parse_band("model.band.pp", k.band_pp);
    const bool word = !k.read_level.empty() && std::isalpha(static_cast<unsigned char>(k.read_level[0]));
    c.read_level = word ? value_in(kReadLevels, "model.read.level", k.read_level) : ReadLevel::list;
    resolve_levels(c, k.read_level);
  }
  c.xx = parse_band("model.band.xx", k.band_xx);
  c.readout = value_in(kReadouts, "model.readout", k.readout);
  c.tie_head = parse_bool("model.tie_head", k.tie_head);

  check_backbone(c);
  check_keys(c);
  return c;
}

ModelKeys keys_of(const ModelConfig& c) {
  ModelKeys k;
  k.family = c.family;
  k.window = family_window(c);
  k.layers = c.state.layers;
  k.d_model = c.state.width;
  k.heads = c.state.heads;
  k.kv_heads = c.state.kv_heads;
  k.head_dim = c.head_dim;
  k.d_ffn = c.state.ffn;
  k.vocab = c.vocab;
  k.context = c.context;
  k.eot = c.eot;
  k.bos = c.bos;
  k.pred_row = c.pred_row;
  k.qk_norm = c.qk_norm;
  k.rope_pairs = c.rope_pairs == ops::RopePairs::adjacent ? "adjacent" : "half_split";
  k.rope_theta = c.rope_theta;
  k.rope_fraction = c.rope_fraction;
  k.sliding_window = c.sliding_window;
  k.full_attention_every = c.full_attention_every;
  k.norm_eps = c.norm_eps;
  k.state_layers = c.state.layers;
  k.pred_layers = c.pred.layers;
  k.pred_width = c.pred.width;
  k.pred_ffn = c.pred.ffn;
  k.band_xx = band_text(c.xx);
  k.band_xp = band_text(c.xp);
  k.band_px = band_text(c.px);
  k.band_pp = band_text(c.pp);
  k.read_level = c.read_level == ReadLevel::list ? fmt::format("{}", fmt::join(c.levels, ","))
                                                 : std::string(name_of(c.read_level));
  k.read_kv = name_of(c.read_kv);
  k.pred_input = name_of(c.pred_input);
  k.share = share_text(c.share);
  k.ffn = name_of(c.ffn);
  k.readout = name_of(c.readout);
  k.tie_head = c.tie_head ? "true" : "false";
  return k;
}

}  // namespace sps
