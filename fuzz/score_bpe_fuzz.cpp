// A BPE with scores, as llama2.c's file, our tokenizer.json or sentencepiece's model, and a text.
#include "fuzz/fuzz.h"
#include "tokenizer/load_score_bpe.h"
#include "tokenizer/load_sentencepiece.h"
#include "tokenizer/stream_decoder.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  fuzz::Input input(data, size);
  const size_t kind = input.choose(3);
  const std::string_view file = input.part(), text = input.rest();
  fuzz::accepts([&] {
    const ScoreBpeTokenizer tokenizer(kind == 0   ? parse_llama2c_tokenizer(file, "x")
                                      : kind == 1 ? parse_score_bpe_json(file, "x")
                                                  : parse_sentencepiece(file, "x"));
    std::vector<int32_t> ids, parts;
    tokenizer.encode(text, ids);
    StreamDecoder decoder(tokenizer);
    for (const int32_t id : ids) {
      SPS_CHECK(id >= 0 && id < tokenizer.vocab_size());
      SPS_CHECK(tokenizer.model().pieces[size_t(id)].kind != ScoredPiece::Kind::control);
      decoder.feed(id);
    }
    decoder.flush();
    SPS_CHECK(tokenizer.decode(ids) == text);
    tokenizer.encode_in_parts(
        text, [&](std::span<const int32_t> some) { parts.insert(parts.end(), some.begin(), some.end()); });
    SPS_CHECK(parts == ids);
    fuzz::must_accept([&] {
      const ScoreBpeTokenizer stored(parse_score_bpe_json(tokenizer.to_json(), "what was written"));
      SPS_CHECK(stored.model() == tokenizer.model() && stored.fingerprint() == tokenizer.fingerprint());
    });
  });
  return 0;
}
