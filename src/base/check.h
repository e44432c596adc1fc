// SPS_CHECK: our own mistakes abort with file and line. Apart from error.h because CUDA's compiler reads this
// one too, and cannot read fmt.
#pragma once

namespace sps {

[[noreturn]] void check_failed(const char* condition, const char* file, int line);

}  // namespace sps

#define SPS_CHECK(condition) ((condition) ? void(0) : ::sps::check_failed(#condition, __FILE__, __LINE__))
