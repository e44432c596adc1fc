// sentencepiece's model file (tokenizer.model beside Llama 2, Mistral and others), as far as it is a BPE with
// scores and bytes that changes no text: a protocol buffer with the pieces, of which a space is written
// U+2581. Source: sentencepiece_model.proto.
//
// Where it differs: U+2581 in a text is itself here, for sentencepiece it is a space.
#pragma once

#include <string_view>

#include "tokenizer/score_bpe.h"

namespace sps {

// Whether the bytes begin as such a file does: with the tag of a piece, a line break in ASCII.
bool is_sentencepiece(std::string_view bytes);

// Begin and end of text are those that the file names. Error, naming `what`, for other kinds of models
// (unigram), for normalisation, user-defined pieces, and files without the space in front of texts.
ScoreBpeModel parse_sentencepiece(std::string_view bytes, std::string_view what,
                                  const TokenizerOptions& options = {});

}  // namespace sps
