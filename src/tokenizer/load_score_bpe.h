// Files of a BPE with scores (score_bpe.h; docs/formats/tokenizer.md has both byte by byte).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "tokenizer/score_bpe.h"

namespace sps {

// llama2.c's tokenizer.bin: the longest piece's length as u32, then of each id its score (f32), length (i32)
// and bytes, all little-endian. Ids 0, 1, 2 are unknown, begin and end of sentence, 3 to 258 the bytes. The
// number of ids is not in the file: it ends after the last. Begin and end of text are both id 1, because
// models of llama2.c are trained on texts that begin with it and end with nothing. Options: eot or eot_id, a
// control id.
ScoreBpeModel parse_llama2c_tokenizer(std::string_view bytes, std::string_view what,
                                      const TokenizerOptions& options = {});

// What the tokenizer.json of such a tokenizer is; `parse` undoes `to` exactly.
std::string to_score_bpe_json(const ScoreBpeModel& model);
ScoreBpeModel parse_score_bpe_json(std::string_view text, std::string_view what,
                                   const TokenizerOptions& options = {});
// What the loaders share: options.eot or options.eot_id, where the model has such a control id; usage error
// for a token that is none.
void choose_eot(ScoreBpeModel& model, const TokenizerOptions& options, std::string_view what);

// Whether a tokenizer.json is one of these: only its beginning is looked at.
bool is_score_bpe_json(std::string_view text);

}  // namespace sps
