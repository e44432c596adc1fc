#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/progress.h"
#include "model/describe.h"

namespace sps {

namespace {

constexpr size_t kWidth = 100;

// "  label ....  text", further lines of a long text below the first.
void field(std::string& out, std::string_view label, const std::string& text, size_t column = 21) {
  std::string line = fmt::format("  {:<{}}", label, column - 2);
  for (size_t at = 0; at < text.size();) {
    size_t end = text.size() - at <= kWidth - column ? text.size() : text.rfind(' ', at + kWidth - column);
    if (end == std::string::npos || end <= at) end = text.size();
    out += line + text.substr(at, end - at) + "\n";
    line = std::string(column, ' ');
    at = end + (end < text.size());
  }
}

void heading(std::string& out, std::string_view title, std::string_view remark = "") {
  out += fmt::format("\n{}{}{}\n", title, remark.empty() ? "" : ": ", remark);
}

std::string count_row(std::string_view label, int64_t n, std::string_view remark) {
  std::string row =
      fmt::format("  {:<17}{:>9}  {:>15}  {}", label, human_count(double(n)), grouped(n), remark);
  row.erase(row.find_last_not_of(' ') + 1);
  return row + "\n";
}

bool uniform(const std::vector<int64_t>& v) {
  return std::equal(v.begin() + (v.empty() ? 0 : 1), v.end(), v.begin());
}

std::string tower_text(const ModelConfig& c, const Tower& t) {
  std::string heads = fmt::format("{} heads of {}", t.heads, c.head_dim);
  if (t.kv_heads != t.heads) heads += fmt::format(" on {} key heads", t.kv_heads);
  const std::string ffn = uniform(t.ffn) ? std::to_string(t.ffn[0]) : "by block (below)";
  return fmt::format("{} blocks, width {}, {}, FFN {}", t.layers, t.width, heads, ffn);
}

std::string input_text(const ModelConfig& c) {
  switch (c.pred_input) {
    case PredInput::row:
      return fmt::format("vocabulary row {}, the same at every position", c.pred_row);
    case PredInput::vector:
      return "one learned vector, the same at every position";
    case PredInput::table:
      return "an embedding table of its own";
    case PredInput::token:
      return "the token's embedding plus one learned vector";
    case PredInput::state:
      return "the last residual of the state tower";
  }
  return "?";
}

std::string read_text(const ModelConfig& c) {
  const std::string kv = c.read_kv == ReadKv::state ? "with the state's own keys and values"
                                                    : "projected by each prediction block";
  switch (c.read_level) {
    case ReadLevel::same:
      return "the state entering the same block, " + kv;
    case ReadLevel::post:
      return "the state leaving the same block, " + kv;
    case ReadLevel::top:
      return fmt::format("state levels {} to {}, {}", c.levels.front(), c.levels.back(), kv);
    case ReadLevel::final:
      return "the final state, " + kv;
    case ReadLevel::list:
      return fmt::format("state levels {}, {}", fmt::join(c.levels, ","), kv);
  }
  return "?";
}

std::string order_text(const Description& d) {
  const ModelConfig& c = d.config();
  const auto because = [&] { return c.xp.empty() ? "their FFN is pooled" : "x reads earlier p"; };
  if (!c.has_pred()) return "one stream";
  if (d.plan.lockstep)
    return fmt::format("lockstep: the streams advance block by block together, since {}", because());
  if (d.plan.joint)
    return "state first is possible; run together here, with one attention call for both streams";
  return "state first: the state tower to its end, then the prediction tower";
}

void model_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  heading(out, "Model");
  field(out, "family", c.family);
  field(out, c.has_pred() ? "state tower" : "tower", tower_text(c, c.state));
  if (c.has_pred()) {
    field(out, "prediction tower", tower_text(c, c.pred));
    field(out, "shared weights",
          share_text(c.share) + (c.ffn == FfnMode::pooled ? "; one pooled, gated FFN a layer" : ""));
    field(out, "p starts as", input_text(c));
    if (!c.px.empty()) field(out, "p reads", read_text(c));
    field(out, "loss reads", c.readout == Readout::pred ? "p" : "x");
  }
  field(out, "vocabulary",
        fmt::format("{} rows, end of text {}{}, head {}", c.vocab, c.eot,
                    c.bos < 0 ? "" : fmt::format(", begin of text {}", c.bos),
                    c.tie_head ? "tied" : "of its own"));
  std::string positions = fmt::format("context {}, rotary base {:g}", c.context, c.rope_theta);
  if (c.rope_fraction < 1)
    positions += fmt::format(", {:g} of each head rotated in full-attention blocks", c.rope_fraction);
  if (c.qk_norm) positions += ", query and key norms";
  field(out, "positions", positions);
  if (c.sliding_window > 0)
    field(out, "sliding window",
          fmt::format("{} state keys, the row's own included; {}", c.sliding_window,
                      c.full_attention_every > 0
                          ? fmt::format("every {}th block sees all", c.full_attention_every)
                          : "in every block"));
  field(out, "order", order_text(d));
  if (c.has_pred()) field(out, "serial depth", fmt::format("{} blocks a decoded token", d.serial_blocks));
}

void band_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  const int64_t length = d.options.length;
  const bool sliding = c.sliding_window > 0;
  heading(out, "Bands",
          fmt::format("steps back that a query sees, and keys a query over one document of {} tokens",
                      grouped(length)));
  out += fmt::format("  {:<8}{:<7}{:>14}{:>12}{}\n", "query", "key", "steps back", "keys",
                     sliding ? fmt::format("{:>28}", "keys in a window block") : "");
  double total = 0, total_near = 0;
  const auto row = [&](const char* q, const char* k, Band full, Band near) {
    const auto per_query = [&](Band b) { return double(ops::band_area(b, length)) / double(length); };
    const std::string hi = full.hi == Band::kInf ? "all" : grouped(full.hi);
    out +=
        fmt::format("  {:<8}{:<7}{:>14}", q, k, full.empty() ? "none" : fmt::format("{} to {}", full.lo, hi));
    out += full.empty() ? fmt::format("{:>12}", "-") : fmt::format("{:>12.1f}", per_query(full));
    if (sliding) out += near.empty() ? fmt::format("{:>28}", "-") : fmt::format("{:>28.1f}", per_query(near));
    out += "\n";
    total += per_query(full), total_near += per_query(near);
  };
  const Band window = sliding ? Band{0, c.sliding_window - 1} : Band::causal();
  row("x", "x", c.xx, c.xx.intersect(window));
  if (c.has_pred()) {
    row("x", "p", c.xp, c.xp);
    row("p", "x", c.px, c.px.empty() ? c.px : c.px.intersect(window));
    row("p", "p", c.pp, c.pp);
    out += fmt::format("  {:<29}{:>12.1f}", "all pairs a position", total);
    out += sliding ? fmt::format("{:>28.1f}\n", total_near) : "\n";
  }
}

