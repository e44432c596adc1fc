#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace sps {

void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "sps: internal error at %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace sps
