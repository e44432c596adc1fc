#include "model/keys.h"
#include "base/error.h"

#include <stdexcept>
#include <string>

namespace sps {

namespace {

TextType window_type(int64_t& window) {
  return {"a number of steps back, or full",
          [&window](const std::string& text) {
            if (text == "full") return window = kWindowFull, true;
            if (text == "auto") return window = kWindowAuto, true;
            int64_t value = 0;
            try {
              size_t used = 0;
              value = std::stoll(text, &used);
              if (used != text.size()) return false;
            } catch (const std::exception&) {
              return false;
            }
            if (value < 0) usage_error("model.window = {}: expected 0 or more, or full", text);
            return window = value, true;
          },
          [&window] {
            return window == kWindowFull ? "full" : window == kWindowAuto ? "auto" : std::to_string(window);
          }};
}

}  // namespace

void bind_model(OptionTable& t, ModelKeys& m) {
  t.add("model.family", &m.family, "preset of the keys below: standard, sps, delayed_state, ...");
  t.add("model.window", window_type(m.window), "w of the family's windowed bands; the edge is included");
  t.add("model.layers", &m.layers, "blocks of the model (of each tower)", at_least<int64_t>(1));
  t.add("model.d_model", &m.d_model, "width of the state stream", at_least<int64_t>(1));
  t.add("model.heads", &m.heads, "query heads", at_least<int64_t>(1));
  t.add("model.kv_heads", &m.kv_heads, "key and value heads; -1 = heads");
  t.add("model.head_dim", &m.head_dim, "numbers per head; -1 = d_model / heads");
  t.add("model.d_ffn", &m.d_ffn, "SwiGLU width, or one per block; empty = 3 d_model");
  t.add("model.vocab", &m.vocab, "vocabulary rows; -1 = from the data, rounded up to 64");
  t.add("model.context", &m.context, "tokens of a training window", at_least<int64_t>(1));
  t.add("model.eot", &m.eot, "end-of-text id; -1 = from the data");
  t.add("model.bos", &m.bos, "id that every document begins with; -1 = none; may be model.eot itself");
  t.add("model.pred_row", &m.pred_row, "vocabulary row of pred_input = row; -1 = eot + 1");
  t.add("model.qk_norm", &m.qk_norm, "RMS norm of each query and key head before rotation");
  t.add("model.rope_pairs", &m.rope_pairs, "adjacent (the papers) or half_split");
  t.add("model.rope_theta", &m.rope_theta, "rotary base", above(0.0));
  t.add("model.rope_fraction", &m.rope_fraction, "rotated part of each head (full-attention blocks)");
  t.add("model.sliding_window", &m.sliding_window, "state keys seen, the row's own included; 0 = all");
  t.add("model.full_attention_every", &m.full_attention_every,
        "with a sliding window: every n-th block sees all");
  t.add("model.norm_eps", &m.norm_eps, "epsilon of the norms", above(0.0));
  t.add("model.state_layers", &m.state_layers, "blocks of the state tower; -1 = layers");
  t.add("model.pred_layers", &m.pred_layers, "blocks of the prediction tower; 0 = none, -1 = by family");
  t.add("model.pred_width", &m.pred_width, "width of the prediction stream; -1 = d_model");
  t.add("model.pred_ffn", &m.pred_ffn, "SwiGLU width of the prediction tower; empty = d_ffn");
  t.add("model.band.xx", &m.band_xx, "steps back that state rows see of the state: none, lo:hi, lo:inf");
  t.add("model.band.xp", &m.band_xp, "... that state rows see of the prediction stream");
  t.add("model.band.px", &m.band_px, "... that prediction rows see of the state");
  t.add("model.band.pp", &m.band_pp, "... that prediction rows see of the prediction stream");
  t.add("model.read.level", &m.read_level,
        "state level each prediction block reads: same, post, top, final, 6,6,4");
  t.add("model.read.kv", &m.read_kv, "state (its own keys and values) or own (a projection of the level)");
  t.add("model.pred_input", &m.pred_input, "start of the prediction rows: row, vector, table, token, state");
  t.add("model.share", &m.share, "weights both towers share: all, none, or of attention,norms,ffn");
  t.add("model.ffn", &m.ffn, "separate, or pooled (one gated FFN for both streams)");
  t.add("model.readout", &m.readout, "stream the loss reads: x or p");
  t.add("model.tie_head", &m.tie_head, "output head tied to the embedding: true or false");
}

}  // namespace sps
