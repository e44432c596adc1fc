// A small tokenizer in the shape of a tokenizer.json, for the tests of loaders.
#pragma once

#include "base/json.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/test_models.h"

namespace sps {

inline nlohmann::json byte_level(bool use_regex = true, bool prefix = false) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", prefix}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

// A tokenizer.json with 256 bytes, "ab" (256), " ab" (257) and <|endoftext|> (258).
inline nlohmann::json small_json() {
  nlohmann::json vocab, file;
  for (int b = 0; b < 256; ++b) vocab[to_alphabet(std::string(1, char(b)))] = b;
  vocab["ab"] = 256;
  vocab["\u0120ab"] = 257;
  file["version"] = "1.0";
  file["truncation"] = nullptr;
  file["added_tokens"] = {
      {{"id", 258}, {"content", "<|endoftext|>"}, {"special", true}, {"normalized", false}}};
  file["normalizer"] = nullptr;
  file["pre_tokenizer"] = byte_level();
  file["post_processor"] = byte_level();
  file["decoder"] = byte_level();
  file["model"] = {{"type", "BPE"},          {"dropout", nullptr}, {"unk_token", nullptr},
                   {"byte_fallback", false}, {"vocab", vocab},     {"merges", {"a b", "\u0120 ab"}},
                   {"ignore_merges", false}};
  return file;
}

// The same.
inline BpeModel small_as_model() {
  return small_model({{"a", "b"}, {" ", "ab"}});
}

}  // namespace sps
