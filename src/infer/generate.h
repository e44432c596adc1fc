// Text generation by running the whole sequence through the model for every new token: slow and plainly
// right. It is the truth that cached decoding is held to.
#pragma once

#include <functional>

#include "infer/request.h"
#include "model/model.h"

namespace sps {

// Returns the new ids; `each` sees every one as it is drawn. Errors as checked_prompt says.
std::vector<int32_t> generate(Model& model, std::span<const int32_t> prompt, const GenerateOptions& options,
                              const std::function<void(int32_t)>& each = {});

}  // namespace sps
