// A cluster of blocks passes over a row once: the largest logit, whether all are numbers and, where it is
// wanted, the sum of the softmax. Where there is something to draw it weighs the ids, and its first block
// draws.
//
// Nothing is sorted. What top_k, top_p and the draw look for is the id at which the ids before it in some
// order, counted or weighed, reach a goal. It is found digit by digit: how much of the row has each value of
// a digit, which of them holds the goal, then the next digit of those alone. Weights are whole numbers, so
// that they may be added up in any order.
#include "ops/launch.cuh"
#include "ops/ptx.cuh"
#include "ops/sample/sample_kernels.h"

namespace sps::ops {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
// Fixed: the order in which the softmax is summed follows from it. (racecheck takes hours over eight.)
#ifdef SPS_RACECHECK
constexpr unsigned kCluster = 2;
#else
constexpr unsigned kCluster = 8;
#endif
constexpr int kDigit = 11, kBins = 1 << kDigit;
constexpr int kIdBits = 22, kPlaceBits = 32 + kIdBits;
static_assert(kMostIds == int64_t{1} << kIdBits && kBins == 2 * kThreads && kPlaceBits <= 5 * kDigit);
constexpr int kListed = 2048;  // ids

struct Problem {
  const float* logits;
  int64_t stride;
  int vocab;
  const SampleRow* rows;
  const int32_t* forbidden;
  int32_t* seen;  // may be null
  int64_t forbidden_stride, seen_stride;
  Sampled* drawn;
  uint64_t* weights;  // scratch: [rows, vocab]
  double unit;        // the likeliest id's weight; the others' are parts of it
};

// Whole numbers in the order of floats; none is 0. -0 is 0.
__device__ __forceinline__ uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float float_of(uint32_t order) {
  return __uint_as_float((order & 0x80000000U) != 0 ? order & 0x7FFFFFFFU : ~order);
}

template <class T, class Combine>
__device__ __forceinline__ T over_warp(T x, Combine&& combine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  return x;
}
// The same in every thread: over the lanes of each warp, then over the warps, in a fixed order.
// over_lanes(x) combines one of every lane.
template <class T, class OverLanes>
__device__ __forceinline__ T over_block(T x, OverLanes&& over_lanes) {
  static_assert(kWarps == kWarp);  // a lane for each
  __shared__ T parts[kWarps];
  x = over_lanes(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  return over_lanes(parts[threadIdx.x % kWarp]);
}
template <class T>
__device__ __forceinline__ T warp_total(T x) {
  return over_warp(x, [](T a, T b) { return a + b; });
}
template <class T>
__device__ __forceinline__ T block_total(T x) {
  return over_block(x, [](T own) { return warp_total(own); });
}

struct Logit {
  float raw, value;  // as the model gave it; after the penalty
  bool allowed;
};

// The row that a block works on.
struct Row {
  const float* logits;
  const int32_t *forbidden, *seen;
  float penalty;
  int vocab;

  static __device__ bool holds(const int32_t* set, int id) {
    return (uint32_t(set[id / 32]) >> (id % 32) & 1U) != 0;
  }
  __device__ Logit at(int id) const { return of(id, __ldcg(logits + id), holds(forbidden, id)); }
  __device__ Logit of(int id, float raw, bool is_forbidden) const {
    Logit l{raw, raw, !is_forbidden};
    if (penalty != 1 && seen != nullptr && holds(seen, id))
      l.value = l.raw > 0 ? l.raw / penalty : l.raw * penalty;
    return l;
  }
};

// What a block finds in its part of the row, as words that other blocks can read.
struct Summary {
  uint64_t best;          // order of the largest allowed value, and the lowest id that has it; 0: none
  uint32_t raw_largest;   // order of the largest logit; 0: none is a number
  uint32_t count;         // of candidates
  uint32_t not_a_number;  // complement of the lowest allowed id whose logit is NaN; 0: none
  uint32_t raw_nan;       // 1: some logit is NaN
  double sum;             // of exp(logit - the largest of the part)
};
constexpr int kSummaryWords = sizeof(Summary) / 4;
static_assert(sizeof(Summary) == 32);

// Differences first: a tiny temperature then gives 0 or 1, and so does an infinite logit; never inf - inf.
__device__ __forceinline__ double exp_apart(float logit, float largest, double temperature = 1) {
  return logit == largest ? 1.0 : exp((double(logit) - double(largest)) / temperature);
}

// One of every lane, without the sum.
__device__ __forceinline__ Summary summary_of_lanes(const Summary& own) {
  constexpr unsigned kAll = 0xFFFFFFFF;
  Summary s{};
  const auto value = uint32_t(own.best >> 32), id = uint32_t(own.best);
  const uint32_t most = __reduce_max_sync(kAll, value);
  s.best = uint64_t{most} << 32 | __reduce_max_sync(kAll, value == most ? id : 0);
  s.raw_largest = __reduce_max_sync(kAll, own.raw_largest);
  s.count = __reduce_add_sync(kAll, own.count);
  s.not_a_number = __reduce_max_sync(kAll, own.not_a_number);
  s.raw_nan = __reduce_max_sync(kAll, own.raw_nan);
  return s;
}

// f(id, logit) for a thread's ids. Several are read before the first is looked at.
template <class F>
__device__ __forceinline__ void visit_ids(const Row& row, int begin, int end, F&& f) {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = begin + int(threadIdx.x); first < end; first += kAtOnce * kThreads) {
    float raw[kAtOnce];
    bool is_forbidden[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      raw[i] = id < end ? __ldcg(row.logits + id) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      is_forbidden[i] = id < end && Row::holds(row.forbidden, id);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      if (id < end) f(id, row.of(id, raw[i], is_forbidden[i]));
    }
  }
}

__device__ Summary summarise(const Row& row, int begin, int end, bool wants_sum) {
  Summary s{};
  visit_ids(row, begin, end, [&](int id, const Logit& l) {
    if (isnan(l.raw))
      s.raw_nan = 1;
    else
      s.raw_largest = max(s.raw_largest, order_of(l.raw));
    if (!l.allowed) return;
    if (isnan(l.value)) {
      s.not_a_number = max(s.not_a_number, ~uint32_t(id));
    } else if (l.value != -INFINITY) {
      ++s.count;
      const uint64_t place = uint64_t{order_of(l.value)} << 32 | ~uint32_t(id);
      s.best = s.best > place ? s.best : place;
    }
  });
  s = over_block(s, summary_of_lanes);
  if (!wants_sum || s.raw_nan != 0) return s;
  const float largest = float_of(s.raw_largest);
  double sum = 0;
  for (int id = begin + int(threadIdx.x); id < end; id += kThreads)
    sum += exp_apart(__ldcg(row.logits + id), largest);
  s.sum = block_total(sum);
  return s;
}

// The blocks' summaries as one, in every block. All blocks have arrived once before, and this waits for it.
__device__ Summary summary_of_cluster(const Summary& own) {
  __shared__ __align__(sizeof(Summary)) uint32_t all[kCluster][kSummaryWords];
  const unsigned blocks = cluster_blocks();
  cluster_wait();
  if (threadIdx.x < blocks) {
    uint32_t words[kSummaryWords];
    memcpy(words, &own, sizeof(own));
#pragma unroll
    for (int i = 0; i < kSummaryWords; ++i) store_to_block(&all[cluster_rank()][i], threadIdx.x, words[i]);
  }
  cluster_barrier();
  const auto part = [&](unsigned b) -> const Summary& { return *reinterpret_cast<const Summary*>(all[b]); };
  Summary s{};
#pragma unroll
  for (unsigned b = 0; b < kCluster; ++b) {
    if (b >= blocks) break;
    const Summary& p = part(b);
    s.best = s.best > p.best ? s.best : p.best;
    s.raw_largest = max(s.raw_largest, p.raw_largest), s.count += p.count;
    s.not_a_number = max(s.not_a_number, p.not_a_number), s.raw_nan = max(s.raw_nan, p.raw_nan);
  }
  for (unsigned b = 0; b < blocks; ++b)
    if (part(b).raw_largest != 0)
      s.sum += part(b).sum * exp_apart(float_of(part(b).raw_largest), float_of(s.raw_largest));
  return s;
}

// Weights by the values of a digit.
struct Bins {
  uint32_t low[kBins], high[kBins];
  uint64_t warp_totals[kWarps];
  uint64_t before;
  int found;

