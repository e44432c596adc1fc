#include "cli/bench_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "base/progress.h"
#include "base/rng.h"
#include "base/threads.h"
#include "ops/attention/attention.h"
#include "tensor/arena.h"
#include "tensor/device.h"

namespace sps {

namespace {

using ops::Band;

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Attention {
 public:
  Attention(const AttentionBench& b, std::string family)
      : family_(std::move(family)), ex_(exec_on(b.device)) {
    const int64_t rows = b.batch * b.length, width = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim;
    const bool pred = family_ != "standard", keys = family_ == "sps";
    const Band none = Band::none(), all = Band::causal();
    const auto lay_out = [&](Arena& a) {
      const auto act = [&](int64_t cols) { return a.take(b.dtype, rows, cols); };
      for (size_t s = 0; s < (pred ? 2 : 1); ++s) {
        queries_[s].q = act(width), queries_[s].o = act(width);
        queries_[s].lse = a.take(DType::f32, rows, b.heads);
        query_grads_[s] = {act(width), act(width)};
      }
      for (size_t s = 0; s < (keys ? 2 : 1); ++s) {
        keys_[s] = {act(kv), act(kv)};
        key_grads_[s] = {act(kv), act(kv), false};
      }
    };
    Arena planning;
    lay_out(planning);
    memory_ = Arena(planning.peak(), b.device);
    lay_out(memory_);
    queries_[0].band = {all, keys ? Band{1, b.window} : none, none};
    if (pred) queries_[1].band = {all, keys ? Band{0, b.window} : none, none};

    const Rng rng(1, "attention");
    std::vector<int32_t> starts(static_cast<size_t>(rows));
    for (int64_t s = 0; s < b.batch; ++s) {
      int64_t start = 0;
      for (int64_t i = 0; i < b.length; ++i) {
        if (b.document > 0 && i > 0 && rng.below(uint64_t(s * b.length + i), uint64_t(b.document)) == 0)
          start = i;
        starts[size_t(s * b.length + i)] = int32_t(start);
        for (size_t q = 0; q < (pred ? 2 : 1); ++q)
          for (const Band band : queries_[q].band)
            if (!band.empty())
              pairs_ +=
                  double(std::max<int64_t>(0, i - band.lo - std::max(start, i - std::min(band.hi, i)) + 1));
      }
    }
    starts_ = Bytes(starts.size() * sizeof(int32_t), memory_of(b.device));
    copy_bytes(ex_, starts_.data(), starts.data(), starts_.size());
    std::vector<bf16> narrow;
    std::vector<float> wide;
    const auto fill = [&](Tensor t) {
      narrow.resize(b.dtype == DType::bf16 ? size_t(t.count()) : 0);
      wide.resize(b.dtype == DType::f32 ? size_t(t.count()) : 0);
      parallel_chunks(t.count(), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto v = float(rng.uniform(uint64_t(i)) * 2 - 1);
          if (b.dtype == DType::bf16)
            narrow[size_t(i)] = bf16(v);
          else
            wide[size_t(i)] = v;
        }
      });
      copy_tensor(
          b.dtype == DType::bf16 ? view(narrow.data(), t.rows, t.cols) : view(wide.data(), t.rows, t.cols),
          t);
    };
    for (size_t s = 0; s < (pred ? 2 : 1); ++s) fill(queries_[s].q), fill(query_grads_[s].d_o);
    for (size_t s = 0; s < (keys ? 2 : 1); ++s) fill(keys_[s].k), fill(keys_[s].v);
    shape_ = {b.batch,
              b.length,
              b.heads,
              b.kv_heads,
              b.head_dim,
              float(1 / std::sqrt(double(b.head_dim))),
              {reinterpret_cast<const int32_t*>(starts_.data()), starts.size()},
              true};
    flops_ = pairs_ * double(b.heads * b.head_dim);
  }

  void round(int calls) {
    forward_.push_back(time(calls, [&] { ops::attention_forward(ex_, shape_, queries_, keys_); }));
    backward_.push_back(time(
        calls, [&] { ops::attention_backward(ex_, shape_, queries_, keys_, query_grads_, key_grads_); }));
  }
  void forget() { forward_.clear(), backward_.clear(); }
  AttentionTime result() {
    const double f = median(forward_), b = median(backward_);
    return {family_, f * 1e3, b * 1e3, 4 * flops_ / f * 1e-12, 10 * flops_ / b * 1e-12};
  }

 private:
  template <class Call>
  double time(int calls, Call&& call) const {
    synchronize(ex_);
    const double began = monotonic_seconds();
    for (int i = 0; i < calls; ++i) call();
    synchronize(ex_);
    return (monotonic_seconds() - began) / calls;
  }

  std::string family_;
  Exec ex_;
  Arena memory_;
  Bytes starts_;
  ops::AttentionShape shape_;
  std::array<ops::QueryStream, ops::kMaxQueryStreams> queries_;
  std::array<ops::KeySet, ops::kMaxKeySets> keys_;
  std::array<ops::QueryGrad, ops::kMaxQueryStreams> query_grads_;
  std::array<ops::KeyGrad, ops::kMaxKeySets> key_grads_;
  double pairs_ = 0, flops_ = 0;
  std::vector<double> forward_, backward_;
};

}  // namespace

std::vector<AttentionTime> time_attention(const AttentionBench& bench) {
  std::vector<std::unique_ptr<Attention>> all;
  for (const char* family : {"standard", "sps", "free_pause"})
    all.push_back(std::make_unique<Attention>(bench, family));
  const bool gpu = bench.device == Device::cuda;
  for (auto& a : all) a->round(1), a->forget();  // warm-up: scratch grows
  for (int round = 0; round < (gpu ? 15 : 5); ++round)
    for (auto& a : all) a->round(gpu ? 10 : 1);
  std::vector<AttentionTime> times;
  for (auto& a : all) times.push_back(a->result());
  return times;
}

}  // namespace sps
