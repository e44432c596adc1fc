// Embedding: y[r] = table[ids[r]] (+ vector). Source: model spec "Common backbone"; the vector is the second
// paper's learned prediction embedding, added to the token's own row by pred.input = token.
//
// Shapes   ids [rows] in [0, table.rows); table [vocab, d]; vector [1, d] or empty; y [rows, d]
// Types    table, vector, y and all gradients: f32 (f64 in the reference); the residual stream starts in f32
// Gradient dtable[ids[r]] += dy[r]  (equal ids add in row order);  dvector += sum_r dy[r]
//          On a GPU the rows, sorted by id, are added up in lists of 32, then the lists of an id in their
//          order.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

void embedding_forward(const Exec& ex, std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y);
// Adds to dtable and, where it is not empty, to dvector.
void embedding_backward(const Exec& ex, std::span<const int32_t> ids, Tensor dy, Tensor dtable,
                        Tensor dvector);

}  // namespace sps::ops