  // Both need a barrier before the next use of the bins.
  __device__ void clear() {
    for (int i = int(threadIdx.x); i < kBins; i += kThreads) low[i] = high[i] = 0;
  }
  __device__ void set(int bin, uint64_t weight) {
    low[bin] = uint32_t(weight), high[bin] = uint32_t(weight >> 32);
  }
  // 64 bits in two halves: additions to shared memory are fast for 32.
  __device__ void add(int bin, uint64_t weight) {
    const auto lower = uint32_t(weight);
    const uint32_t carry = lower > ~atomicAdd(&low[bin], lower) ? 1 : 0;
    const uint32_t upper = uint32_t(weight >> 32) + carry;
    if (upper != 0) atomicAdd(&high[bin], upper);
  }
  // The bin at which the weights, added up from bin 0, reach the goal (1 .. all of them); what lies before it
  // is taken from the goal.
  __device__ int find(uint64_t& goal) {
    __syncthreads();
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, first = 2 * int(threadIdx.x);
    const auto weight = [&](int bin) { return uint64_t{high[bin]} << 32 | low[bin]; };
    const uint64_t a = weight(first), b = weight(first + 1);
    uint64_t sum = a + b;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint64_t left = __shfl_up_sync(0xFFFFFFFFU, sum, unsigned(step));
      if (lane >= step) sum += left;
    }
    if (lane == kWarp - 1) warp_totals[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += warp_totals[w];
    const uint64_t start = sum - a - b;
    if (start < goal && goal <= sum) {
      const bool second = goal > start + a;
      found = first + (second ? 1 : 0), before = start + (second ? a : 0);
    }
    __syncthreads();
    goal -= before;
    return found;
  }
};

// The first block's search. A candidate's place: by size, equal ones by id, the largest first.
struct Search {
  Row row;
  SampleRow options;
  const uint64_t* weights;
  double unit;
  float largest;
  Bins& bins;
  int* list;
  int& listed;
  uint64_t last = ~uint64_t{0};  // candidates behind this place are out

