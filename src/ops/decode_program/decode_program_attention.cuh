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
  __device__ static Watchdog watch() { return {}; }
  __device__ static void read(bool wanted, const void* from, uint4& x) { read_mail_if(wanted, from, x); }
  __device__ static void read_pair(int n, int end, const void* from, float2& x) {
    read_mail_below(n, end, from, x);
  }
  // Of rows most is the largest of two bf16 each, of sums of single numbers.
  __device__ static uint32_t look(uint32_t most, const uint4& x) { return most_halves(most, x); }
  __device__ static uint32_t look(uint32_t most, float2 x) {
    return max(max(most, __float_as_uint(x.x)), __float_as_uint(x.y));
  }
  __device__ bool rows_have_come(uint32_t most) const { return !rows || no_half_missing(most); }
  __device__ static bool have_come(uint32_t most) { return most != kNoNumber; }
  __device__ void send(bool wanted, float* to, float x) const {
    write_mail_if(wanted, to, __float_as_uint(x));
  }
  __device__ void send(bool wanted, float2* to, float2 x) const {
    write_mail_if(wanted, to, make_uint2(__float_as_uint(x.x), __float_as_uint(x.y)));
  }
  __device__ static void forget(int n, int end, const float2* at) {
    write_mail_below(n, end, const_cast<float2*>(at), make_uint2(kNoNumber, kNoNumber));
  }
  __device__ float* beside(float* sums) const { return sums + partials; }
  __device__ void put(bool wanted, bf16* to, uint32_t x) const {
    auto* const at = reinterpret_cast<unsigned char*>(to);
    const auto keep = [&](unsigned char* where) {
      if (wanted) *reinterpret_cast<uint32_t*>(where) = x;
    };
    if (!results) return keep(at);
    write_mail_if(wanted, at, x);
    write_mail_if(wanted, at + other, kNoNumber);
    if (stage.keeps) keep(at + memory);
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
    const int queries = split.finish(meeting);
    __syncwarp();
    if (queries > 0 && s.arrives && lane == 0) arrive(counter(program, n), unsigned(queries));
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
