#include "ops/linear/gemm.h"

#include <atomic>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

using Type = dnnl::memory::data_type;
using Desc = dnnl::memory::desc;

constexpr size_t kCacheLimit = 4096;  // shapes; a model uses some dozens, a server some hundreds

constexpr int64_t kManyRows = 256;

std::atomic<int> forced_fallbacks{0};

size_t align_up(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

Type onednn_type(DType t) {
  return t == DType::bf16 ? Type::bf16 : Type::f32;
}

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::stream& thread_stream() {
  thread_local dnnl::stream stream(cpu_engine());
  return stream;
}

Desc stored_b(const GemmShape& s, Type type) {
  return {{s.k, s.n}, type, s.b_transposed ? dnnl::memory::dims{1, s.ldb} : dnnl::memory::dims{s.ldb, 1}};
}

dnnl::primitive_attr own_scratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::memory memory_at(const Desc& desc, const void* data) {
  return {desc, cpu_engine(), const_cast<void*>(data)};
}

// The layout that a packed b has: what oneDNN prefers for many rows. It does not depend on the number of rows
// at hand, so one packed b serves the full chunks and the short ones at the end.
Desc packed_b(const GemmShape& s, Type type) {
  const Desc any({s.k, s.n}, type, dnnl::memory::format_tag::any);
  const Desc a({kManyRows, s.k}, type, dnnl::memory::dims{s.k, 1});
  const Desc c({kManyRows, s.n}, Type::f32, dnnl::memory::dims{s.n, 1});
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, any, c), cpu_engine()).weights_desc();
}

class NativeGemm : public Gemm {
 public:
  explicit NativeGemm(const GemmShape& s) {
    hold_openmp_to_one_thread();  // oneDNN asks when it makes a primitive and when it runs one
    a_ = Desc({s.m, s.k}, onednn_type(s.act), dnnl::memory::dims{s.lda, 1});
    c_ = Desc({s.m, s.n}, onednn_type(s.out), dnnl::memory::dims{s.ldc, 1});
    const Desc plain = stored_b(s, onednn_type(s.act));
    b_ = s.b_packed ? packed_b(s, onednn_type(s.act)) : plain;
    dnnl::primitive_attr attributes = own_scratchpad();
    if (s.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a_, b_, c_), attributes, cpu_engine());
    scratchpad_ = desc.scratchpad_desc();
    product_ = dnnl::matmul(desc);
    if (s.b_packed) {
      plain_ = plain;
      const dnnl::reorder::primitive_desc reorder(cpu_engine(), plain, cpu_engine(), b_, own_scratchpad());
      pack_scratchpad_ = reorder.scratchpad_desc();
      pack_ = dnnl::reorder(reorder);
    }
  }

  size_t packed_bytes() const override { return align_up(b_.get_size()); }
  size_t pack_scratch_bytes() const override { return align_up(pack_scratchpad_.get_size()); }
  void pack(const void* b, void* packed, std::byte* scratch) const override {
    hold_openmp_to_one_thread();
    pack_.execute(thread_stream(), {{DNNL_ARG_FROM, memory_at(plain_, b)},
                                    {DNNL_ARG_TO, memory_at(b_, packed)},
                                    {DNNL_ARG_SCRATCHPAD, memory_at(pack_scratchpad_, scratch)}});
  }

  size_t scratch_bytes() const override { return align_up(scratchpad_.get_size()); }
  void run(const void* a, const void* b, void* c, std::byte* scratch) const override {
    hold_openmp_to_one_thread();
    product_.execute(thread_stream(), {{DNNL_ARG_SRC, memory_at(a_, a)},
                                       {DNNL_ARG_WEIGHTS, memory_at(b_, b)},
                                       {DNNL_ARG_DST, memory_at(c_, c)},
                                       {DNNL_ARG_SCRATCHPAD, memory_at(scratchpad_, scratch)}});
  }

 private:
  Desc a_, b_, c_, plain_, scratchpad_, pack_scratchpad_;
  dnnl::matmul product_;
  dnnl::reorder pack_;
};

template <class From, class To>
void convert_rows(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows,
                  int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const From* f = from + r * from_stride;
    To* t = to + r * to_stride;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) t[c] = from_f32<To>(to_f32(f[c]));
  }
}

