// Which kernel serves a product, and with how many blocks those of decode_linear_product.cuh.
#include <algorithm>

#include "ops/decode_linear/decode_linear_cluster.h"

namespace sps::ops {

namespace {

using namespace decode_product;

constexpr int kMostDirect = 8;  // rows of a launch whose blocks hold all of k
constexpr int64_t kLongestRow = 1 << 16;
constexpr int kFewTiles = 528;        // four for each multiprocessor of an H200
constexpr int64_t kKept = 128 << 10;  // bytes of a multiprocessor's shared memory that one kernel should take

// Blocks that walk over the tiles: each multiprocessor takes what its shared memory holds, and leaves room
// for the next kernel's.
int walkers(int tiles, int64_t shared) {
  const int64_t resident = std::clamp<int64_t>(kKept / shared, 1, 4);
  return int(std::clamp<int64_t>(gpu_info().multiprocessors * resident, 1, tiles));
}

template <class T, int kFeatureWarps, int kPartWarps, int kRows, int kDepth>
void launch(const Exec& ex, Product<T> p) {
  using Shape = BlockShape<T, kFeatureWarps, kPartWarps, kDepth>;
  const int across = p.end == DecodeEnd::swiglu ? Shape::kColumns / 2 : Shape::kColumns;
  p.tiles = int(ceil_div(p.outputs, across));
  const int shared = Shape::bytes(p);
  launch_behind(ex, {dim3(unsigned(walkers(p.tiles, shared))), dim3(Shape::kThreads), size_t(shared)},
                product_kernel<T, kFeatureWarps, kPartWarps, kRows, kDepth>, p);
}

// Rows whose x fits beside the other memory of the blocks that take most.
template <class T>
int direct_rows(Product<T> p, int parts) {
  const auto fits = [&](int rows) {
    p.rows = rows;
    const int bytes = parts == 8
                          ? std::max(BlockShape<T, 1, 8, 8>::bytes(p), BlockShape<T, 2, 8, 4>::bytes(p))
                          : BlockShape<T, 2, 4, 8>::bytes(p);
    return bytes <= most_shared();
  };
  int rows = kMostDirect;
  while (rows > 0 && !fits(rows)) --rows;
  return rows;
}

// Up to kMostDirect rows: the warps of a block share out k.
template <class T>
void launch_direct(const Exec& ex, const Product<T>& p, int parts) {
  const bool swiglu = p.end == DecodeEnd::swiglu;
  const bool wide = swiglu || p.outputs > kFewTiles * kFeatures;
  const int walks = (p.outputs - 1) / (kFewTiles * (swiglu ? kFeatures : 2 * kFeatures));  // 0: a tile each
  const bool shallow = p.part_chunks <= 4 && walks == 0;
  if (parts == 8) return wide ? launch<T, 2, 8, 8, 4>(ex, p) : launch<T, 1, 8, 8, 8>(ex, p);
  if (wide) return shallow ? launch<T, 2, 4, 8, 4>(ex, p) : launch<T, 2, 4, 8, 8>(ex, p);
  shallow ? launch<T, 1, 4, 8, 4>(ex, p) : launch<T, 1, 4, 8, 8>(ex, p);
}

template <class T>
bool product(const Exec& ex, const DecodeCall& call) {
  const DecodeRows& x = call.x;
  Product<T> p = make_product<T>(call);
  const int parts = parts_of(p.k);
  if constexpr (std::is_same_v<T, bf16>)
    if (p.rows > most_direct_rows && launch_cluster(ex, p)) return true;
  const int rows_at_once = direct_rows(p, parts);
  if (rows_at_once == 0) return false;
  if (p.rows > kMostDirect && x.gain) {
    // Every block would norm all rows.
    T* const n = x.n.as<T>();
    auto* const scales = x.rstd.as<float>();
    launch_behind(ex, {dim3(unsigned(ceil_div(p.rows, 4))), dim3(128)}, norm_kernel<T>, p, parts, n,
                  x.n.stride, scales);
    p.x = n, p.x_stride = x.n.stride, p.gain = nullptr, p.pick = nullptr, p.scales = scales;
  }
  const auto move = [](auto* data, int64_t elements, size_t size) {
    using Bytes = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>, const std::byte,
                                     std::byte>;
    return static_cast<Bytes*>(data) + elements * int64_t(size);
  };
  const size_t x_size = p.gain != nullptr ? sizeof(float) : sizeof(T),
               y_size = p.floats ? sizeof(float) : sizeof(T);
  for (int row = 0; row < p.rows; row += rows_at_once) {
    Product<T> some = p;
    some.rows = std::min(rows_at_once, p.rows - row);
    if (p.pick != nullptr)
      some.pick += row;
    else
      some.x = move(p.x, row * p.x_stride, x_size);
    if (p.scales != nullptr) some.scales += row;
    some.y = move(p.y, row * p.y_stride, y_size);
    if (p.rest != nullptr) some.rest = move(p.rest, row * p.rest_stride, y_size);
    launch_direct(ex, some, parts);
  }
  return true;
}

}  // namespace

int most_direct_rows = 2;  // at more, clusters are faster (H200: models of 0.4 and 1.6 billion parameters)

bool decode_linear_cuda(const Exec& ex, const DecodeCall& call) {
  const DecodeRows& x = call.x;
  if (call.w.rows > INT32_MAX / 2 || call.w.cols > kLongestRow || !rows_aligned(16, x.x, call.w))
    return false;
  if (x.gain && !rows_aligned(16, x.gain, x.n)) return false;
  bool done = false;
  with_device_type(call.w.dtype, [&](auto zero) { done = product<decltype(zero)>(ex, call); });
  return done;
}

}  // namespace sps::ops
