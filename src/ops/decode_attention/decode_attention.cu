// The way from the operation's arguments to kernels, and the keeping of keys.
#include <algorithm>

#include "ops/decode_attention/decode_attention_cuda.cuh"
#include "ops/rope/rope_units.cuh"

namespace sps::ops {

namespace decode {

namespace {

constexpr float kLog2e = 1.44269504F;
constexpr int64_t kFar = int64_t{1} << 30;  // beyond every position

DeviceBand band_of(Band band) {
  if (band.empty() || band.lo >= kFar) return {};
  return {int32_t(band.lo), int32_t(std::min(band.hi, kFar))};
}

// Chunks of a set that the queries of one position can see, whatever the position.
int64_t most_chunks(const DecodeQuerySet& queries, const sps::ops::DecodeKeys& keys, size_t set,
                    int64_t per_slot) {
  int64_t most = 0;
  for (const DecodeQueries& stream : queries) {
    if (!stream.q || stream.band[set].empty()) continue;
    // The interval that both streams' windows lie in begins at the position at the latest.
    const int64_t hi = std::min(stream.band[set].hi, kFar);
    most = std::max(most, hi == 0 ? 1 : (hi + kChunk - 1) / kChunk + 1);
  }
  if (keys.cache.paged) most = std::min(most, (per_slot * keys.cache.rows + kChunk - 1) / kChunk);
  return most;
}

// Whether rows can be moved 16 bytes at a time, however many there are: one row must take the same way as
// many.
bool aligned(const Tensor& t) {
  return t.empty() || (rows_aligned(16, t) && size_t(t.stride) * dtype_size(t.dtype) % 16 == 0);
}

Problem make_problem(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                     const DecodeKeySets& keys) {
  Problem p;
  p.slot = step.slot.data(), p.pages = step.table.pages.data(), p.per_slot = int32_t(step.table.per_slot);
  p.runs = int32_t(step.runs), p.longest = int32_t(step.longest);
  p.heads = int32_t(shape.heads), p.kv_heads = int32_t(shape.kv_heads), p.group = p.heads / p.kv_heads;
  p.head_dim = int32_t(shape.head_dim);
  p.scale_log2 = shape.scale * kLog2e;
  p.aligned = true;
  for (size_t s = 0; s < queries.size(); ++s) {
    const StepRows& rows = step.stream[s];
    DeviceStream& to = p.stream[s];
    to.row = rows.row.data(), to.count = rows.count.data(), to.begin = rows.begin.data();
    to.first = rows.first.data(), to.document_start = rows.document_start.data();
    const DecodeQueries& from = queries[s];
    if (!from.q) continue;
    ++p.streams;
    p.dtype = from.q.dtype;
    to.q = from.q.data, to.o = from.o.data, to.q_stride = from.q.stride, to.o_stride = from.o.stride;
    p.aligned = p.aligned && aligned(from.q) && aligned(from.o);
    for (size_t k = 0; k < keys.size(); ++k) to.band[k] = band_of(from.band[k]);
  }
  int64_t items = 0;
  for (size_t k = 0; k < keys.size(); ++k) {
    const sps::ops::DecodeKeys& from = keys[k];
    if (!from.k) continue;
    const KeyCache& cache = from.cache;
    DeviceKeys& to = p.set[k];
    to.k = from.k.data, to.v = from.v.data, to.k_stride = from.k.stride, to.v_stride = from.v.stride;
    to.stream = from.stream;
    p.aligned = p.aligned && aligned(from.k) && aligned(from.v);
    items += most_chunks(queries, from, k, step.table.per_slot);
    if (!cache.k) continue;
    to.cache_k = cache.k.data, to.cache_v = cache.v.data;
    to.rows = int32_t(cache.rows), to.paged = cache.paged;
    to.whole_chunks = cache.rows % kChunk == 0;
    SPS_CHECK(cache.k.rows < INT32_MAX);
    p.aligned = p.aligned && aligned(cache.k) && aligned(cache.v);
  }
  p.most_items = int32_t(std::max<int64_t>(items, 1));
  SPS_CHECK(step.table.per_slot < kFar);
  return p;
}

bool tensor_cores_serve(const Problem& p) {
  return p.dtype == DType::bf16 && p.aligned && p.head_dim % 8 == 0 && p.head_dim <= 128;
}

// False: these kernels do not turn such rows.
bool add_rotation(Problem& p, const DecodeStep& step, const DecodeQuerySet& queries,
                  const DecodeKeySets& keys, const DecodeRotation& rotation) {
  const RopeTable& table = rotation.table;
  const rope::Shape shape{0, p.heads, p.head_dim, int(table.cos.cols), table.pairs == RopePairs::adjacent};
  bool fits = step.longest == 1 && tensor_cores_serve(p) && p.streams * p.group <= kMostTurnedQueries &&
              p.head_dim % (2 * kPiece) == 0 && shape.pairs % kPiece == 0 &&
              in_pieces({table.cos, table.sin});
  int norms = 0, turned = 0;
  const auto count = [&](const Tensor& gain) {
    ++turned, norms += int(bool(gain));
    fits = fits && in_pieces({gain});
  };
  for (size_t s = 0; s < queries.size(); ++s) {
    if (!queries[s].q) continue;
    count(rotation.q_gain[s]);
    if (rotation.q_gain[s]) p.stream[s].gain = rotation.q_gain[s].as<float>();
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    if (!keys[k].k) continue;
    const DecodeRotation::Set& from = rotation.set[k];
    DeviceKeys& to = p.set[k];
    to.keep = from.keep && keys[k].cache.k;
    if (!from.k) continue;
    count(from.gain);
    SPS_CHECK(from.k.rows == keys[k].k.rows && from.k.cols == keys[k].k.cols && from.k.dtype == p.dtype);
    to.turned = from.k.data, to.turned_stride = from.k.stride;
    if (from.gain) to.gain = from.gain.as<float>();
    fits = fits && aligned(from.k);
  }
  p.turns = true;
  p.rotation = {table.cos.as<float>(),
                table.sin.as<float>(),
                table.cos.rows == 1 ? 0 : table.cos.stride,
                table.sin.rows == 1 ? 0 : table.sin.stride,
                shape.pairs,
                rope::units_of<kPiece>(shape),
                shape.adjacent,
                norms > 0,
                rotation.eps};
  return fits && (norms == 0 || norms == turned);
}

// What warps find out depends on the step's lists and on these alone.
Schedule schedule_of(const DecodeStep& step, const Problem& p) {
  if (step.schedules == nullptr) return {};
  DecodeSchedules::Key key{};
  size_t n = 0;
  const auto put = [&](auto... numbers) { ((key.at(n++) = int32_t(numbers)), ...); };
  put(p.per_slot, p.kv_heads, p.group, p.head_dim, p.most_items, p.turns);
  for (const DeviceStream& s : p.stream) {
    put(s.q != nullptr);
    for (const DeviceBand band : s.band) put(band.lo, band.hi);
  }
  for (const DeviceKeys& s : p.set)
    put(s.k != nullptr, s.stream, s.rows, s.paged, s.whole_chunks, s.turned != nullptr, s.keep);
  std::byte* const place = step.schedules->place(key);
  return place == nullptr ? Schedule{} : Schedule{place, step.number.data()};
}

// Keys of several pairs. A block takes some rows of a run: all heads of both tensors, a piece to a thread.
constexpr int kKeepThreads = 128, kKeepRows = 16, kPairsOfLaunch = 32;

struct KeptPair {
  const void *k, *v;  // of the step
  int64_t k_stride, v_stride;
  DeviceKeys cache;
  int32_t kv_heads;
};
struct Keep {
  const int32_t *row[kMaxQueryStreams], *count[kMaxQueryStreams], *begin[kMaxQueryStreams];
  const int32_t *slot, *pages;
  int32_t per_slot, head_dim;
  KeptPair pair[kPairsOfLaunch];
};

template <class Piece, class T>
__global__ void __launch_bounds__(kKeepThreads) keep_kernel(const __grid_constant__ Keep keep) {
  constexpr int kWide = sizeof(Piece) / sizeof(T);
  const KeptPair& pair = keep.pair[blockIdx.z];
  const int run = int(blockIdx.y), stream = pair.cache.stream, count = keep.count[stream][run];
  const int kept_from = pair.cache.paged ? 0 : max(0, count - pair.cache.rows);
  const int first = kept_from + int(blockIdx.x) * kKeepRows, last = min(first + kKeepRows, count);
  const int slot = keep.slot[run], of_head = keep.head_dim / kWide, of_row = pair.kv_heads * of_head;
  const int32_t* const pages = keep.pages + int64_t(slot) * keep.per_slot;
  for (int i = int(threadIdx.x); i < (last - first) * of_row; i += kKeepThreads) {
    const int t = first + i / of_row, column = i % of_row * kWide, head = column / keep.head_dim;
    const int64_t row = keep.row[stream][run] + t;
    const int64_t to =
        int64_t(cache_row(pair.cache, pair.kv_heads, pages, slot, head, keep.begin[stream][run] + t)) *
            keep.head_dim +
        column % keep.head_dim;
    const auto copy = [&](const void* from, int64_t stride, void* cache) {
      *reinterpret_cast<Piece*>(static_cast<T*>(cache) + to) =
          *reinterpret_cast<const Piece*>(static_cast<const T*>(from) + row * stride + column);
    };
    copy(pair.k, pair.k_stride, pair.cache.cache_k);
    copy(pair.v, pair.v_stride, pair.cache.cache_v);
  }
}

void launch_keep(const Exec& ex, const Keep& keep, int64_t pairs, const DecodeStep& step, DType dtype,
                 bool in_pieces) {
  const dim3 grid(unsigned(ceil_div(step.longest, kKeepRows)), unsigned(step.runs), unsigned(pairs));
  SPS_CHECK(step.runs <= 65535);
  const auto kernel = dtype == DType::f32
                          ? (in_pieces ? keep_kernel<uint4, float> : keep_kernel<float, float>)
                          : (in_pieces ? keep_kernel<uint4, bf16> : keep_kernel<bf16, bf16>);
  kernel<<<grid, kKeepThreads, 0, stream_of(ex)>>>(keep);
  SPS_LAUNCHED();
}

}  // namespace

std::optional<Problem> rotated_problem(const DecodeShape& shape, const DecodeStep& step,
                                       const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                       const DecodeRotation& rotation) {
  Problem p = make_problem(shape, step, queries, keys);
  if (p.streams == 0 || p.dtype != DType::bf16 || !add_rotation(p, step, queries, keys, rotation)) return {};
  return p;
}

}  // namespace decode

void decode_attention_cuda(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                           const DecodeQuerySet& queries, const DecodeKeySets& keys) {
  const decode::Problem p = decode::make_problem(shape, step, queries, keys);
  if (p.streams == 0 || p.runs == 0 || p.longest == 0) return;
  if (!decode::tensor_cores_serve(p)) return decode::attend_check(ex, p);
  decode::attend_split(ex, p, decode::schedule_of(step, p));
  if (p.longest > 1) decode::attend_walk(ex, p);
}

bool decode_attention_rotates_cuda(const DecodeShape& shape, const DecodeStep& step,
                                   const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                   const DecodeRotation& rotation) {
  return decode::rotated_problem(shape, step, queries, keys, rotation).has_value();
}

void decode_attention_rotated_cuda(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                                   const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                   const DecodeRotation& rotation) {
  const std::optional<decode::Problem> p = decode::rotated_problem(shape, step, queries, keys, rotation);
  SPS_CHECK(p);
  if (p->runs > 0) decode::attend_split(ex, *p, decode::schedule_of(step, *p));
}

void keep_keys_cuda(const Exec& ex, int64_t head_dim, const DecodeStep& step,
                    std::span<const DecodeKeys> keys) {
  const auto some = std::ranges::find_if(keys, [](const DecodeKeys& set) { return bool(set.cache.k); });
  if (some == keys.end() || step.runs == 0 || step.longest == 0) return;
  const DType dtype = some->k.dtype;
  decode::Keep keep{};
  for (size_t s = 0; s < step.stream.size(); ++s) {
    const StepRows& rows = step.stream[s];
    keep.row[s] = rows.row.data(), keep.count[s] = rows.count.data(), keep.begin[s] = rows.begin.data();
  }
  keep.slot = step.slot.data(), keep.pages = step.table.pages.data();
  keep.per_slot = int32_t(step.table.per_slot), keep.head_dim = int32_t(head_dim);
  const bool pieces =
      size_t(head_dim) * dtype_size(dtype) % 16 == 0 && std::ranges::all_of(keys, [](const DecodeKeys& set) {
        return !set.cache.k || (decode::aligned(set.k) && decode::aligned(set.v) &&
                                decode::aligned(set.cache.k) && decode::aligned(set.cache.v));
      });
  int64_t pairs = 0;
  const auto flush = [&] {
    if (pairs > 0) decode::launch_keep(ex, keep, pairs, step, dtype, pieces);
    pairs = 0;
  };
  for (const DecodeKeys& set : keys) {
    if (!set.cache.k) continue;
    SPS_CHECK(set.k.dtype == dtype);
    if (pairs == decode::kPairsOfLaunch) flush();
    decode::KeptPair& to = keep.pair[pairs++];
    to.k = set.k.data, to.v = set.v.data, to.k_stride = set.k.stride, to.v_stride = set.v.stride;
    to.cache.cache_k = set.cache.k.data, to.cache.cache_v = set.cache.v.data;
    to.cache.rows = int32_t(set.cache.rows), to.cache.paged = set.cache.paged, to.cache.stream = set.stream;
    to.kv_heads = int32_t(set.k.cols / head_dim);
  }
  flush();
}

}  // namespace sps::ops
