// Hugging Face's tokenizer.json, as far as it is a byte-level BPE.
//
// Understood: model BPE (merges as text or as pairs, ignore_merges); pre-tokenizers ByteLevel, Split
// (isolated), Digits and sequences of them; normalizers NFC or none; added tokens. Templates of a
// post-processor, truncation and padding have no part in encoding a text and are ignored, and so is white
// space beside special tokens (lstrip, rstrip). Everything else that would change ids is an Error that names
// it.
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

#include "tokenizer/bpe_model.h"
#include "tokenizer/eot_config.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// The end of text is options.eot; or the only special token of a post-processor's template that adds nothing,
// which is how we note it; or one of the usual names; or what the configuration beside the file says.
BpeModel load_tokenizer_json(const std::filesystem::path& file, const TokenizerOptions& options = {});
// `what` names the text in errors; `beside`: what other files say of the end of text.
BpeModel parse_tokenizer_json(std::string_view text, std::string_view what,
                              const TokenizerOptions& options = {},
                              const std::function<EotChoice()>& beside = {});

}  // namespace sps
