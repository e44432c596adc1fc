#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "model/family.h"
#include "train/run_config.h"

namespace sps {

namespace {

// The parts of a recipe's name that are left to read.
class Parts {
 public:
  explicit Parts(const std::string& name) : name_(name), rest_(name) {}

  // Takes the next part if it is `word` (which may hold underscores itself).
  bool take(std::string_view word) {
    if (rest_.substr(0, word.size()) != word) return false;
    if (rest_.size() > word.size() && rest_[word.size()] != '_') return false;
    rest_.remove_prefix(std::min(rest_.size(), word.size() + 1));
    return true;
  }
  std::string_view peek() const { return rest_.substr(0, rest_.find('_')); }
  void drop() { rest_.remove_prefix(std::min(rest_.size(), peek().size() + 1)); }
  bool done() const { return rest_.empty(); }

  [[noreturn]] void wrong(std::string_view expected) const {
    usage_error("recipe '{}': found '{}' where {} was expected", name_, peek(), expected);
  }

 private:
  const std::string& name_;
  std::string_view rest_;
};

bool number(std::string_view text, int64_t& value) {
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  return ec == std::errc() && end == text.data() + text.size() && value >= 0;
}

// "20b", "1.5m", "300k"
bool token_count(std::string_view text, int64_t& value) {
  if (text.size() < 2) return false;
  const double unit = text.back() == 'b' ? 1e9 : text.back() == 'm' ? 1e6 : text.back() == 'k' ? 1e3 : 0;
  double n = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size() - 1, n);
  if (unit == 0 || ec != std::errc() || end != text.data() + text.size() - 1 || !(n * unit >= 1) ||
      n * unit > 9e15)
    return false;
  value = int64_t(std::llround(n * unit));
  return true;
}

// Everything a scale and a token budget imply (training spec, section 11).
void apply_scale(RunConfig& c, const Scale& s) {
  c.model.layers = s.layers, c.model.d_model = s.d_model, c.model.heads = s.heads,
  // Left open where it is the number of heads, so that an override of model.heads takes it along.
      c.model.kv_heads = s.kv_heads == s.heads ? -1 : s.kv_heads;
  c.model.d_ffn = {s.d_ffn}, c.model.context = s.context;
  if (s.name == "demo") {
    // Steps of 4096 tokens; the window and the rate of the small-scale runs (docs/benchmarks.md).
    c.train.global_batch = c.train.micro_batch = 16;
    c.optim.lr = 2e-3, c.optim.min_lr = 2e-4;
  }
  if (s.name == "1b") {
    // Second paper, section on architecture; what it leaves open is chosen here and listed in docs/design.md.
    c.model.qk_norm = true;
    c.model.sliding_window = 2048, c.model.full_attention_every = 6, c.model.rope_fraction = 0.5;
    c.train.global_batch = 64, c.train.micro_batch = 4;
  }
}

void apply_budget(RunConfig& c, std::string_view scale, int64_t tokens) {
  c.train.tokens = tokens;
  if (tokens >= 10'000'000'000) {
    c.schedule.decay_tokens = scale == "1b" ? tokens / 4 : tokens / 10;
    c.schedule.warmup_tokens = scale == "xs" || scale == "s" ? 50'000'000 : 100'000'000;
    c.train.save_every_tokens = tokens > 10'000'000'000 ? 2'000'000'000 : 1'000'000'000;
    c.train.eval_every_tokens = tokens > 10'000'000'000 ? 40'000'000 : 20'000'000;
  } else {
    // The papers have no runs this short: a fifth of the tokens for the decay, a twentieth for the warm-up.
    c.schedule.decay_tokens = tokens / 5;
    c.schedule.warmup_tokens = std::min<int64_t>(tokens / 20, 50'000'000);
    c.train.save_every_tokens = std::max<int64_t>(tokens / 4, 1);
    c.train.eval_every_tokens = std::max<int64_t>(tokens / 20, 1);
    c.train.rolling_every_tokens = std::max<int64_t>(tokens / 20, 1);
    c.train.eval_tokens = std::clamp<int64_t>(tokens / 50, 8192, 10'000'000);
  }
}

}  // namespace