// bf16 operands in f32 arithmetic: dense f32 copies of the operands, the f32 product, and its result rounded
// once.
class ConvertingGemm : public Gemm {
 public:
  explicit ConvertingGemm(const GemmShape& s) : s_(s), product_(f32_shape(s)) {
    b_rows_ = s.b_transposed ? s.n : s.k;
    b_cols_ = s.b_transposed ? s.k : s.n;
    a_bytes_ = align_up(size_t(s.m * s.k) * sizeof(float));
    b_bytes_ = align_up(size_t(s.k * s.n) * sizeof(float));
    c_bytes_ = s.out == DType::bf16 ? align_up(size_t(s.m * s.n) * sizeof(float)) : 0;
  }

  size_t packed_bytes() const override { return product_.packed_bytes(); }
  size_t pack_scratch_bytes() const override { return product_.pack_scratch_bytes() + b_bytes_; }
  void pack(const void* b, void* packed, std::byte* scratch) const override {
    product_.pack(b_as_f32(b, scratch), packed, scratch + b_bytes_);
  }

  size_t scratch_bytes() const override {
    return a_bytes_ + (s_.b_packed ? 0 : b_bytes_) + c_bytes_ + product_.scratch_bytes();
  }
  void run(const void* a, const void* b, void* c, std::byte* scratch) const override {
    auto* a_f32 = reinterpret_cast<float*>(scratch);
    convert_rows(static_cast<const bf16*>(a), s_.lda, a_f32, s_.k, s_.m, s_.k);
    scratch += a_bytes_;
    if (!s_.b_packed) {
      b = b_as_f32(b, scratch);
      scratch += b_bytes_;
    }
    if (s_.out == DType::f32) return product_.run(a_f32, b, c, scratch);
    auto* rounded = static_cast<bf16*>(c);
    auto* c_f32 = reinterpret_cast<float*>(scratch);
    if (s_.accumulate) convert_rows(rounded, s_.ldc, c_f32, s_.n, s_.m, s_.n);
    product_.run(a_f32, b, c_f32, scratch + c_bytes_);
    convert_rows(c_f32, s_.n, rounded, s_.ldc, s_.m, s_.n);
  }

 private:
  static GemmShape f32_shape(GemmShape s) {
    s.lda = s.k;
    s.ldb = s.b_transposed ? s.k : s.n;
    if (s.out == DType::bf16) s.ldc = s.n;
    s.act = s.out = DType::f32;
    return s;
  }
  const float* b_as_f32(const void* b, std::byte* scratch) const {
    auto* to = reinterpret_cast<float*>(scratch);
    convert_rows(static_cast<const bf16*>(b), s_.ldb, to, b_cols_, b_rows_, b_cols_);
    return to;
  }

  GemmShape s_;
  NativeGemm product_;
  int64_t b_rows_, b_cols_;
  size_t a_bytes_, b_bytes_, c_bytes_;
};

std::shared_ptr<const Gemm> make_gemm(const GemmShape& s, bool native) {
  try {
    if (native) {
      try {
        return std::make_shared<NativeGemm>(s);
      } catch (const dnnl::error& e) {
        if (s.act != DType::bf16 || e.status != dnnl_unimplemented) throw;
      }
    }
    return std::make_shared<ConvertingGemm>(s);
  } catch (const dnnl::error& e) {
    fail("oneDNN could not make a product of {}x{} by {}x{} ({} -> {}): status {}, {}", s.m, s.k, s.k, s.n,
         dtype_name(s.act), dtype_name(s.out), int(e.status), e.what());
  }
}

}  // namespace

std::shared_ptr<const Gemm> find_gemm(const GemmShape& s) {
  SPS_CHECK(s.m > 0 && s.n > 0 && s.k > 0);
  SPS_CHECK(s.act == DType::bf16 || (s.act == DType::f32 && s.out == DType::f32));
  using Key = std::pair<GemmShape, bool>;
  static std::mutex mutex;
  static std::map<Key, std::shared_ptr<const Gemm>> cache;
  const Key key{s, s.act == DType::f32 || cpu_multiplies_bf16()};
  const std::lock_guard lock(mutex);
  auto found = cache.find(key);
  if (found == cache.end()) {
    if (cache.size() >= kCacheLimit) cache.clear();  // products in use stay alive with their users
    found = cache.emplace(key, make_gemm(s, key.second)).first;
  }
  return found->second;
}

ForceBf16Fallback::ForceBf16Fallback() {
  ++forced_fallbacks;
}
ForceBf16Fallback::~ForceBf16Fallback() {
  --forced_fallbacks;
}

bool cpu_multiplies_bf16() {
  static const bool native = [] {
    const auto isa = unsigned(dnnl::get_effective_cpu_isa());
    const auto wanted = unsigned(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & wanted) == wanted;
  }();
  return native && forced_fallbacks == 0;
}

}  // namespace sps::ops
