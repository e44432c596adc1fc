// For tests: texts to prepare, and how.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/test_dir.h"
#include "data/prepare.h"

namespace sps {

inline PrepareOptions options_for(std::vector<std::string> inputs, const std::filesystem::path& out,
                                  double val_fraction = 0.01) {
  PrepareOptions options;
  options.inputs = std::move(inputs);
  options.out = out;
  options.val_fraction = val_fraction;
  return options;
}

inline std::vector<std::string> random_texts(int count) {
  const Rng rng(7, "texts");
  std::vector<std::string> texts;
  uint64_t draw = 0;
  for (int i = 0; i < count; ++i) {
    std::string text;
    const uint64_t length = 1 + rng.below(draw++, 60);
    for (uint64_t j = 0; j < length; ++j) text += char('a' + rng.below(draw++, 26));
    texts.push_back(text);
  }
  return texts;
}

inline std::string json_lines(const std::vector<std::string>& texts) {
  std::string lines;
  for (const auto& text : texts) lines += "{\"text\":\"" + text + "\"}\n";
  return lines;
}

}  // namespace sps
