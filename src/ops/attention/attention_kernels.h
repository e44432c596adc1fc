// The two implementations behind attention.h. Arguments are as there, already checked by attention.cpp.
#pragma once

#include "ops/attention/attention.h"

namespace sps::ops {

using QueryStreams = std::array<QueryStream, kMaxQueryStreams>;
using KeySets = std::array<KeySet, kMaxKeySets>;
using QueryGrads = std::array<QueryGrad, kMaxQueryStreams>;
using KeyGrads = std::array<KeyGrad, kMaxKeySets>;

// Plain loops in double: f64 tensors (lse and gradients also f32). Backward needs neither o nor lse.
void attention_forward_ref(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys);
void attention_backward_ref(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                            const QueryGrads& query_grads, const KeyGrads& key_grads);

// Tiles: f32 and bf16.
void attention_forward_cpu(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys);
void attention_backward_cpu(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                            const QueryGrads& query_grads, const KeyGrads& key_grads);

}  // namespace sps::ops
