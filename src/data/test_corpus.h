// For tests: a small corpus of short documents, always the same, and its token files.
#pragma once

#include <filesystem>
#include <string>

#include "base/rng.h"
#include "base/test_dir.h"
#include "data/prepare.h"

namespace sps {

// JSON lines: documents of 1 to `longest` words, so that windows hold different numbers of document ends.
inline std::string test_documents(int count, uint64_t seed, int longest = 12) {
  constexpr const char* kWords[] = {"the",  "a",    "list", "value", "of",   "returns", "item",
                                    "is",   "new",  "to",   "index", "and",  "object",  "in",
                                    "name", "with", "for",  "not",   "each", "module"};
  const Rng rng(seed, "test documents");
  std::string lines;
  uint64_t n = 0;
  for (int d = 0; d < count; ++d) {
    lines += R"({"text": ")";
    const uint64_t words = 1 + rng.below(n++, uint64_t(longest));
    for (uint64_t w = 0; w < words; ++w)
      lines += (w > 0 ? " " : "") + std::string(kWords[rng.below(n++, std::size(kWords))]);
    lines += "\"}\n";
  }
  return lines;
}

// Token files of bytes in dir/name; returns the folder.
inline std::filesystem::path make_test_data(const TestDir& dir, const std::string& name = "data",
                                            int documents = 150, uint64_t seed = 1, int longest = 12) {
  PrepareOptions options;
  options.inputs = {dir.write(name + ".jsonl", test_documents(documents, seed, longest))};
  options.out = dir / name;
  options.val_fraction = 0.2;
  prepare(options);
  return options.out;
}

}  // namespace sps
