// What attention's warps do. While others multiply, each asks for its first keys of earlier steps, so that
// they are there when its queries are (SplitWarp).
#pragma once

#include "ops/decode_program/decode_program_loader.cuh"
#include "ops/decode_program/decode_program_mail.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// How a warp of attention meets the other stages.
struct Meeting {
  const Stage& stage;
  const Program& program;
  int64_t partials;       // numbers of partial sums; as many lie behind them
  int64_t other, memory;  // bytes from results as mail to the next launch's, and to where they belong
  bool rows, results;     // these come, and go, as mail
  bool waited = false;

  __device__ void operator()(int, int) {
    if (!waited) await_stages(program, stage.awaited);
    waited = true;
  }
  __device__ void before_keys() const { await_stages(program, stage.late); }
  __device__ uint4 read(const void* from) const { return read_mail(from); }
  __device__ float2 read_pair(const void* from) const { return read_mail_pair(from); }
  __device__ bool row_has_come(const uint4& x) const { return !rows || has_come<bf16>(x); }
  __device__ bool sums_have_come(const uint4& x) const { return has_come<float>(x); }
  __device__ void send(float* to, float x) const { write_mail(to, __float_as_uint(x)); }
  __device__ void forget(const void* at, int bytes) const {
    auto* const to = static_cast<unsigned char*>(const_cast<void*>(at));
    for (int i = 0; i < bytes; i += int(sizeof(kNoNumber))) write_mail(to + i, kNoNumber);
  }
  __device__ float* beside(float* sums) const { return sums + partials; }
  __device__ void put(bf16* to, bf16 x) const {
    auto* const at = reinterpret_cast<unsigned char*>(to);
    if (!results) {
      *to = x;
      return;
    }
    write_mail(at, x.bits);
    write_mail(at + other, uint16_t(kNoNumber));
    if (stage.keeps) *reinterpret_cast<bf16*>(at + memory) = x;
  }
};

// The problem of the record gets this launch's places of mail.
__device__ __forceinline__ void address_mail(Record& record, unsigned char* mail) {
  const int lane = int(threadIdx.x) % kWarp;
  const AttentionMail& places = record.mail;
  if (lane < kMaxQueryStreams) {
    decode::DeviceStream& stream = record.attention.stream[lane];
    if (places.q[lane] >= 0) stream.q = mail + places.q[lane];
    if (places.o[lane] >= 0) stream.o = mail + places.o[lane];
  } else if (lane < kMaxQueryStreams + kMaxKeySets) {
    const int n = lane - kMaxQueryStreams;
    decode::DeviceKeys& set = record.attention.set[n];
    if (places.k[n] >= 0) set.k = mail + places.k[n];
    if (places.v[n] >= 0) set.v = mail + places.v[n];
  }
}

template <int D>
__device__ __forceinline__ void attend(const Rest& rest, AttentionWarp<D>& mine, int number) {
  const Program& program = rest.program;
  const int lane = int(threadIdx.x) % kWarp;
  for (int n = program.first_attention; n >= 0; n = mine.record.stage.next_attention) {
    __syncwarp();
    for (int i = lane; i < kRecordVectors; i += kWarp)
      reinterpret_cast<uint4*>(&mine.record)[i] = record_vector(program, n, i);
    __syncwarp();
    address_mail(mine.record, rest.mail);
    __syncwarp();
    const Stage& s = mine.record.stage;
    decode::SplitWarp<D, true> split(mine.record.attention, mine.record.partials, mine.shared);
    split.start({int(blockIdx.x), int(gridDim.x), number, program.attention_warps});
    Meeting meeting{s,
                    program,
                    program.partials,
                    rest.other_mail - rest.mail,
                    static_cast<unsigned char*>(mine.record.results) - (rest.mail + s.y_mail),
                    false,
                    s.y_mail >= 0};
#pragma unroll
    for (int i = 0; i < kMaxQueryStreams; ++i) meeting.rows |= mine.record.mail.q[i] >= 0;
#pragma unroll
    for (int i = 0; i < kMaxKeySets; ++i)
      meeting.rows |= mine.record.mail.k[i] >= 0 || mine.record.mail.v[i] >= 0;
    const int tiles = split.finish(meeting);
    __syncwarp();
    if (tiles > 0 && s.arrives && lane == 0) arrive(counter(program, n), unsigned(tiles));
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
