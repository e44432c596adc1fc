// What the kernel of decode_program is told: stages, programs, and how a block's shared memory is cut.
#pragma once

#include "ops/decode_attention/decode_attention_split.cuh"
#include "ops/decode_linear/decode_linear_product.cuh"
#include "ops/decode_program/decode_program_ring.cuh"

namespace sps::ops::decode_program {

using decode_product::kChunkBytes, decode_product::kFeatures, decode_product::kHalf,
    decode_product::kVectorBytes, decode_product::Product;

constexpr int kMostRows = 8;
constexpr int kWorkers = 8, kWorkerThreads = kWorkers * kWarp;      // warps that multiply
constexpr int kFirstAttention = kWorkers, kMostAttentionWarps = 4;  // warps
constexpr int kLoader = kFirstAttention + kMostAttentionWarps;
constexpr int kFirstFinisher = kLoader + 1, kFinishers = 3,  // warps
    kFinisherThreads = kFinishers * kWarp;
constexpr int kThreads = (kFirstFinisher + kFinishers) * kWarp;
// Registers of a thread, of each four warps: the workers', attention's, and those of the warps that load and
// finish.
// Altogether they are what the kernel starts with.
constexpr int kWorkerRegisters = 112, kAttentionRegisters = 224, kOtherRegisters = 64;
static_assert(2 * kWorkerRegisters + kAttentionRegisters + kOtherRegisters == 65536 / (4 * kWarp));
constexpr int kChunk = decode_product::kChunk<bf16>;
constexpr int kPieceChunks = 16;     // of a piece of the ring, at most
constexpr int kUnderWay = 48 << 10;  // bytes of pieces that a block waits for, at most
constexpr int kSumsBytes = 8 << 10;  // of the tiles that are added up together
constexpr int kCounterStep = 32;     // unsigned numbers from one counter to the next: lines of their own
// Numbers of barriers; of those for sums and squares there are two, for turns. A part of k has at most two
// warps where there are four of them.
constexpr int kFinishersBarrier = 1, kFirstPartBarrier = 2, kSumsBarrier = 6, kFreeBarrier = 8,
              kSquaresBarrier = 10;
constexpr int kMostAwaited = 4;

// Everything of a product that does not depend on what is computed, so that a block finds its part without
// divisions. A tile is eight features; of SwiGLU's two streams eight each. Lines are eight rows of weights: a
// tile has one or, with SwiGLU, two. A warp multiplies two lines at a time: those of a tile, or of two.
struct Stage {
  bool attends = false;                    // else it multiplies
  bool ends = false;                       // there is no stage any more
  bool arrives = true;                     // somebody awaits it
  bool keeps = true;                       // y is written where it belongs, and not as mail alone
  bool keeps_rest = true;                  // what goes behind it as well
  int32_t number = 0;                      // in the launch
  int32_t next_attention = -1;             // stage of an attention
  int32_t first_block = 0;                 // which block has tile 0
  int32_t tiles_each = 0, tiles_more = 0;  // tiles of every block; of the first so many blocks one more
  struct Await {
    int32_t stage = 0, arrivals = 0;
  } awaited[kMostAwaited],               // the first ones; no arrivals: no more
      late[kMostAwaited];                // by attention before it hands keys on
  int32_t log_parts = 0, chunks = 0;     // of k
  int32_t pieces = 0, piece_chunks = 0;  // of a line's way through the ring
  int32_t batch = 0;                     // tiles whose sums are added up together; even
  uint32_t row_inverse = 0;              // n / rows is n * row_inverse >> 16, for n below 2^10
  float k_inverse = 0;                   // where k is a power of two: dividing is multiplying
  // Where mail lies, in bytes, its rows one behind the other; -1: it is no mail. `old`: what y is added to.
  int32_t x_mail = -1, old_mail = -1, y_mail = -1;
  Product<bf16> product;

  __host__ __device__ bool pairs() const { return product.end == DecodeEnd::swiglu; }
};
// Where attention finds its rows and puts its results, in bytes of mail; -1: in memory, where its problem
// says.
struct AttentionMail {
  int32_t q[kMaxQueryStreams], o[kMaxQueryStreams], k[kMaxKeySets], v[kMaxKeySets];
};
struct alignas(128) Record {
  Stage stage;
  CUtensorMap weights{};    // of a product: columns of a chunk, rows, chunks
  void* results = nullptr;  // of attention: where its mail goes too, where it keeps it
  AttentionMail mail{{-1, -1}, {-1, -1}, {-1, -1, -1}, {-1, -1, -1}};
  decode::Problem attention;
  decode::Partials partials;
};
constexpr int kStageBytes = int((sizeof(Stage) + 15) / 16 * 16), kStageVectors = kStageBytes / 16,
              kRecordVectors = int(sizeof(Record) / 16);
static_assert(kStageVectors <= kWarp && sizeof(Record) >= size_t(kStageBytes));

struct Own {
  unsigned ended;     // blocks; 0 between kernels
  unsigned launches;  // of this program, so far
};
struct alignas(16) Program {
  const Record* records = nullptr;  // one more than there are stages: the one that ends
  // A line for every stage, 0 between kernels, and one with Own.
  unsigned* counters = nullptr;
  unsigned char* mail = nullptr;
  int64_t mail_bytes = 0;  // of each of two places
  int64_t partials = 0;    // numbers that attention's chunks leave, at most; kNoNumber but while they wait
  int32_t stages = 0;
  int32_t ring_bytes = 0, work_bytes = 0, under_way = kUnderWay;
  int32_t attention_warps = 0, first_attention = -1;  // a stage, and from there on Stage::next_attention
};

// Rows of x as the products read them: half a chunk apart in their banks.
__host__ __device__ constexpr int row_step(int chunks) {
  return chunks * kChunkBytes + kHalf;
}
// Pieces of the ring. One of weights is a chunk of eight rows after the other; 16 bytes number u of a row r
// lie at place u ^ r of its 128 (the copy engine's pattern).
constexpr int kSlice = kFeatures * kChunkBytes, kStagePiece = kSlice;
static_assert(kSlice == 1024 && kStageBytes <= kStagePiece);
__host__ __device__ constexpr int gain_piece(int k) {
  return (k * int(sizeof(float)) + kSlice - 1) / kSlice * kSlice;
}
// Of a warp of attention, with heads up to D wide; 0: there is none.
template <int D>
struct AttentionWarp {
  decode::WarpShared<D> shared;
  Record record;
};
template <>
struct AttentionWarp<0> {};
template <int D>
__host__ __device__ constexpr int attention_bytes(int warps) {
  return D == 0 ? 0 : warps * int(sizeof(AttentionWarp<D>));
}
// Shared memory: the ring, rows of x, attention's warps, then this.
struct Rest {
  // Those of one batch of tiles may be written while those of the one before are still read.
  alignas(16) float sums[2][kSumsBytes / sizeof(float)];
  float squares[2][kWorkers * kMostRows];  // of parts of rows that are normed
  float scales[kMostRows];                 // of such rows
  // Each worker's; behind them the loading warp's and the finishers'.
  alignas(16) uint4 stage[kWorkers + 1 + kFinishers][kStageVectors];
  RingBarriers barriers;
  // Read where it is needed, for attention wants the registers.
  Program program;
  unsigned char *mail, *other_mail;  // this launch's, the next one's
};

}  // namespace sps::ops::decode_program