void parameter_part(std::string& out, const Description& d) {
  heading(out, "Parameters");
  out += count_row("total", d.total, "");
  out += count_row("non-embedding", d.non_embedding, "blocks, norms, readers, gates");
  out += count_row("embedding", d.total - d.non_embedding, "tables, untied head, start vector");
  out += count_row("no weight decay", d.no_decay, "norms");
  if (d.frozen > 0) out += count_row("frozen", d.frozen, "no gradient, no moments, no update");
}

std::string_view activations_remark(Recompute mode) {
  switch (mode) {
    case Recompute::none:
      return "with their gradients";
    case Recompute::ffn:
      return "with their gradients; norms and the FFN's inside are made again";
    case Recompute::block:
      return "with their gradients; blocks are made again";
  }
  return "";
}

void memory_part(std::string& out, const Description& d) {
  const bool gpu = d.options.device == Device::cuda;
  heading(
      out, "Training memory",
      fmt::format("{}{}, micro-batch of {} windows of {} tokens", gpu ? "of a GPU, " : "",
                  dtype_name(d.options.dtype), grouped(d.options.micro_batch), grouped(d.config().context)));
  const auto row = [&](std::string_view label, int64_t bytes, std::string_view remark) {
    std::string text = fmt::format("  {:<17}{:>10}  {}", label, human_bytes(double(bytes)), remark);
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  row("weights", int64_t(d.memory.weights),
      d.options.dtype == DType::bf16 ? "f32 master and the rounded copy" : "");
  row("gradients", int64_t(d.memory.gradients), "");
  row("optimizer", int64_t(d.memory.moments), "two moments");
  row("activations", int64_t(d.memory.activations), activations_remark(d.options.recompute));
  row("tables", int64_t(d.memory.tables), "rotary angles, lists of a pass");
  if (gpu) {
    row("work space", int64_t(d.memory.scratch), "logits, matrix products, attention");
    row("context", int64_t(d.memory.context), "the driver and the programs on the GPU; an estimate");
  }
  row("total", int64_t(d.memory.total()), "");
}

std::string line_name(const CacheLine& l) {
  switch (l.kind) {
    case KeyPair::state:
      return "state keys, values";
    case KeyPair::pred:
      return "p keys, values";
    case KeyPair::reader:
      return "readers of the state";
    case KeyPair::read_head:
      return "reader of the final state";
  }
  return "?";
}

void decode_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  heading(out, "Decoding", "bf16 caches of one sequence");
  const auto bytes = [](int64_t numbers) { return human_bytes(2.0 * double(numbers)); };
  for (const CacheLine& l : d.cache.lines) {
    const int64_t all = l.blocks * l.numbers;
    const std::string blocks = fmt::format("{:>3} block{}", l.blocks, l.blocks == 1 ? " " : "s");
    if (l.horizon.kind == Horizon::persistent)
      out += fmt::format("  {:<26}{}  {:>10} a token, for the whole context\n", line_name(l), blocks,
                         bytes(all));
    else
      out += fmt::format("  {:<26}{}  {:>10} a token, for a ring of {} steps: {}\n", line_name(l), blocks,
                         bytes(all), grouped(l.horizon.steps), bytes(all * l.horizon.steps));
  }
  const int64_t persistent = d.cache.persistent_numbers(), ring = d.cache.ring_numbers();
  out += fmt::format("  {:<38}{:>10} a token{}\n", "together", bytes(persistent),
                     ring > 0 ? " and " + bytes(ring) + " a sequence in rings" : "");
  out += fmt::format("  {:<38}{:>10}\n", fmt::format("after {} tokens", grouped(c.context)),
                     bytes(persistent * c.context + d.cache.ring_numbers(c.context)));

  if (c.has_pred()) {
    const std::vector<int64_t>& rows = d.prefill_rows;
    const int64_t length = d.options.length, most = *std::max_element(rows.begin(), rows.end());
    std::string text;
    if (d.plan.lockstep)
      text = "every row of both streams (lockstep)";
    else if (most == 1)
      text = "every x row; of p the last row alone";
    else if (most == length)
      text = "every row of both streams but in the last block";
    else
      text = fmt::format("every x row; of p the last {} rows in block 0, down to {} in the last block",
                         grouped(rows[0]), rows.back());
    out += fmt::format("  {:<25} {}\n", "a prompt needs", text);
  }
  out += fmt::format("  {:<25} {} FLOPs a token at {} tokens, the head over the last row alone\n",
                     "a prompt costs", human_count(d.prefill_flops), grouped(d.options.length));
}

