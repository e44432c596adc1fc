// The named families: presets of the ten keys (design, section 1, second table).
#pragma once

#include "model/config.h"

namespace sps {

// Fills every key that is on auto with what `keys.family` and the other keys imply. A key that was set stays.
ModelKeys apply_family(ModelKeys keys);

// The window that makes the family's preset give these bands (kWindowFull; 0 where the family has none).
int64_t family_window(const ModelConfig& config);

// Widths of the papers' models and of the demonstration: name -> layers, heads, d_model, d_ffn, context.
struct Scale {
  std::string_view name;
  int64_t layers, d_model, heads, kv_heads, d_ffn, context;
};
const Scale* find_scale(std::string_view name);  // null if unknown
std::string scale_names();                       // "demo, xs, s, m, l, xl, 1b"

}  // namespace sps
