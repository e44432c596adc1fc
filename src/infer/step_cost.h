// What inference cannot do without, counted from the plan: the bytes of a decoding step and the FLOPs of
// reading a prompt. Figures to hold measured times against.
#pragma once

#include <cstdint>
#include <span>

#include "model/flops.h"
#include "model/parameters.h"

namespace sps {

struct StepBytes {
  double weights =
      0;  // every tensor that the step reads, once, however many texts and streams; of tables a row each
  double keys = 0;    // keys and values of earlier positions that attention reads, and those that are kept
  double logits = 0;  // written once and read once, in f32
  double total() const { return weights + keys + logits; }
};

// A step that takes some texts one position on. Activations are not counted: they stay in caches. Keys are
// read once by each attention call that sees them, by both streams together; a block that other blocks read
// too is read again.
class StepTraffic {
 public:
  // dtype: of products and caches. int8: products read Int8Weights.
  StepTraffic(const Plan& plan, DType dtype, bool int8 = false);
  // Of each text the positions before the one that the step reads.
  StepBytes of(std::span<const int64_t> positions) const;

 private:
  struct Reads {
    Horizon horizon;
    int64_t bytes = 0;  // of a position
  };
  void add_weights(const Plan& plan, DType dtype, bool int8);
  void add_keys(const Plan& plan, DType dtype);

  double weights_ = 0;  // of a step
  double rows_ = 0;     // rows of embedding tables, of a text
  double kept_ = 0;     // keys and values that are written, of a text
  double logits_ = 0;   // of a text
  std::vector<Reads> reads_;
};

// A prompt of `length` tokens up to the logits that follow it, as the decoder reads it, in whatever pieces:
// state rows of every position, prediction rows of the last needed_pred_rows in every block, one row of
// logits. (What no way of reading it could do without is prefill_flops in model/describe.h.)
Flops decoder_prefill_flops(const Plan& plan, int64_t length);

}  // namespace sps