void dead_part(std::string& out, const Description& d) {
  heading(out, "Work that is left out");
  if (d.dead.empty()) out += "  none: everything reaches the loss\n";
  for (const std::string& phrase : d.dead) out += "  " + phrase + "\n";
}

void flops_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  heading(out, "FLOPs a token, forward",
          fmt::format("one document of {} tokens, a multiply-add is two", grouped(d.options.length)));
  out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", "", "published", "required", "executed");
  out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", "", "square", "causal area", "causal area");
  out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", "", fmt::format("V {}", c.text_ids()),
                     fmt::format("V {}", c.vocab), "no dead work");
  const auto row = [&](std::string_view label, double a, double b, double e) {
    if (a == 0 && b == 0 && e == 0) return;
    const auto cell = [](double v) { return v == 0 ? std::string("-") : human_count(v); };
    out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", label, cell(a), cell(b), cell(e));
  };
  const auto term = [&](std::string_view label, double Flops::*t) {
    row(label, d.published.*t, d.required.*t, d.executed.*t);
  };
  term("query, key, value", &Flops::qkv);
  term("reading the state", &Flops::read);
  term("scores", &Flops::scores);
  term("softmax", &Flops::softmax);
  term("weighted sum", &Flops::weighted);
  term("attention output", &Flops::out);
  term("FFN", &Flops::ffn);
  term("gates", &Flops::gates);
  term("head", &Flops::head);
  const double p = d.published.total(), r = d.required.total(), e = d.executed.total();
  row("forward", p, r, e);
  out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", "", grouped(std::llround(p)), grouped(std::llround(r)),
                     grouped(std::llround(e)));
  const Freeze freeze = d.options.freeze;
  row(freeze.state ? "training (frozen 1 x)" : "training (3 x)", training_flops(d.published, freeze),
      training_flops(d.required, freeze), training_flops(d.executed, freeze));
}

