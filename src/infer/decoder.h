// Decoder: the forward pass with caches, for any ModelConfig. A step takes some sequences a few positions on:
// one position of each (decoding), pieces of prompts, or both together. All rows of a step go through each
// weight in one product, those of both streams too where they share it. Which blocks run for which stream,
// who keeps keys and for how long is the Plan's word; the mathematics is that of model/forward.cpp.
//
// The bits of a sequence do not depend on what else is in its steps, nor on how its prompt is cut into pieces
// (on a GPU: as far as decode_linear keeps that). An end of text in a sequence hides everything before it
// (itself not where it opens the text behind it, see ModelConfig::eot_begins), positions go on.
//
// Every operation is issued on the device in order, lists of numbers lie in its memory, and for the same
// counts of rows a step issues the same operations whatever the lengths and places of the sequences. So on a
// GPU steps of one position a run are recorded as graphs, one for each set of counts, and started as a whole.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "infer/cache.h"
#include "infer/int8_weights.h"
#include "infer/page_pool.h"
#include "model/parameters.h"
#include "model/rope_tables.h"
#include "ops/decode_linear/decode_linear.h"
#include "ops/decode_program/decode_program.h"
#include "tensor/device.h"
#include "tensor/graph.h"

namespace sps {

struct DecoderOptions {
  int64_t slots = 1;      // sequences at the same time
  int64_t pages = 0;      // of cache memory for all of them; 0: enough for `slots` whole contexts
  int64_t page = 64;      // positions of a page
  int64_t step_rows = 0;  // most positions of a step; 0: 512, at least one for each slot
  int64_t beside = 0;     // most bytes that a step takes to the device for who follows it
  // Texts that begin alike share the full pages of what is equal, also with texts that have been closed. Not
  // where something is kept in rings: a ring holds the end of a text alone, and cannot be made without the
  // keys before it.
  bool share_prefixes = true;
  bool graphs = true;  // on a GPU; they change no bit
  // Those of few rows are a few kernels that run many operations each, where a GPU has them; the same.
  bool program = true;
  // Products read these in place of the store's rounded weights: on a CPU, in bf16. They must outlive the
  // decoder.
  const Int8Weights* int8 = nullptr;
};

struct DecoderMemory {
  size_t persistent = 0, rings = 0;  // caches
  size_t step = 0;                   // what the rows of a step pass through
  size_t int8 = 0;                   // weights in 8 bits, where products read those
};

class Decoder {
 public:
  // Reads the weights where they lie; both must outlive it.
  Decoder(const ModelConfig& config, const ModelParameters& parameters, const ParameterStore& store,
          const DecoderOptions& options = {});
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  const Plan& plan() const { return plan_; }
  const DecoderOptions& options() const { return options_; }  // zeros filled in
  DType dtype() const { return act_; }                        // of caches and products
  DecoderMemory memory() const;

  // A new sequence's slot; -1: all are taken. `text`: ids that will be its first ones; as many as are found
  // in pages of other sequences (never all) have been read already, see length().
  int64_t open(std::span<const int32_t> text = {});
  void close(int64_t slot);  // its pages are free again
  int64_t length(int64_t slot) const { return slots_[size_t(slot)].length; }
  int64_t pages_of(int64_t positions) const { return (positions + options_.page - 1) / options_.page; }
  int64_t free_pages() const { return pool_.available(); }

  struct Run {
    int64_t slot = 0;
    std::span<const int32_t> tokens;  // the sequence's next ids, below the vocabulary
    int64_t left = 0;                 // how many known ids follow these (of a prompt in pieces)
  };
  // At most step_rows positions, at most one run of a slot. Returns the logits that follow the runs with left
  // = 0, in their order: [n, vocab] f32 (f64 in the reference) on the device, until the next step.
  // `then` issues what is to follow them, and may become a part of the step's graph: with the same counts of
  // runs and rows it must issue the same operations on the same places each time. Not called for no logits.
  // It finds `beside` on the device, always at the same address (of the host's, where that is the device).
  using Then = std::function<void(Tensor logits, const std::byte* beside)>;
  Tensor step(std::span<const Run> runs, const Then& then = {}, std::span<const std::byte> beside = {});

  // Rows of each stream that the latest step ran: prediction rows where something depends on them alone.
  struct StepRows {
    int64_t state = 0, pred = 0;
  };
  StepRows rows_of_step() const { return {x_rows_, p_rows_}; }

  // Of all programs so far.
  ops::DecodeProgram::Launches program_launches() const { return program_launches_; }

 private:
  struct Slot {
    bool open = false;
    int64_t length = 0, document_start = 0;
    int64_t pred_first = 0, pred_end = 0;  // positions of the latest unbroken stretch of prediction rows
    int64_t pages = 0, remembered = 0;     // the first of them may be shared
    PagePool::Prefix prefix = PagePool::kStart;  // where the remembered ones end
    std::vector<int32_t> ids;                    // of the text so far, where prefixes are shared
  };
  static constexpr BlockParameters kNoBlock{};
  // The rows of both streams in a buffer: x, and p behind it. `both` is all of them where they are equally
  // wide.
  struct Rows {
    Tensor both, x, p;
  };
  enum class Part : uint8_t { both, x, p };
  static Tensor of(const Rows& rows, Part part) {
    return part == Part::both ? rows.both : part == Part::x ? rows.x : rows.p;
  }
  struct Wanted {  // by which streams
    bool x = false, p = false;
    bool operator==(const Wanted&) const = default;
  };
  // Memory for the most rows of a step, read as rows of whatever width is asked for.
  struct Buffers {
    Tensor residual, delta, n, q, q_normed, o, gate_up, h, rstd, head_rstd;
    Tensor level_n, pool_m, pool_f, gates, final_s, final_n, final_rstd, logits;
    // By stage: projections of its own keys and values; where there is QK-norm, the normed and rotated keys.
    std::vector<Tensor> kv, k;
    std::vector<Tensor> read_kv, read_k;  // by pair: the same for keys projected from a level
  };
  // What attention reads of a pair's rows in this step.
  struct StepKeys {
    Tensor k, v;
  };

