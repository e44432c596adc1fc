// Text generation by running the whole sequence through the model for every new token: slow and plainly
// right. It is the truth that cached decoding is held to.
#pragma once

#include <functional>

#include "infer/request.h"
#include "model/model.h"

namespace sps {

// Sees an id as it is drawn, with the logits it was drawn from; false ends the text.
using EachId = std::function<bool(int32_t id, std::span<const float> logits)>;

// Returns the new ids. Errors as checked_prompt says.
std::vector<int32_t> generate(Model& model, std::span<const int32_t> prompt, const GenerateOptions& options,
                              const EachId& each = {});

}  // namespace sps