  static __device__ uint64_t place(float value, int id) {
    return uint64_t{~order_of(value)} << kIdBits | unsigned(id);
  }
  // How far below the largest, coarsely: spreads what the first digit of a place would leave together.
  __device__ int distance(float value) const {
    if (value == largest) return 0;
    return int(fminf((largest - value) * 64, float(kBins - 1)));
  }
  // f(id, value) for every candidate that is still in.
  __device__ bool is_in(int id, const Logit& l) const {
    return l.allowed && l.value != -INFINITY && place(l.value, id) <= last;
  }
  template <class F>
  __device__ void visit_one(int id, F&& f) const {
    if (const Logit l = row.at(id); is_in(id, l)) f(id, l.value);
  }
  template <class F>
  __device__ void visit(F&& f) const {
    visit_ids(row, 0, row.vocab, [&](int id, const Logit& l) {
      if (is_in(id, l)) f(id, l.value);
    });
  }

  template <class Weigh>
  __device__ uint64_t total(Weigh&& weigh) const {
    uint64_t sum = 0;
    visit([&](int id, float) { sum += weigh(id); });
    return block_total(sum);
  }

  // The place at which the candidates, the largest first, reach the goal.
  template <class Weigh>
  __device__ uint64_t reach(uint64_t goal, Weigh&& weigh) {
    __syncthreads();
    bins.clear();
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    visit([&](int id, float value) { bins.add(distance(value), weigh(id)); });
    const int near = bins.find(goal);
    visit([&](int id, float value) {
      if (distance(value) != near) return;
      const int at = atomicAdd(&listed, 1);
      if (at < kListed) list[at] = id;
    });
    __syncthreads();
    const bool all_listed = listed <= kListed;
    uint64_t found = 0;
    for (int shift = 4 * kDigit; shift >= 0; shift -= kDigit) {
      bins.clear();
      __syncthreads();
      const auto count = [&](int id, float value) {
        const uint64_t at = place(value, id);
        if (distance(value) == near && at >> (shift + kDigit) == found)
          bins.add(int(at >> shift) & (kBins - 1), weigh(id));
      };
      if (all_listed)
        for (int i = int(threadIdx.x); i < listed; i += kThreads) visit_one(list[i], count);
      else
        visit(count);
      found = found << kDigit | unsigned(bins.find(goal));
    }
    return found;
  }

  // The id at which the candidates, by number, reach the goal.
  template <class Weigh>
  __device__ int reach_by_id(uint64_t goal, Weigh&& weigh) {
    const int lane = int(threadIdx.x) % kWarp;
    __syncthreads();
    bins.clear();
    __syncthreads();
    for (int block = int(threadIdx.x) / kWarp; block * kBins < row.vocab; block += kWarps) {
      uint64_t sum = 0;
      for (int id = block * kBins + lane; id < min((block + 1) * kBins, row.vocab); id += kWarp)
        visit_one(id, [&](int, float) { sum += weigh(id); });
      sum = warp_total(sum);
      if (lane == 0) bins.set(block, sum);
    }
    const int first = bins.find(goal) * kBins;
    bins.clear();
    __syncthreads();
    for (int i = int(threadIdx.x); i < kBins && first + i < row.vocab; i += kThreads)
      visit_one(first + i, [&](int id, float) { bins.set(i, weigh(id)); });
    return first + bins.find(goal);
  }

