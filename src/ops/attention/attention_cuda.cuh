// Device code that all attention kernels share: which keys a query sees, and which tiles follow from that.
#pragma once

#include "ops/attention/attention_cuda.h"

namespace sps::ops::attention {

struct Interval {
  int begin, end;  // empty where end <= begin
};

// Keys that query i sees.
__device__ inline Interval visible_keys(DeviceBand band, int i, int document_start) {
  return {max(document_start, i - band.hi), i - band.lo + 1};
}

// For the queries first .. last of a sequence. Both ends of a row's interval grow with the row, hence: every
// key that a row sees lies in `any`, and every key in `all` is seen by every row.
struct TileKeys {
  Interval any, all;
};
__device__ inline TileKeys tile_keys(DeviceBand band, int first, int first_document_start, int last,
                                     int last_document_start) {
  const Interval a = visible_keys(band, first, first_document_start);
  const Interval b = visible_keys(band, last, last_document_start);
  return {{a.begin, b.end}, {b.begin, a.end}};
}

}  // namespace sps::ops::attention
