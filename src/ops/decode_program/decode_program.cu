// The list of stages, and the launch.
#include <algorithm>
#include <bit>
#include <vector>

#include "ops/decode_program/decode_program_cuda.h"
#include "ops/decode_program/decode_program_kernel.cuh"
#include "ops/decode_program/decode_program_links.cuh"
#include "ops/tensor_map.h"
#include "tensor/memory.h"

namespace sps::ops::decode_program {

using decode_product::most_shared;

namespace {

template <int D>
__global__ void __launch_bounds__(kThreads, 1) program_kernel(const Program* program) {
  extern __shared__ __align__(1024) unsigned char memory[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  run_program<D>(*program, memory);
#endif
}

constexpr int kMostAttention = 80 << 10;  // bytes of a block that attention may take

// Bytes, in whole lines.
int rounded_up(int bytes) {
  return (bytes + 127) / 128 * 128;
}

// Calls f with the widest heads of the kernel that serves these, 0 for none.
template <class F>
void with_head_dim(int head_dim, F&& f) {
  if (head_dim == 0) return f.template operator()<0>();
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 96) return f.template operator()<96>();
  f.template operator()<128>();
}

// A piece is the box at a feature and a chunk.
CUtensorMap weights_map(const Product<bf16>& p, int64_t rows, int piece_chunks) {
  CUtensorMap map{};
  const cuuint64_t sizes[3] = {kChunk, cuuint64_t(rows), cuuint64_t(p.k / kChunk)},
                   strides[2] = {cuuint64_t(p.w_stride) * sizeof(bf16), kChunkBytes};
  const cuuint32_t box[3] = {kChunk, kFeatures, cuuint32_t(piece_chunks)}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(p.w), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SPS_CHECK(result == CUDA_SUCCESS);
  return map;
}

class List final : public GpuList {
 public:
  List(const Exec& ex, int64_t most_stages, bool by_mail)
      : ex_(ex),
        most_(size_t(most_stages)),
        by_mail_(by_mail),
        records_memory_(2 * most_ * sizeof(Record), Memory::device),
        programs_memory_(most_ * sizeof(Program), Memory::device),
        counters_(2 * most_ * kCounterStep * sizeof(unsigned), Memory::device) {}

  bool add(const DecodeCall& call) override {
    const DecodeRows& x = call.x;
    if (stages_ == most_ || call.w.dtype != DType::bf16 || x.rows() > kMostRows) return false;
    if (!rows_aligned(16, x.x, call.w) || (x.gain && !rows_aligned(16, x.gain))) return false;
    if (call.w.cols % kChunk != 0 || call.w.rows == 0 || call.w.rows > INT32_MAX / 2 ||
        call.w.cols > INT32_MAX / 64)
      return false;
    Stage s;
    s.product = decode_product::make_product<bf16>(call);
    Product<bf16>& p = s.product;
    const int parts = decode_product::parts_of(p.k), lines = s.pairs() ? 2 : 1;
    s.log_parts = std::countr_zero(unsigned(parts)), s.chunks = int(ceil_div(p.k, kChunk));
    s.pieces = int(ceil_div(s.chunks, kPieceChunks)), s.piece_chunks = int(ceil_div(s.chunks, s.pieces));
    s.pieces = int(ceil_div(s.chunks, s.piece_chunks));
    s.row_inverse = 65536 / unsigned(p.rows) + 1;
    if (std::has_single_bit(unsigned(p.k))) s.k_inverse = 1.0F / float(p.k);
    // Their sums have room, and with the stage and its gain they are fewer pieces than the ring has barriers.
    s.batch = std::min(kSumsBytes / (parts * p.rows * kFeatures * int(sizeof(float)) * lines),
                       (kPieces - 4) / (s.pieces * lines)) &
              ~1;
    if (s.batch == 0) return false;
    p.tiles = int(ceil_div(p.outputs, kFeatures));
    const int64_t work = int64_t{p.rows} * row_step(s.chunks);
    const int piece =
        std::max({s.piece_chunks * kSlice, kStagePiece, p.gain != nullptr ? gain_piece(p.k) : 0});
    // Two lines are in the ring side by side, and less than a third one is left free where it ends.
    const int most_work = std::max<int>(work_, rounded_up(int(std::min<int64_t>(work, INT32_MAX / 2)))),
              most_piece = std::max(piece_, piece);
    if (ring_beside(std::min(most_work, most_shared()) + kMostAttention) < 3 * most_piece) return false;
    work_ = most_work, piece_ = most_piece;

    const int blocks = gpu_info().multiprocessors;
    s.first_block = next_block_, s.tiles_each = p.tiles / blocks, s.tiles_more = p.tiles % blocks;
    next_block_ = (next_block_ + p.tiles) % blocks;
    Touched touched{{call.x.x}, {call.y}};
    if (call.end == DecodeEnd::add) touched.reads.push_back(call.y);
    if (call.rest.cols > 0) touched.writes.push_back(call.rest);
    Record record;
    record.stage = s, record.weights = weights_map(p, call.w.rows, s.piece_chunks);
    push(record, std::move(touched), std::min(p.tiles, blocks));
    return true;
  }

