// What joins data and model: a batch of windows as the model reads it.
#pragma once

#include "data/batch.h"
#include "model/config.h"
#include "model/input.h"

namespace sps {

// Windows of a token file are never padded.
inline SpecialIds special_ids(const ModelConfig& c) { return {int32_t(c.eot), -1, c.eot_begins()}; }

// Refers to the batch's vectors.
inline ModelInput model_input(const Batch& b) {
  return {b.batch, b.length, b.tokens, b.targets, b.document_start, b.positions};
}

}  // namespace sps
