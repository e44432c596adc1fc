// The implementations behind embedding.h; arguments as there, shapes already checked.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

void embedding_forward_ref(std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y);
void embedding_backward_ref(std::span<const int32_t> ids, Tensor dy, Tensor dtable, Tensor dvector);

void embedding_forward_cpu(std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y);
void embedding_backward_cpu(std::span<const int32_t> ids, Tensor dy, Tensor dtable, Tensor dvector);

void embedding_forward_cuda(const Exec& ex, std::span<const int32_t> ids, Tensor table, Tensor vector,
                            Tensor y);
void embedding_backward_cuda(const Exec& ex, std::span<const int32_t> ids, Tensor dy, Tensor dtable,
                             Tensor dvector);

}  // namespace sps::ops