  bool add(const decode::Problem& p, std::vector<Tensor> reads, std::vector<Tensor> writes) override {
    if (stages_ == most_ || p.runs == 0) return false;
    const decode::Partials partials = decode::partials_of(ex_, p);
    const int64_t items = int64_t{partials.count} * p.most_items;
    if (items > INT32_MAX || int64_t{partials.count} * partials.queries > INT32_MAX) return false;
    int dim = 0, warps = 0;
    with_head_dim(p.head_dim, [&]<int D>() {
      const int most = std::min(kMostAttentionWarps, kMostAttention / std::max(attention_bytes<D>(1), 1));
      dim = D, warps = int(std::clamp<int64_t>(ceil_div(items, gpu_info().multiprocessors), 1, most));
    });
    if (head_dim_ != 0 && head_dim_ != dim) launch();
    head_dim_ = dim, attention_warps_ = std::max(attention_warps_, warps);
    Stage s;
    s.attends = true;
    Record record;
    record.stage = s, record.attention = p, record.partials = partials;
    push(record, {std::move(reads), std::move(writes)}, partials.count * partials.queries);
    return true;
  }

  void launch() override {
    if (touched_.empty()) return;
    const size_t stages = touched_.size(), first = records_.size() - stages;
    std::vector<Record*> linked;
    for (size_t n = 0; n < stages; ++n) {
      linked.push_back(&records_[first + n]);
      linked[n]->stage.number = int32_t(n);
    }
    Links links(touched_, linked, arrivals_, gpu_info().multiprocessors);
    links.make(by_mail_);
    Program program;
    program.records = reinterpret_cast<const Record*>(records_memory_.data()) + first;
    // Behind the counters of a launch's stages lies a line of its own numbers.
    program.counters = reinterpret_cast<unsigned*>(counters_.data()) + first * kCounterStep;
    SPS_CHECK(links.mail_bytes <= INT32_MAX);
    program.mail_bytes = links.mail_bytes;
    for (size_t n = stages; n-- > 0;) {
      linked[n]->stage.next_attention = program.first_attention;
      if (linked[n]->stage.attends) program.first_attention = int32_t(n);
    }
    program.stages = int32_t(stages), program.work_bytes = work_, program.attention_warps = attention_warps_;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(gpu_info().multiprocessors)), config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = size_t(most_shared()), config.stream = stream_of(ex_);
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
    config.attrs = &together, config.numAttrs = 1;
    const auto* const there = reinterpret_cast<const Program*>(programs_memory_.data()) + programs_.size();
    with_head_dim(head_dim_, [&]<int D>() {
      program.ring_bytes = ring_beside(work_ + attention_bytes<D>(attention_warps_));
      SPS_CUDA(cudaFuncSetAttribute(program_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    most_shared()));
      SPS_CUDA(cudaLaunchKernelEx(&config, program_kernel<D>, there));
    });
    programs_.push_back(program);
    Record last;
    last.stage.ends = true;
    records_.push_back(last);
    touched_.clear(), arrivals_.clear();
    work_ = piece_ = head_dim_ = attention_warps_ = 0;
  }

  void upload() override {
    SPS_CHECK(touched_.empty());
    int64_t mail = 0, partials = 0;
    for (const Program& p : programs_) mail += 2 * p.mail_bytes;
    for (const Record& r : records_)
      if (r.stage.attends) partials = std::max(partials, r.partials.count * r.partials.of_tile());
    // Launches follow each other, so their partial sums can lie in one place.
    mail_ = Bytes(size_t(mail), Memory::device);
    partials_ = Bytes(2 * size_t(partials) * sizeof(float), Memory::device);
    auto* at = reinterpret_cast<unsigned char*>(mail_.data());
    for (Program& p : programs_) p.mail = at, at += 2 * p.mail_bytes, p.partials = partials;
    for (Record& r : records_) r.partials.data = reinterpret_cast<float*>(partials_.data());
    for (Bytes* bytes : {&mail_, &partials_})
      if (bytes->size() > 0)
        SPS_CUDA(cudaMemsetAsync(bytes->data(), kNoNumber & 0xFF, bytes->size(), stream_of(ex_)));
    copy_bytes(ex_, records_memory_.data(), records_.data(), records_.size() * sizeof(Record));
    copy_bytes(ex_, programs_memory_.data(), programs_.data(), programs_.size() * sizeof(Program));
    synchronize(ex_);
  }

  DecodeProgram::Launches launches() const override {
    DecodeProgram::Launches count;
    for (const Program& p : programs_)
      if (p.stages > 1) ++count.all, count.by_mail += p.mail_bytes > 0 ? 1 : 0;
    return count;
  }

 private:
  static int ring_beside(int bytes) { return (most_shared() - kRestBytes - bytes) / kSlice * kSlice; }

  void push(const Record& record, Touched touched, int32_t arrivals) {
    ++stages_, records_.push_back(record), touched_.push_back(std::move(touched)),
        arrivals_.push_back(arrivals);
  }

  Exec ex_;
  size_t most_;
  bool by_mail_;
  size_t stages_ = 0;
  std::vector<Record> records_;    // stages, and behind those of a launch one that ends it
  std::vector<Program> programs_;  // launched; there is a stage in each
  // Of the stages that wait for their launch.
  std::vector<Touched> touched_;
  std::vector<int32_t> arrivals_;
  int work_ = 0, piece_ = 0;  // bytes, the most of any stage
  int head_dim_ = 0, attention_warps_ = 0;
  int next_block_ = 0;
  Bytes records_memory_, programs_memory_, counters_, mail_, partials_;
};

}  // namespace

bool usable_cuda() {
#ifdef SPS_HAS_HOPPER
  return gpu_info().major == 9;
#else
  return false;
#endif
}

std::unique_ptr<GpuList> make_list_cuda(const Exec& ex, int64_t most_stages, bool mail) {
  return std::make_unique<List>(ex, most_stages, mail);
}

}  // namespace sps::ops::decode_program
