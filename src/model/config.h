// The ten keys that describe a model (design, section 1), its backbone, and the rules that make them valid.
//
// `ModelKeys` is what people write: recipes, TOML files and key=value overrides set some of it, the rest says
// "auto". `resolve` fills in what the family and the other keys imply, checks everything, and returns a
// `ModelConfig`, in which every value is concrete. Nothing else in the program looks at the family's name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/rope/rope.h"

namespace sps {

using ops::Band;

enum class ReadLevel : uint8_t {
  same,
  post,
  top,
  final,
  list
};                                           // which state level prediction block i reads
enum class ReadKv : uint8_t { state, own };  // reuse the state block's keys and values, or project the level
enum class PredInput : uint8_t { row, vector, table, token, state };
enum class FfnMode : uint8_t { separate, pooled };
enum class Readout : uint8_t { state, pred };  // the stream the loss reads: x or p

struct Share {
  bool attention = false, norms = false, ffn = false;
  bool any() const { return attention || norms || ffn; }
  bool operator==(const Share&) const = default;
};

struct Tower {
  int64_t layers = 0, width = 0, heads = 0, kv_heads = 0;
  std::vector<int64_t> ffn;  // one width per block; 0 = the block has no feed-forward part
  bool operator==(const Tower&) const = default;
};

struct ModelConfig {
  std::string family;  // the preset this came from: a label for people
  Tower state, pred;   // pred.layers == 0: the standard model
  Band xx = Band::causal(), xp = Band::none(), px = Band::none(), pp = Band::none();
  ReadLevel read_level = ReadLevel::same;
  std::vector<int64_t> levels;  // the state level that each prediction block reads, 0..state.layers
  ReadKv read_kv = ReadKv::state;
  PredInput pred_input = PredInput::row;
  Share share;
  FfnMode ffn = FfnMode::separate;
  Readout readout = Readout::state;
  bool tie_head = true;

  int64_t head_dim = 64, vocab = 0, context = 0;
  int64_t eot = 0;       // end-of-text id: closes its document; positions that read it carry no loss
  int64_t bos = -1;      // id that every document begins with; -1: none. The same as eot: see eot_begins()
  int64_t pred_row = 0;  // vocabulary row of pred_input = row
  bool qk_norm = false;
  ops::RopePairs rope_pairs = ops::RopePairs::adjacent;
  double rope_theta = 10000, rope_fraction = 1;
  int64_t sliding_window = 0;        // 0: none; else keys i-j in [0, sliding_window-1] of the state stream
  int64_t full_attention_every = 0;  // with a sliding window: the last of every n blocks is full; 0: none is
  double norm_eps = 1e-6;

  bool has_pred() const { return pred.layers > 0; }
  // One id stands between two documents and belongs to the second: its row predicts that document's first
  // token and carries a loss. So it is in imported models that were trained with a begin-of-text id alone.
  bool eot_begins() const { return bos == eot; }
  int64_t text_ids() const;  // ids of the tokenizer, for FLOPs as published
  bool pred_writes_keys() const { return !xp.empty() || !pp.empty(); }
  bool full_attention(int64_t block) const;   // does this block see past the sliding window?
  int64_t rotary_width(int64_t block) const;  // rotated dimensions of each head
  Band band_xx(int64_t block) const;          // bands of one block, sliding window included
  Band band_px(int64_t block) const;
  bool operator==(const ModelConfig&) const = default;
};

constexpr int64_t kWindowFull = -1, kWindowAuto = -2;

// What people write. -1, "" or an empty list mean: as the family and the other keys imply.
struct ModelKeys {
  std::string family = "standard";
  int64_t window = kWindowAuto;  // w of the windowed bands: steps back, the edge included
  int64_t layers = 12, d_model = 768, heads = 12, kv_heads = -1, head_dim = -1;
  std::vector<int64_t> d_ffn;  // one width, or one per state block; empty: 3 * d_model
  int64_t vocab = -1, context = 4096, eot = -1, bos = -1, pred_row = -1;
  bool qk_norm = false;
  std::string rope_pairs = "adjacent";
  double rope_theta = 10000, rope_fraction = 1;
  int64_t sliding_window = 0, full_attention_every = 0;
  double norm_eps = 1e-6;
  int64_t state_layers = -1, pred_layers = -1, pred_width = -1;
  std::vector<int64_t> pred_ffn;
  std::string band_xx, band_xp, band_px, band_pp;  // "none", "lo:hi", "lo:inf"
  std::string read_level;                          // same, post, top, final, or levels "6,6,6,4,5,6"
  std::string read_kv, pred_input, share, ffn, readout, tie_head;
};

ModelConfig resolve(const ModelKeys& keys);
// Every key concrete: resolve(keys_of(c)) == c.
ModelKeys keys_of(const ModelConfig& config);

Band parse_band(std::string_view key, std::string_view text);  // usage error for anything else
std::string band_text(Band band);                              // "none", "0:64", "1:inf"
std::string share_text(Share share);                           // "all", "none", "attention,norms"
std::string_view name_of(ReadLevel v);
std::string_view name_of(ReadKv v);
std::string_view name_of(PredInput v);
std::string_view name_of(FfnMode v);
std::string_view name_of(Readout v);
const std::vector<std::string>& family_names();

// The first paper's vocabulary (GPT-2's 50257 tokens padded to a multiple of 64), used when no data set says
// otherwise.
constexpr int64_t kGpt2Vocab = 50304, kGpt2Eot = 50256;

}  // namespace sps
