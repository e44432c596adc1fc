// What the loaders of JSON vocabularies share: reading the large tables without a tree of JSON values, and
// turning text in GPT-2's alphabet into a BpeModel.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "tokenizer/bpe_model.h"
#include "tokenizer/eot_config.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// Moving nlohmann's json throws nothing, whatever the check takes it for.
struct VocabularyJson {                                     // NOLINT(bugprone-exception-escape)
  std::vector<std::pair<std::string, int64_t>> vocab;       // token, id
  std::vector<std::pair<std::string, std::string>> merges;  // left, right
  nlohmann::json rest;                                      // all but the two; parse_json()'s rules hold
};

// A tokenizer.json: the tables are model.vocab and model.merges. `what` names the file in errors.
VocabularyJson read_tokenizer_json(std::string_view text, std::string_view what);
// An encoder.json or vocab.json: the whole file is the table of tokens.
VocabularyJson read_vocab_json(std::string_view text, std::string_view what);

// "a b" -> a, b; false if there is not exactly one space between two tokens.
bool split_merge(std::string_view text, std::pair<std::string, std::string>& merge);

// Fills in tokens and merges; tokens that model.added has already are left out.
void set_tokens(BpeModel& model, const VocabularyJson& vocabulary, std::string_view what);

// Where to look for the end of text, one after the other: the options; what the file itself notes; the usual
// names; what stands beside the file, which is only looked at if nothing else says it.
struct EotSources {
  const TokenizerOptions& options;
  std::string noted{};
  std::function<EotChoice()> beside{};
};
// Finds the end of text and makes it a special token; model.added gets it if only the tokens have it. Then
// gives model.tokens its final size. Comes last.
void set_eot(BpeModel& model, const EotSources& sources, std::string_view what);
// The token that the usual names alone give; -1 if there is none.
int32_t usual_eot(const BpeModel& model);

// Errors unless `id` may be the id of one of `count` tokens: files have gaps, but not large ones.
void check_id(int64_t id, size_t count, std::string_view token, std::string_view what);

}  // namespace sps
