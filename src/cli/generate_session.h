// sps generate --interactive: lines are read, and each is continued as it appears. All lines and what the
// model made of them are one text, until /new begins another.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "infer/engine.h"
#include "infer/int8_weights.h"
#include "model/load.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// What memory is planned, as --memory says it.
std::string memory_text(const Model& model, const EngineMemory& memory);

// A text as the model reads it: what it reads before every text, then the text's ids.
std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer, std::string_view text);

// Reads standard input to its end or to /quit. What the model says goes to standard output, what the session
// says to standard error. The n-th line draws with the options' seed + n, so the first one becomes what
// --prompt makes of it.
// int8: what the model's products read, where not nullptr. memory: say first what is planned.
void run_generate_session(const Model& model, const Int8Weights* int8, const Tokenizer& tokenizer,
                          const GenerateOptions& options, const std::vector<std::string>& stops, bool memory);

}  // namespace sps