  __device__ int draw(uint32_t candidates) {
    const bool top_k = options.top_k > 0 && uint32_t(options.top_k) < candidates;
    if (top_k) last = reach(uint64_t(options.top_k), [](int) { return uint64_t{1}; });
    if (options.top_p < 1) {
      const auto weigh = [&](int id) { return __ldcg(weights + id); };
      const uint64_t all = total(weigh);
      const auto goal = uint64_t(ceil(options.top_p * double(all) * (1 - 1e-12)));
      last = reach(min(max(goal, uint64_t{1}), all), weigh);
    }
    const auto least = uint64_t(options.min_p * unit + 0.5);
    const auto weigh = [&](int id) {
      const uint64_t weight = __ldcg(weights + id);
      return weight < least ? uint64_t{0} : weight;
    };
    const uint64_t all = total(weigh), goal = min(uint64_t(options.uniform * double(all)) + 1, all);
    if (!top_k && options.top_p >= 1) return reach_by_id(goal, weigh);
    return int(reach(goal, weigh) & ((1U << kIdBits) - 1));
  }
};

__global__ void __launch_bounds__(kThreads) sample_kernel(const Problem p) {
  __shared__ Bins bins;
  __shared__ int list[kListed];
  __shared__ int listed;
  cluster_arrive_relaxed();
  let_next_start();
  wait_for_previous();
  const int blocks = int(cluster_blocks()), rank = int(cluster_rank()), r = int(blockIdx.x) / blocks;
  const SampleRow options = p.rows[r];
  int32_t* const seen = p.seen != nullptr ? p.seen + options.set * p.seen_stride : nullptr;
  const Row row{p.logits + r * p.stride, p.forbidden + options.set * p.forbidden_stride, seen,
                options.repetition_penalty, p.vocab};
  const int part = (p.vocab + blocks - 1) / blocks, begin = min(rank * part, p.vocab);
  const int end = min(begin + part, p.vocab);
  const Summary s = summary_of_cluster(summarise(row, begin, end, options.log_probability != 0));
  const float largest = float_of(uint32_t(s.best >> 32));
  uint64_t* const weights = p.weights + int64_t{r} * p.vocab;
  if (options.temperature > 0 && s.best != 0) {
    for (int id = begin + int(threadIdx.x); id < end; id += kThreads) {
      const Logit l = row.at(id);
      double weight = 0;
      if (l.allowed) weight = exp_apart(l.value, largest, options.temperature);
      weights[id] = uint64_t(weight * p.unit + 0.5);
    }
    cluster_barrier();
  }
  if (rank != 0) return;

  Sampled drawn{0, -1, SampleProblem::none};
  if (s.not_a_number != 0) {
    drawn = {NAN, int32_t(~s.not_a_number), SampleProblem::not_a_number};
  } else if (s.best == 0) {
    drawn.problem = SampleProblem::nothing_left;
  } else {
    drawn.id = int32_t(~uint32_t(s.best));
    if (options.temperature > 0) {
      Search search{row, options, weights, p.unit, largest, bins, list, listed};
      drawn.id = search.draw(s.count);
    }
    if (options.log_probability != 0) {
      const float raw = row.at(drawn.id).raw, largest = float_of(s.raw_largest);
      drawn.log_probability =
          s.raw_nan != 0 ? NAN : (raw == largest ? 0.0 : double(raw) - double(largest)) - log(s.sum);
    }
  }
  __syncthreads();  // everybody has read `seen`
  if (threadIdx.x != 0) return;
  p.drawn[r] = drawn;
  if (seen != nullptr && drawn.problem == SampleProblem::none)
    seen[drawn.id / 32] |= int32_t(1U << (drawn.id % 32));
}

}  // namespace

void sample_cuda(const Exec& ex, Tensor logits, std::span<const SampleRow> rows, Tensor forbidden,
                 Tensor seen, std::span<Sampled> drawn) {
  Problem p{};
  p.logits = logits.as<float>(), p.stride = logits.stride, p.vocab = int(logits.cols);
  p.rows = rows.data(), p.drawn = drawn.data();
  p.forbidden = forbidden.as<int32_t>(), p.forbidden_stride = forbidden.stride;
  if (!seen.empty()) p.seen = seen.as<int32_t>(), p.seen_stride = seen.stride;
  p.weights = reinterpret_cast<uint64_t*>(
      device_scratch(ex, DeviceSlot::rows, size_t(logits.rows * logits.cols) * sizeof(uint64_t)));
  // All weights of a row together stay below 2^63.
  p.unit = 1;
  for (int64_t most = p.vocab; most < int64_t{1} << 62; most *= 2) p.unit *= 2;
  const unsigned cluster = starts_behind() ? kCluster : 1;
  launch_behind(ex, {dim3(unsigned(logits.rows) * cluster), dim3(kThreads), 0, cluster}, sample_kernel, p);
}

}  // namespace sps::ops
