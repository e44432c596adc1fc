// For the tests and the benchmark: an attention call that owns its tensors.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "ops/attention/attention.h"
#include "ops/check.h"

namespace sps::ops {

// Runs its scope on this many threads. Tiny calls are faster on one.
class Threads {
 public:
  explicit Threads(int threads) : before_(thread_count()) { set_thread_count(threads); }
  ~Threads() { set_thread_count(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

using Bands = std::array<std::array<Band, kMaxKeySets>, kMaxQueryStreams>;

struct AttentionCase {
  int64_t batch = 1, length = 1, heads = 1, kv_heads = 1, head_dim = 16;
  Bands bands{};  // empty bands by default
  std::array<bool, kMaxQueryStreams> streams{true, false};
  std::array<bool, kMaxKeySets> sets{true, false, false};
  int64_t apart = 1;  // padding of the rows of q, k, v, dk: 0 none, 1 odd, 8 so that they stay aligned
  int64_t document =
      0;  // 0: one document; else lengths vary around this, and the second document has length 1
  std::string name = "";
  Device device = Device::cpu;
};

// The two-stream bands of design section 1: streams x, p; sets x, p.
inline AttentionCase two_streams(AttentionCase c, Band xx, Band xp, Band px, Band pp) {
  c.streams = {true, true};
  c.sets = {true, !(xp.empty() && pp.empty()), false};
  c.bands[0] = {xx, xp, Band::none()};
  c.bands[1] = {px, pp, Band::none()};
  return c;
}
inline AttentionCase standard(AttentionCase c) {
  c.bands[0][0] = Band::causal();
  return c;
}
inline AttentionCase sps(AttentionCase c, int64_t w) {
  return two_streams(std::move(c), Band::causal(), {1, w}, Band::causal(), {0, w});
}
inline AttentionCase reverse_sps(AttentionCase c, int64_t w) {
  return two_streams(std::move(c), {0, w}, {1, Band::kInf}, {0, w}, Band::causal());
}
inline AttentionCase free_pause(AttentionCase c) {
  return two_streams(std::move(c), Band::causal(), Band::none(), Band::causal(), Band::none());
}

class AttentionCall {
 public:
  AttentionCall(const AttentionCase& c, DType dtype, uint64_t seed = 1, DType grads = DType::f32)
      : AttentionCall(c, dtype, grads) {
    const Rng rng(seed, "documents");
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t i = 0, start = 0, next = c.document, n = 0; i < c.length; ++i) {
        if (c.document > 0 && i == next) {
          start = i;
          next =
              i +
              (n++ == 0 ? 1 : 1 + int64_t(rng.below(uint64_t(b * c.length + i), uint64_t(2 * c.document))));
        }
        starts_[size_t(b * c.length + i)] = int32_t(start);
      }
    }
    for (size_t s = 0; s < q.size(); ++s) {
      q[s].randomise(seed, fmt::format("q{}", s));
      d_o[s].randomise(seed, fmt::format("d_o{}", s));
    }
    for (size_t s = 0; s < k.size(); ++s) {
      k[s].randomise(seed, fmt::format("k{}", s));
      v[s].randomise(seed, fmt::format("v{}", s));
    }
  }
  // The same numbers in double, everything in f64.
  AttentionCall reference() const {
    AttentionCase on_cpu = c_;
    on_cpu.device = Device::cpu;
    AttentionCall r(on_cpu, DType::f64, DType::f64);
    r.starts_ = starts_;
    for (size_t s = 0; s < q.size(); ++s) r.q[s] = q[s].to(DType::f64), r.d_o[s] = d_o[s].to(DType::f64);
    for (size_t s = 0; s < k.size(); ++s) r.k[s] = k[s].to(DType::f64), r.v[s] = v[s].to(DType::f64);
    return r;
  }
  void forward() {
    OnDevice on(c_.device);
    attention_forward(on.exec(), shape(on), queries(on), keys(on));
  }
  void backward() {
    OnDevice on(c_.device);
    std::array<QueryGrad, kMaxQueryStreams> qg;
    std::array<KeyGrad, kMaxKeySets> kg;
    for (size_t s = 0; s < q.size(); ++s)
      if (c_.streams[s]) qg[s] = {on(d_o[s]), on(dq[s])};
    for (size_t s = 0; s < k.size(); ++s)
      if (c_.sets[s] && wanted[s]) kg[s] = {on(dk[s]), on(dv[s]), accumulate};
    attention_backward(on.exec(), shape(on), queries(on), keys(on), qg, kg);
  }
  int64_t visible_pairs() const {  // of one head, all streams, sequences and documents
    int64_t pairs = 0;
    for (size_t r = 0; r < starts_.size(); ++r) {
      const bool last =
          r + 1 == starts_.size() || starts_[r + 1] != starts_[r] || int64_t(r + 1) % c_.length == 0;
      if (!last) continue;
      for (size_t s = 0; s < q.size(); ++s)
        for (const Band& band : c_.bands[s])
          if (c_.streams[s]) pairs += band_area(band, int64_t(r) % c_.length - starts_[r] + 1);
    }
    return pairs;
  }
  const AttentionCase& config() const { return c_; }

  std::array<Matrix, kMaxQueryStreams> q, o, lse, d_o, dq;
  std::array<Matrix, kMaxKeySets> k, v, dk, dv;
  float scale;
  bool skip_tiles = true, accumulate = false;
  std::array<bool, kMaxKeySets> wanted{true, true, true};  // key gradients that backward is asked for
  std::vector<int32_t> starts_;

 private:
  AttentionCall(const AttentionCase& c, DType dtype, DType grads)
      : scale(1 / std::sqrt(float(c.head_dim))), starts_(size_t(c.batch * c.length), 0), c_(c) {
    const int64_t apart = c.apart, rows = c.batch * c.length, wide = c.heads * c.head_dim,
                  narrow = c.kv_heads * c.head_dim;
    for (size_t s = 0; s < q.size(); ++s) {
      if (!c.streams[s]) continue;
      q[s] = Matrix(dtype, rows, wide, wide + 7 * apart), o[s] = Matrix(dtype, rows, wide),
      d_o[s] = Matrix(dtype, rows, wide);
      dq[s] = Matrix(grads, rows, wide);
      lse[s] = Matrix(dtype == DType::f64 ? DType::f64 : DType::f32, rows, c.heads);
    }
    for (size_t s = 0; s < k.size(); ++s) {
      if (!c.sets[s]) continue;
      k[s] = Matrix(dtype, rows, narrow, narrow + 3 * apart),
      v[s] = Matrix(dtype, rows, narrow, narrow + 5 * apart);
      dk[s] = Matrix(grads, rows, narrow, narrow + apart), dv[s] = Matrix(grads, rows, narrow);
    }
  }
  AttentionShape shape(OnDevice& on) const {
    return {c_.batch, c_.length, c_.heads, c_.kv_heads, c_.head_dim, scale, on.ids(starts_), skip_tiles};
  }
  std::array<QueryStream, kMaxQueryStreams> queries(OnDevice& on) const {
    std::array<QueryStream, kMaxQueryStreams> streams;
    for (size_t s = 0; s < q.size(); ++s)
      if (c_.streams[s]) streams[s] = {on(q[s]), on(o[s]), on(lse[s]), c_.bands[s]};
    return streams;
  }
  std::array<KeySet, kMaxKeySets> keys(OnDevice& on) const {
    std::array<KeySet, kMaxKeySets> sets;
    for (size_t s = 0; s < k.size(); ++s)
      if (c_.sets[s]) sets[s] = {on(k[s]), on(v[s])};
    return sets;
  }
  AttentionCase c_;
};

// Every result of the call: o and lse of the streams, and after backward dq, dk, dv.
struct Result {
  std::string name;
  const Matrix* matrix;
};
inline std::vector<Result> results(const AttentionCall& call, bool backward) {
  std::vector<Result> all;
  for (size_t s = 0; s < call.q.size(); ++s) {
    if (!call.config().streams[s]) continue;
    all.push_back({fmt::format("o{}", s), &call.o[s]});
    all.push_back({fmt::format("lse{}", s), &call.lse[s]});
    if (backward) all.push_back({fmt::format("dq{}", s), &call.dq[s]});
  }
  for (size_t s = 0; s < call.k.size(); ++s) {
    if (!call.config().sets[s] || !backward) continue;
    all.push_back({fmt::format("dk{}", s), &call.dk[s]});
    all.push_back({fmt::format("dv{}", s), &call.dv[s]});
  }
  return all;
}

// Tests of the fast code. On a GPU bf16 takes one way if rows are aligned and another if not.
struct Kind {
  Device device = Device::cpu;
  DType dtype = DType::f32;
  int64_t apart = 1;
};
class AttentionOn : public testing::TestWithParam<Kind> {
 public:
  static auto kinds() {
    std::vector<Kind> all;
    for (const Device device : test_devices())
      for (const DType dtype : {DType::f32, DType::bf16}) all.push_back({device, dtype, 1});
    if (all.back().device == Device::cuda) all.push_back({Device::cuda, DType::bf16, 8});
    return testing::ValuesIn(all);
  }
  static std::string name(const testing::TestParamInfo<Kind>& info) {
    return fmt::format("{}_{}{}", info.param.device == Device::cuda ? "cuda" : "cpu",
                       dtype_name(info.param.dtype), info.param.apart == 8 ? "_aligned" : "");
  }

 protected:
  static DType dtype() { return GetParam().dtype; }
  static AttentionCase here(AttentionCase c) {
    c.device = GetParam().device;
    c.apart = GetParam().apart;
    return c;
  }
};

}  // namespace sps::ops
