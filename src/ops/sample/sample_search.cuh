// Draws from a row that lies with the blocks of a cluster, a part with each.
//
// What top_k, top_p and the draw look for is the id at which the ids before it in some order, counted or
// weighed, reach a goal. Coarse bins of all parts tell how far below the largest logit it stands. The ids
// down to there are few, as a rule: the first block sorts them and is done alone. Else nothing is sorted, and
// it is found digit by digit: how much of the row has each value of a digit, which of them holds the goal,
// then the next digit of those alone. Weights are whole numbers, so that they may be added up in any order.
#pragma once

#include "ops/sample/sample_row.cuh"

namespace sps::ops::draws {

constexpr int kDigit = 11, kBins = 1 << kDigit, kBinsEach = kBins / kThreads;
constexpr int kIdBits = 22, kPlaceBits = 32 + kIdBits;
static_assert(kMostIds == int64_t{1} << kIdBits && kPlaceBits <= 5 * kDigit);
constexpr int kListed = 1024;  // ids that are sorted, at most
constexpr uint64_t kNoPlace = ~uint64_t{0};

// Weights by the values of a digit. Between two uses lies a barrier of all who look at them.
struct Bins {
  uint32_t low[kBins], high[kBins];
  uint64_t warp_totals[kWarps];
  uint64_t before;
  int found;

  __device__ void clear() {
    __syncthreads();
    for (int i = int(threadIdx.x); i < kBins; i += kThreads) low[i] = high[i] = 0;
    __syncthreads();
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
  // is taken from the goal. A thread has up to kBinsEach, from `first` on.
  __device__ int find(const uint64_t (&weights)[kBinsEach], int first, uint64_t& goal) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) own += weights[i];
    uint64_t sum = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint64_t left = __shfl_up_sync(0xFFFFFFFFU, sum, unsigned(step));
      if (lane >= step) sum += left;
    }
    if (lane == kWarp - 1) warp_totals[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += warp_totals[w];
    uint64_t start = sum - own;
    if (start < goal && goal <= sum) {
      int bin = 0;
#pragma unroll
      for (int i = 0; i < kBinsEach - 1; ++i)
        if (bin == i && goal > start + weights[i]) start += weights[i], ++bin;
      found = first + bin, before = start;
    }
    __syncthreads();
    goal -= before;
    return found;
  }
  // Of this block's bins, once all have been filled.
  __device__ int find(uint64_t& goal) {
    __syncthreads();
    const int first = kBinsEach * int(threadIdx.x);
    uint64_t weights[kBinsEach];
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) weights[i] = uint64_t{high[first + i]} << 32 | low[first + i];
    return find(weights, first, goal);
  }
};

// Shared memory of a block.
struct Workspace {
  alignas(16) Bins bins;
  // The first block's list, sorted by place.
  uint64_t places[kListed], weights[kListed];
  int listed;
  struct Told {
    uint64_t a, b;
  };
  Told told[2][kCluster];  // by all blocks, for turns
};

// A candidate's place: by size, equal ones by id, the largest first.
__device__ __forceinline__ uint64_t place_of(float value, int id) {
  return uint64_t{~order_of(value)} << kIdBits | unsigned(id);
}
__device__ __forceinline__ int id_of(uint64_t place) {
  return int(place & ((1U << kIdBits) - 1));
}

// All blocks of a cluster go through it together.
struct Search {
  Row row;
  int begin, end;  // this block's part
  SampleRow options;
  uint32_t candidates;  // of the row
  float largest;        // of their values
  double unit;          // the likeliest id's weight; the others' are parts of it
  Workspace& shared;
  uint64_t last = kNoPlace;  // candidates behind this place are out
  uint64_t least = 0;        // lighter ones are out of the last draw
  int turn = 0;

  // How far below the largest, coarsely: spreads what the first digit of a place would leave together.
  __device__ int distance(float value) const {
    if (value == largest) return 0;
    return int(fminf((largest - value) * 64, float(kBins - 1)));
  }
  __device__ uint64_t weight(float value) const {
    return uint64_t(exp_apart(value, largest, options.temperature) * unit + 0.5);
  }
  __device__ uint64_t last_weight(float value) const {
    const uint64_t w = weight(value);
    return w < least ? 0 : w;
  }
  // f(id, value) for every candidate of this block's part that is still in.
  template <class F>
  __device__ void visit(F&& f) const {
    visit_ids<8>(row, begin, end, [&](int id, const Logit& l) {
      if (l.allowed && l.value != -INFINITY && place_of(l.value, id) <= last) f(id, l.value);
    });
  }

