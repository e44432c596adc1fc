// SwiGLU on lanes (vec.h), for every CPU kernel that computes it.
#pragma once

#include "ops/vec.h"

namespace sps::ops {

inline Lanes swiglu_lanes(Lanes gate, Lanes up) {
  return gate * fast_sigmoid(gate) * up;
}

struct SwigluGradient {
  Lanes gate, up;
};
inline SwigluGradient swiglu_gradient_lanes(Lanes gate, Lanes up, Lanes dh) {
  const Lanes s = fast_sigmoid(gate), ds = dh * s;
  return {ds * up * (1.0F + gate * (1.0F - s)), ds * gate};
}

}  // namespace sps::ops
