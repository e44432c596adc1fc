// A stretch of a decode step as one kernel. What decode_linear and decode_attention are told to do, call by
// call, is written down as a list of stages; one launch then runs them all, on every multiprocessor at the
// same time, with the bits that the calls themselves would have given:
//
//   linear         decode_linear          linear_swiglu  decode_linear_swiglu
//   linear_add     decode_linear_add      attention      decode_attention with rotation
//
// Order    Stages give what they would give as kernels one after the other; each begins when what it reads is
//          there. Weights and gains must be older than the launch; they are read ahead, past the ends of
//          stages, and so are the keys that attention's caches hold of earlier steps.
// Use      add calls, launch(), add others, launch(), ... into a graph (StreamGraph::record), then upload()
//          before it is started: the stages lie in this object's memory, which the graph must not outlive.
//          The kernel wants the whole GPU: all of its blocks run at once, and wait for each other.
// False    A call that returns false is not in the list: more than kMostProgramRows rows, other types than
//          bf16, rows that are not whole chunks of 64 numbers, cannot be read 16 bytes at a
//          time or do not fit, no more room for stages. Whoever asked then launches what there is and makes
//          the call itself.
#pragma once

#include <memory>

#include "ops/decode_attention/decode_attention.h"
#include "ops/decode_linear/decode_linear.h"

namespace sps::ops {

inline constexpr int64_t kMostProgramRows = 8;

class DecodeProgram {
 public:
  // On this GPU there is such a kernel (sm_90).
  static bool usable(const Exec& ex);

  // Without `mail` every stage waits until all of the one before has ended, to be compared with.
  DecodeProgram(const Exec& ex, int64_t most_stages, bool mail = true);
  ~DecodeProgram();
  DecodeProgram(DecodeProgram&&) noexcept;
  DecodeProgram& operator=(DecodeProgram&&) noexcept;

  bool linear(const DecodeRows& x, Tensor w, Tensor y, Tensor rest = {});
  bool linear_swiglu(const DecodeRows& x, Tensor w, Tensor h);
  bool linear_add(Tensor x, Tensor w, Tensor s);
  bool attention(const DecodeShape& shape, const DecodeStep& step,
                 const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                 const std::array<DecodeKeys, kMaxKeySets>& keys, const DecodeRotation& rotation);

  // Of what was added since the last one; nothing where that is nothing.
  void launch();
  void upload();

  // Of more than one stage; and those of them whose stages hand their results on as they come, where the
  // others' wait for each other.
  struct Launches {
    int64_t all = 0, by_mail = 0;
  };
  Launches launches() const;

 private:
  struct List;
  std::unique_ptr<List> list_;
};

}  // namespace sps::ops
