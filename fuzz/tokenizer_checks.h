// What holds for every BPE that a loader lets through.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz/fuzz.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/load_tokenizer_json.h"
#include "tokenizer/stream_decoder.h"

namespace sps::fuzz {

// Error if the model is none, or if its patterns cannot be run on the text.
inline void check_tokenizer(BpeModel model, std::string_view text) {
  const bool keeps_bytes = !model.nfc && !model.prefix_space;
  std::vector<bool> special;
  for (const AddedToken& token : model.added) {
    special.resize(size_t(token.id) + 1);
    special[size_t(token.id)] = token.special;
  }
  const BpeTokenizer tokenizer(std::move(model));

  std::vector<int32_t> ids, again;
  tokenizer.encode(text, ids);
  for (const int32_t id : ids) {
    SPS_CHECK(id >= 0 && id < tokenizer.vocab_size());
    SPS_CHECK(size_t(id) >= special.size() || !special[size_t(id)]);
  }
  if (keeps_bytes) SPS_CHECK(tokenizer.decode(ids) == text);
  tokenizer.encode(text, again);  // this time with the words that the thread remembers
  SPS_CHECK(again == ids);

  std::vector<int32_t> parsed;
  tokenizer.encode(text, parsed, SpecialText::parsed);
  StreamDecoder decoder(tokenizer);
  for (const int32_t id : parsed) {
    SPS_CHECK(id >= 0 && id < tokenizer.vocab_size());
    decoder.feed(id);
  }
  decoder.flush();

  std::string json;
  if (!accepts([&] { json = tokenizer.to_json(); })) return;
  must_accept([&] {
    const BpeTokenizer stored(parse_tokenizer_json(json, "what was written"));
    SPS_CHECK(stored.fingerprint() == tokenizer.fingerprint());
    again.clear();
    stored.encode(text, again);
    SPS_CHECK(again == ids);
  });
}

}  // namespace sps::fuzz