std::string_view need_text(Need n) {
  return n == Need::none ? "-" : name_of(n);
}

void block_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  const bool mixed = c.sliding_window > 0 && c.full_attention_every > 0;
  if (uniform(c.state.ffn) && uniform(c.pred.ffn) && c.read_level != ReadLevel::list && !mixed) return;
  heading(out, "Blocks", "what of each is needed for the loss");
  out += fmt::format("  {:<10}{:<8}{:>7}{:>10}", "blocks", "sees", "x FFN", "x needs");
  out += c.has_pred() ? fmt::format("{:>9}{:>10}   {}\n", "p FFN", "p needs", "p reads level") : "\n";
  const int64_t blocks = std::max(c.state.layers, c.pred.layers);
  const auto columns = [&](int64_t b) {
    const auto width = [&](const Tower& t) { return b < t.layers ? grouped(t.ffn[size_t(b)]) : "-"; };
    const auto need = [&](const std::vector<Need>& n) {
      return size_t(b) < n.size() ? need_text(n[size_t(b)]) : "-";
    };
    std::string row = fmt::format("{:<8}{:>7}{:>10}", c.full_attention(b) ? "all" : "window", width(c.state),
                                  need(d.plan.state));
    return c.has_pred() ? row + fmt::format("{:>9}{:>10}", width(c.pred), need(d.plan.pred)) : row;
  };
  for (int64_t begin = 0; begin < blocks;) {  // one line for equal neighbours
    int64_t end = begin + 1;
    while (end < blocks && columns(end) == columns(begin)) ++end;
    const std::string range =
        end - begin == 1 ? std::to_string(begin) : fmt::format("{} to {}", begin, end - 1);
    std::string levels;
    for (int64_t b = begin; b < std::min(end, c.pred.layers); ++b)
      levels += fmt::format("{}{}", b == begin ? "" : " ", c.levels[size_t(b)]);
    out += fmt::format("  {:<10}{}", range, columns(begin));
    out += c.has_pred() ? fmt::format("   {}\n", levels.empty() ? "-" : levels) : "\n";
    begin = end;
  }
}

void mask_part(std::string& out, const Description& d) {
  const ModelConfig& c = d.config();
  if (d.options.picture == 0) return;
  const bool mixed = c.sliding_window > 0 && c.full_attention_every != 1;
  heading(out, "Mask",
          fmt::format("who sees whom among {} positions of one document{}", d.options.picture,
                      mixed ? " (block 0)" : ""));
  out += mask_picture(c, 0, d.options.picture);
}

}  // namespace

std::string mask_picture(const ModelConfig& c, int64_t block, int64_t length) {
  const int64_t streams = c.has_pred() ? 2 : 1;
  const bool wide =
      2 * streams * length + 14 <= int64_t(kWidth);  // a blank between the cells makes them square
  const auto visible = [](Band b, int64_t i, int64_t j) { return b.lo <= i - j && i - j <= b.hi; };
  const Band bands[2][2] = {{c.band_xx(block), c.xp}, {c.band_px(block), c.pp}};
  const size_t column =
      std::max<size_t>(size_t(wide ? 2 * length - 1 : length), 6) + 3;  // "keys x" and a gap
  std::string out = fmt::format("  {:<8}{:<{}}", "", "keys x", column);
  out += streams == 2 ? "keys p\n" : "\n";
  for (int64_t q = 0; q < streams; ++q) {
    if (q > 0) out += "\n";
    for (int64_t i = 0; i < length; ++i) {
      std::string line = fmt::format("  {:<8}", fmt::format("{}_{}", q == 0 ? 'x' : 'p', i));
      for (int64_t k = 0; k < streams; ++k) {
        if (k > 0) line.resize(10 + column, ' ');
        for (int64_t j = 0; j < length; ++j) {
          if (wide && j > 0) line += ' ';
          line += visible(bands[q][k], i, j) ? '#' : '.';
        }
      }
      out += line + "\n";
    }
  }
  // Trailing blanks of the heading.
  const size_t newline = out.find('\n'), last = out.find_last_not_of(' ', newline - 1);
  return out.erase(last + 1, newline - last - 1);
}

std::string to_text(const Description& d) {
  std::string out = d.options.name + "\n";
  model_part(out, d);
  band_part(out, d);
  mask_part(out, d);
  block_part(out, d);
  parameter_part(out, d);
  memory_part(out, d);
  decode_part(out, d);
  dead_part(out, d);
  flops_part(out, d);
  return out;
}

}  // namespace sps