bool looks_like_recipe(const std::string& name) {
  const size_t bar = name.find('_');
  return bar != std::string::npos && find_scale(name.substr(0, bar)) != nullptr &&
         name.find('/') == std::string::npos && !name.ends_with(".toml");
}

RunConfig recipe(const std::string& name) {
  RunConfig c;
  c.name = name;
  Parts parts(name);
  const Scale* scale = find_scale(parts.peek());
  if (scale == nullptr) parts.wrong("a scale (" + scale_names() + ")");
  parts.drop();
  apply_scale(c, *scale);

  ModelKeys& m = c.model;
  m.family.clear();
  for (const std::string& family : family_names())
    if (parts.take(family)) {
      m.family = family;
      break;
    }
  if (m.family.empty() && parts.take("full_attention")) m.family = "standard";
  if (m.family.empty()) parts.wrong("a family (standard, sps, free_pause, sequential, ...)");

  const std::string_view towers = parts.peek();
  if (const size_t plus = towers.find('+'); plus != std::string_view::npos) {
    if (!number(towers.substr(0, plus), m.state_layers) || !number(towers.substr(plus + 1), m.pred_layers) ||
        m.state_layers == 0 || m.pred_layers == 0)
      parts.wrong("two depths such as 6+6");
    if (m.family != "two_tower" && m.family != "sequential")
      usage_error("recipe '{}': only two_tower and sequential have towers of their own depths", name);
    m.layers = m.state_layers;
    parts.drop();
  }
  if (const std::string_view w = parts.peek(); w.starts_with('w')) {
    if (m.family == "standard" || m.family == "two_tower" || m.family == "sequential")
      usage_error("recipe '{}': {} has no window", name, m.family);
    if (w == "wfull")
      m.window = kWindowFull;
    else if (!number(w.substr(1), m.window))
      parts.wrong("a window such as w64 or wfull");
    // The first paper's "2x memory" is spelled as a window of the whole context.
    if (m.window >= m.context) m.window = kWindowFull;
    parts.drop();
  }
  if (const std::string_view part = parts.peek();
      m.family == "standard" && (part == "pooled" || part == "tok" || part.starts_with("phase")))
    usage_error("recipe '{}': '{}' needs a prediction stream, standard has none", name, part);
  if (parts.take("pooled")) m.ffn = "pooled";
  if (parts.take("tok")) m.pred_input = "token";
  if (const std::string_view p = parts.peek(); p.starts_with("phase")) {
    double percent = 0;
    const std::string_view digits = p.substr(5);
    const auto [end, ec] = std::from_chars(digits.data(), digits.data() + digits.size(), percent);
    if (ec != std::errc() || end != digits.data() + digits.size())
      parts.wrong("a percentage such as phase75");
    c.phase.at = percent / 100;
    if (!(c.phase.at >= 0 && c.phase.at < 1)) parts.wrong("a percentage below 100 such as phase75");
    parts.drop();
  }
  int64_t tokens = 0;
  if (!token_count(parts.peek(), tokens)) parts.wrong("a number of tokens such as 20b, 300m or 500k");
  parts.drop();
  apply_budget(c, scale->name, tokens);
  // The reference halves the micro-batch of the two-stream models at L (training spec, section 11).
  if (scale->name == "l" && m.family != "standard") c.train.micro_batch = 3;
  if (const std::string_view s = parts.peek(); s.starts_with("seed")) {
    if (!number(s.substr(4), c.train.seed)) parts.wrong("a seed such as seed1");
    parts.drop();
  }
  if (!parts.done()) parts.wrong("the end of the name");
  return c;
}

}  // namespace sps