  void lay_out(Arena& arena);
  Rows rows(Tensor buffer, int64_t cols_x, int64_t cols_p) const;
  Rows widths(Tensor buffer, int64_t heads_x, int64_t heads_p) const {
    return rows(buffer, heads_x * plan_.config.head_dim, heads_p * plan_.config.head_dim);
  }
  void put_lists(std::span<const Run> runs, std::span<const std::byte> beside);
  void take_pages(int64_t slot, int64_t positions);
  void remember_pages(int64_t slot);
  int32_t& page_of(int64_t slot, int64_t page) { return table_[size_t(slot * per_slot_ + page)]; }
  std::span<const int32_t> page_ids(std::span<const int32_t> ids, int64_t page) const {
    return ids.subspan(size_t(page * options_.page), size_t(options_.page));
  }

  // For matrix products: a parameter, or some rows of it.
  using Weight = std::variant<Tensor, ops::Int8Matrix>;

  // The step that the lists describe, by a graph where there is one.
  void issue(const Then& then);
  void forward();
  const Exec& device();  // for operations: what the program has so far goes before them
  template <class Add>
  bool in_program(const Weight& weight, Add&& add);
  void start_prediction();
  template <class SubLayer>
  void each(bool x, bool p, bool alike, SubLayer&& sub_layer);
  void norm(bool x, bool p, int gain_x, int gain_p);
  ops::DecodeRows normed(Part part, int gain);
  void rotate(Tensor x, int64_t heads, int64_t block, std::span<const int32_t> positions, int gain, Tensor y);
  // A stage's rows of queries, keys and values: as the product leaves them, and where they go when turned.
  struct Projections {
    Rows q, q_turned, kv, k_turned;
    int64_t kx, kp;  // widths of keys
    Tensor raw_keys(Part part) const { return of(kv, part).cols_from(0, part == Part::p ? kp : kx); }
    Tensor keys(Part part) const { return k_turned.x || k_turned.p ? of(k_turned, part) : raw_keys(part); }
  };
  Projections projections(size_t stage, Wanted keys) const;
  bool one_projection(const Stage& stage) const;
  void project(size_t stage, Wanted queries, Wanted keys);
  void rotate_rows(size_t stage, Wanted queries, Wanted keys);
  void read_level(int64_t level);
  void read_keys(size_t pair, const BlockParameters& b, int64_t rope_block);
  void attention(size_t stage, Wanted queries, Wanted fresh);
  bool read_elsewhere(const Stage& stage) const;
  void attention_out(const Stage& stage, bool x, bool p);
  void feed_forward(const Stage& stage, bool x, bool p);
  void pooled(int64_t block);
  Tensor readout();

  const BlockParameters& state_block(int64_t j) const { return j < 0 ? kNoBlock : params_.state[size_t(j)]; }
  const BlockParameters& pred_block(int64_t i) const { return i < 0 ? kNoBlock : params_.pred[size_t(i)]; }
  Weight weight(int i) const;
  Weight weight(int i, int64_t from, int64_t count) const;
  void product(const ops::DecodeRows& x, const Weight& weight, Tensor y, Tensor rest = {});
  void product_swiglu(const ops::DecodeRows& x, const Weight& weight, Tensor gate_up, Tensor h);
  void product_add(Tensor x, const Weight& weight, Tensor delta, Tensor s);
  Tensor master(int i) const { return store_.weight(i); }  // for norms, gates, embeddings
  float eps() const { return float(plan_.config.norm_eps); }
  std::span<const int32_t> positions(Part part) const;

  Exec ex_;
  Plan plan_;
  DecoderOptions options_;
  const ModelParameters& params_;
  const ParameterStore& store_;
  const DType act_, acc_;
  const int64_t needed_pred_rows_, per_slot_;  // pages of a whole context
  int64_t most_pred_rows_ = 0;                 // of a step
  KeyCaches caches_;
  RopeTables rope_;
  std::vector<Slot> slots_;
  PagePool pool_;
  std::vector<int32_t> table_;  // pages of each slot

  // What a step's operations depend on.
  struct Counts {
    int64_t runs, x_rows, p_rows, picks;
    bool then;
    auto operator<=>(const Counts&) const = default;
  };
  ops::DecodeProgram::Launches program_launches_;
  StreamGraphs<Counts, std::optional<ops::DecodeProgram>> graphs_{64};  // programs' memory is named in them

  Arena memory_;
  Buffers b_;
  Bytes staged_, on_device_;  // the step's lists, behind what stands beside them
  ops::DecodeSchedules schedules_;
  int32_t number_ = 0;  // of the step; 0 is none's
  StreamMark lists_copied_;

  ops::DecodeProgram* program_ = nullptr;  // while a graph is recorded

  // The step under way.
  int64_t x_rows_ = 0, p_rows_ = 0;
  std::vector<StepKeys> keys_;  // by pair
  std::vector<bool> kept_;      // by pair: in its cache already
  ops::DecodeStep lists_;
  std::span<const int32_t> tokens_, positions_, sources_, picks_;
};

}  // namespace sps
