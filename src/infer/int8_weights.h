// Weights in 8 bits (ops/int8_linear), as numbers: what a model says whose products read them so.
#pragma once

#include "model/parameters.h"

namespace sps {

// Every matrix that products read becomes what its 8 bits are read as; norms, gates and embedding tables
// stay, but for one that is the head too. With the store's rounded copies.
void round_to_int8(const ModelParameters& parameters, ParameterStore& store);

}  // namespace sps