  // Two numbers of every block, in every block, by rank.
  __device__ const Workspace::Told* tell(uint64_t a, uint64_t b = 0) {
    Workspace::Told* const all = shared.told[turn];
    turn ^= 1;
    if (threadIdx.x < cluster_blocks()) {
      store_to_block(&all[cluster_rank()].a, threadIdx.x, a);
      store_to_block(&all[cluster_rank()].b, threadIdx.x, b);
    }
    cluster_barrier();
    return all;
  }
  // Bins::find of all blocks' bins together, once all have been filled: each block adds up a part of them.
  __device__ int find_in_cluster(uint64_t& goal) {
    const int blocks = int(cluster_blocks()), rank = int(cluster_rank()), here = kBins / blocks,
              each = max(here / kThreads, 1), first = each * int(threadIdx.x);
    cluster_barrier();
    uint64_t weights[kBinsEach] = {};
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) {
      if (i >= each || first >= here) break;
      const int bin = rank * here + first + i;
#pragma unroll
      for (unsigned b = 0; b < kCluster; ++b)
        if (int(b) < blocks) weights[i] += uint64_t{load_from_block(&shared.bins.high[bin], b)} << 32;
#pragma unroll
      for (unsigned b = 0; b < kCluster; ++b)
        if (int(b) < blocks) weights[i] += load_from_block(&shared.bins.low[bin], b);
    }
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) sum += weights[i];
    const Workspace::Told* const parts = tell(block_total(sum));
    uint64_t before = 0;
    int owner = 0;
    for (; owner < blocks - 1 && before + parts[owner].a < goal; ++owner) before += parts[owner].a;
    goal -= before;
    uint64_t left = goal;
    const int bin = rank == owner ? rank * here + shared.bins.find(weights, first, left) : 0;
    const Workspace::Told& found = tell(uint64_t(bin), left)[owner];
    goal = found.b;
    return int(found.a);
  }
  template <class Weigh>
  __device__ uint64_t total(Weigh&& weigh) {
    uint64_t sum = 0;
    visit([&](int, float value) { sum += weigh(value); });
    const Workspace::Told* const all = tell(block_total(sum));
    sum = 0;
    for (unsigned b = 0; b < cluster_blocks(); ++b) sum += all[b].a;
    return sum;
  }
  // The goal of top_p, of so much in all.
  __device__ uint64_t goal_of_top_p(uint64_t all) const {
    const auto goal = uint64_t(ceil(options.top_p * double(all) * (1 - 1e-12)));
    return min(max(goal, uint64_t{1}), all);
  }
  __device__ uint64_t goal_of_draw(uint64_t all) const {
    return min(uint64_t(options.uniform * double(all)) + 1, all);
  }

  // The distance at which the candidates, the largest first, reach the goal.
  template <class Weigh>
  __device__ int near(uint64_t& goal, Weigh&& weigh) {
    shared.bins.clear();
    visit([&](int, float value) { shared.bins.add(distance(value), weigh(value)); });
    return find_in_cluster(goal);
  }
  // Their place there.
  template <class Weigh>
  __device__ uint64_t reach(uint64_t goal, Weigh&& weigh) {
    const int at = near(goal, weigh);
    uint64_t found = 0;
    for (int shift = 4 * kDigit; shift >= 0; shift -= kDigit) {
      shared.bins.clear();
      visit([&](int id, float value) {
        const uint64_t place = place_of(value, id);
        if (distance(value) == at && place >> (shift + kDigit) == found)
          shared.bins.add(int(place >> shift) & (kBins - 1), weigh(value));
      });
      found = found << kDigit | unsigned(find_in_cluster(goal));
    }
    return found;
  }

  // Gives the first block all candidates that are no further away, if they are few.
  __device__ bool list(int furthest) {
    uint32_t own = 0;
    visit([&](int, float value) { own += distance(value) <= furthest ? 1 : 0; });
    if (threadIdx.x == 0) shared.listed = 0;
    const Workspace::Told* const counts = tell(block_total(own));
    uint64_t before = 0, all = 0;
    for (unsigned b = 0; b < cluster_blocks(); ++b) {
      if (b < cluster_rank()) before += counts[b].a;
      all += counts[b].a;
    }
    if (all > kListed) return false;
    visit([&](int id, float value) {
      if (distance(value) > furthest) return;
      const int at = int(before) + atomicAdd(&shared.listed, 1);
      store_to_block(&shared.places[at], 0, place_of(value, id));
      store_to_block(&shared.weights[at], 0, weight(value));
    });
    cluster_barrier();
    if (threadIdx.x == 0) shared.listed = int(all);
    __syncthreads();
    return true;
  }
  // By place; returns how many there are with what fills the list up. By the first block.
  __device__ int sort() {
    int count = 2;
    while (count < shared.listed) count *= 2;
    for (int i = shared.listed + int(threadIdx.x); i < count; i += kThreads)
      shared.places[i] = kNoPlace, shared.weights[i] = 0;
    for (int size = 2; size <= count; size *= 2)
      for (int step = size / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int n = int(threadIdx.x); n < count / 2; n += kThreads) {
          const int i = 2 * n - (n & (step - 1)), j = i + step;
          const uint64_t a = shared.places[i], b = shared.places[j];
          if ((a > b) != ((i & size) == 0)) continue;
          shared.places[i] = b, shared.places[j] = a;
          const uint64_t w = shared.weights[i];
          shared.weights[i] = shared.weights[j], shared.weights[j] = w;
        }
      }
    __syncthreads();
    return count;
  }
  // Of the sorted list's first `kept`, that at which they reach the goal, which goal_of(all) names. Lighter
  // ones than `lightest` do not count.
  template <class Goal>
  __device__ int reach_in_list(int kept, uint64_t lightest, Goal&& goal_of) {
    Bins& bins = shared.bins;
    bins.clear();
    uint64_t sum = 0;
    for (int i = int(threadIdx.x); i < kept; i += kThreads)
      if (const uint64_t w = shared.weights[i]; w >= lightest) bins.set(i, w), sum += w;
    uint64_t goal = goal_of(block_total(sum));
    return bins.find(goal);
  }
  __device__ int draw_from_list(bool top_k) {
    sort();
    int kept = top_k ? options.top_k : shared.listed;
    if (options.top_p < 1)
      kept = 1 + reach_in_list(kept, 0, [&](uint64_t all) {
               // What lies behind the list counts too where top_k has not left it out.
               return goal_of_top_p(top_k ? all : everything);
             });
    const int at = reach_in_list(kept, least, [&](uint64_t all) { return goal_of_draw(all); });
    return id_of(shared.places[at]);
  }
  uint64_t everything = 0;  // the weight of all candidates, for top_p without top_k

  // The ids by number; whoever has the id says so, the others -1.
  __device__ int draw_by_id() {
    Bins& bins = shared.bins;
    const int piece = (end - begin + kBins - 1) / kBins;  // ids of a bin
    bins.clear();
    uint64_t sum = 0;
    visit([&](int id, float value) {
      const uint64_t w = last_weight(value);
      bins.add((id - begin) / piece, w), sum += w;
    });
    const uint64_t own = block_total(sum);
    const Workspace::Told* const sums = tell(own);
    uint64_t before = 0, all = 0;
    for (unsigned b = 0; b < cluster_blocks(); ++b) {
      if (b < cluster_rank()) before += sums[b].a;
      all += sums[b].a;
    }
    uint64_t goal = goal_of_draw(all);
    if (goal <= before || goal > before + own) return -1;
    goal -= before;
    const int first = begin + bins.find(goal) * piece;
    bins.clear();
    for (int i = int(threadIdx.x); i < piece && first + i < end; i += kThreads)
      if (const Logit l = row.at(first + i); l.allowed && l.value != -INFINITY)
        bins.set(i, last_weight(l.value));
    return first + bins.find(goal);
  }

  // The id, in one block; in the others -1.
  __device__ int draw() {
    const bool top_k = options.top_k > 0 && uint32_t(options.top_k) < candidates, top_p = options.top_p < 1;
    least = uint64_t(options.min_p * unit + 0.5);
    if (!top_k && !top_p) return draw_by_id();
    const bool first = cluster_rank() == 0;
    const auto one = [](float) { return uint64_t{1}; };
    const auto weigh = [&](float value) { return weight(value); };
    const auto k = uint64_t(options.top_k);
    if (!top_k) everything = total(weigh);
    if (!top_k || k <= kListed) {
      uint64_t goal = top_k ? k : goal_of_top_p(everything);
      const int furthest = top_k ? near(goal, one) : near(goal, weigh);
      if (list(furthest)) return first ? draw_from_list(top_k) : -1;
    }
    if (top_k) last = reach(k, one);
    if (top_p) last = reach(goal_of_top_p(top_k ? total(weigh) : everything), weigh);
    const auto weigh_last = [&](float value) { return last_weight(value); };
    const uint64_t place = reach(goal_of_draw(total(weigh_last)), weigh_last);
    return first ? id_of(place) : -1;
  }
};

}  // namespace sps::ops::draws
