// A cluster of blocks passes over a row once: the largest logit, whether all are numbers and, where it is
// wanted, the sum of the softmax. Where there is something to draw it searches for that (sample_search.cuh).
#include "ops/sample/sample_search.cuh"

namespace sps::ops {

namespace {

using namespace draws;

struct Problem {
  const float* logits;
  int64_t stride;
  int vocab;
  const SampleRow* rows;
  const int32_t* forbidden;
  int32_t* seen;  // may be null
  int64_t forbidden_stride, seen_stride;
  Sampled* drawn;
  double unit;  // see Search
};

__device__ Summary summarise(const Row& row, int begin, int end, bool wants_sum) {
  Summary s{};
  visit_ids<16>(row, begin, end, [&](int id, const Logit& l) {
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

__global__ void __launch_bounds__(kThreads, 2) sample_kernel(const Problem p) {
  __shared__ Workspace shared;
  cluster_arrive_relaxed();
  let_next_start();
  const int blocks = int(cluster_blocks()), rank = int(cluster_rank()), r = int(blockIdx.x) / blocks;
  const SampleRow options = p.rows[r];  // no kernel writes it
  wait_for_previous();
  int32_t* const seen = p.seen != nullptr ? p.seen + options.set * p.seen_stride : nullptr;
  const Row row{p.logits + r * p.stride, p.forbidden + options.set * p.forbidden_stride, seen,
                options.repetition_penalty, p.vocab};
  // Whole words of the sets.
  const int part = ((p.vocab + blocks - 1) / blocks + 31) / 32 * 32, begin = min(rank * part, p.vocab);
  const int end = min(begin + part, p.vocab);
  const Summary s = summary_of_cluster(summarise(row, begin, end, options.log_probability != 0));

  Sampled drawn{0, -1, SampleProblem::none};
  bool mine = rank == 0;  // who says it
  if (s.not_a_number != 0) {
    drawn = {NAN, int32_t(~s.not_a_number), SampleProblem::not_a_number};
  } else if (s.best == 0) {
    drawn.problem = SampleProblem::nothing_left;
  } else {
    drawn.id = int32_t(~uint32_t(s.best));
    if (options.temperature > 0) {
      const float largest = float_of(uint32_t(s.best >> 32));
      drawn.id = Search{row, begin, end, options, s.count, largest, p.unit, shared}.draw();
      mine = drawn.id >= 0;
    }
  }
  if (!mine) return;
  __syncthreads();  // everybody has read `seen`: other blocks had before they last met
  if (threadIdx.x != 0) return;
  if (options.log_probability != 0 && drawn.problem == SampleProblem::none) {
    const float raw = row.at(drawn.id).raw, largest = float_of(s.raw_largest);
    drawn.log_probability =
        s.raw_nan != 0 ? NAN : (raw == largest ? 0.0 : double(raw) - double(largest)) - log(s.sum);
  }
  p.drawn[r] = drawn;
  if (seen != nullptr && drawn.problem == SampleProblem::none)
    atomicOr(&seen[drawn.id / 32], int32_t(1U << (drawn.id % 32)));  // which nobody waits for
}

}  // namespace

void sample_cuda(const Exec& ex, Tensor logits, std::span<const SampleRow> rows, Tensor forbidden,
                 Tensor seen, std::span<Sampled> drawn) {
  Problem p{};
  p.logits = logits.as<float>(), p.stride = logits.stride, p.vocab = int(logits.cols);
  p.rows = rows.data(), p.drawn = drawn.data();
  p.forbidden = forbidden.as<int32_t>(), p.forbidden_stride = forbidden.stride;
  if (!seen.empty()) p.seen = seen.as<int32_t>(), p.seen_stride = seen.stride;
  // All weights of a row together stay below 2^63.
  p.unit = 1;
  for (int64_t most = p.vocab; most < int64_t{1} << 62; most *= 2) p.unit *= 2;
  const unsigned cluster = starts_behind() ? kCluster : 1;
  launch_behind(ex, {dim3(unsigned(logits.rows) * cluster), dim3(kThreads), 0, cluster}, sample_kernel, p);
}

}  // namespace sps::ops
