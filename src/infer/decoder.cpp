// Sequences, pages and lists: what a step is made of. decoder_forward.cpp is the pass over its rows.
#include "infer/decoder.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sps {

namespace {

constexpr int64_t kStageCalls = 12;  // of a program, for a stage of the plan; more go beside it

DecoderOptions filled_in(DecoderOptions o, const ModelConfig& c) {
  SPS_CHECK(o.slots > 0 && o.page > 0 && o.pages >= 0 && o.step_rows >= 0 && o.beside >= 0);
  if (o.pages == 0) o.pages = o.slots * ((c.context + o.page - 1) / o.page);
  if (o.step_rows == 0) o.step_rows = 512;
  o.step_rows = std::max(o.step_rows, o.slots);
  constexpr int64_t kAligned = 16;
  o.beside = (o.beside + kAligned - 1) / kAligned * kAligned;
  return o;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const ModelParameters& parameters, const ParameterStore& store,
                 const DecoderOptions& options)
    : ex_(exec_on(store.device())),
      plan_(make_plan(config)),
      options_(filled_in(options, config)),
      params_(parameters),
      store_(store),
      act_(store.compute()),
      acc_(store.master()),
      needed_pred_rows_(needed_pred_rows(plan_)),
      per_slot_(pages_of(config.context)),
      caches_(plan_, act_, store.device(), {options_.slots, options_.pages, options_.page}),
      rope_(config, acc_, store.device()),
      slots_(size_t(options_.slots)),
      pool_(options_.pages),
      table_(size_t(options_.slots * per_slot_), 0) {
  SPS_CHECK(options_.int8 == nullptr || (act_ == DType::bf16 && ex_.device == Device::cpu));
  options_.share_prefixes = options_.share_prefixes && !caches_.has_rings();
  most_pred_rows_ = needed_pred_rows_ > options_.step_rows / options_.slots
                        ? (needed_pred_rows_ == 0 ? 0 : options_.step_rows)
                        : options_.slots * needed_pred_rows_;
  Arena planning;
  lay_out(planning);
  memory_ = Arena(planning.peak(), store.device());
  lay_out(memory_);
  keys_.resize(caches_.pairs().size());

  const int64_t most = options_.step_rows + most_pred_rows_;
  const auto numbers = size_t(3 * most + most_pred_rows_ + 10 * options_.slots + 1 + int64_t(table_.size()));
  const bool gpu = ex_.device == Device::cuda;
  const size_t bytes = size_t(options_.beside) + numbers * sizeof(int32_t);
  staged_ = Bytes(bytes, gpu ? Memory::pinned : Memory::host);
  if (gpu) on_device_ = Bytes(bytes, Memory::device);
  schedules_ = ops::DecodeSchedules(ex_);
}

DecoderMemory Decoder::memory() const {
  return {caches_.paged_bytes(), caches_.ring_bytes(), memory_.peak() + staged_.size() + schedules_.bytes(),
          options_.int8 != nullptr ? options_.int8->bytes() : 0};
}

int64_t Decoder::open(std::span<const int32_t> text) {
  const auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.open; });
  if (free == slots_.end()) return -1;
  const int64_t slot = free - slots_.begin();
  Slot& s = *free;
  s = {};
  s.open = true;
  if (!options_.share_prefixes) return slot;
  // At least one id is left to be read: its logits are wanted.
  while ((s.pages + 1) * options_.page < int64_t(text.size())) {
    const PagePool::Found found = pool_.find(s.prefix, page_ids(text, s.pages));
    if (found.page < 0) break;
    page_of(slot, s.pages++) = found.page;
    s.prefix = found.prefix;
  }
  s.remembered = s.pages;
  s.length = s.pred_end = s.pages * options_.page;
  s.ids.assign(text.begin(), text.begin() + s.length);
  for (int64_t i = 0; i < s.length; ++i)
    if (text[size_t(i)] == plan_.config.eot) s.document_start = plan_.config.eot_begins() ? i : i + 1;
  return slot;
}

void Decoder::close(int64_t slot) {
  Slot& s = slots_[size_t(slot)];
  SPS_CHECK(s.open);
  // The last page first: of a text that nobody has any more the beginning is the likeliest to come again.
  for (int64_t p = s.pages - 1; p >= 0; --p) pool_.give_back(page_of(slot, p));
  s = {};
}

void Decoder::take_pages(int64_t slot, int64_t positions) {
  Slot& s = slots_[size_t(slot)];
  for (; s.pages < pages_of(positions); ++s.pages) page_of(slot, s.pages) = pool_.take();
}

// Once the step that fills them has been issued.
void Decoder::remember_pages(int64_t slot) {
  Slot& s = slots_[size_t(slot)];
  for (; s.remembered < s.length / options_.page; ++s.remembered)
    s.prefix = pool_.remember(page_of(slot, s.remembered), s.prefix, page_ids(s.ids, s.remembered));
}

Tensor Decoder::step(std::span<const Run> runs, const Then& then, std::span<const std::byte> beside) {
  SPS_CHECK(!runs.empty() && int64_t(runs.size()) <= options_.slots);
  SPS_CHECK(int64_t(beside.size()) <= options_.beside);
  put_lists(runs, beside);
  issue(then);
  if (options_.share_prefixes)
    for (const Run& run : runs) remember_pages(run.slot);
  return b_.logits.rows_from(0, int64_t(picks_.size()));
}

void Decoder::issue(const Then& then) {
  const auto pass = [&] {
    forward();
    const Tensor logits = readout();
    device();  // the program's end
    const Bytes& there = ex_.device == Device::cuda ? on_device_ : staged_;
    if (then && logits.rows > 0) then(logits, reinterpret_cast<const std::byte*>(there.data()));
  };
  if (ex_.device == Device::cpu || !options_.graphs || lists_.longest > 1) return pass();
  graphs_.run(
      ex_, {lists_.runs, x_rows_, p_rows_, int64_t(picks_.size()), bool(then)}, pass,
      [&](StreamGraph& graph, std::optional<ops::DecodeProgram>& program) {
        // Its products are of few rows: with more, attention alone would be left to it.
        if (options_.program && x_rows_ + p_rows_ <= ops::kMostProgramRows && ops::DecodeProgram::usable(ex_))
          program.emplace(ex_, kStageCalls * int64_t(plan_.stages.size() + 1));
        program_ = program ? &*program : nullptr;
        const struct Reset {
          ops::DecodeProgram*& program;
          ~Reset() { program = nullptr; }
        } reset{program_};
        graph.record(ex_, pass);
        if (!program) return;
        program->upload();
        const auto launches = program->launches();
        program_launches_.all += launches.all, program_launches_.by_mail += launches.by_mail;
      });
}

void Decoder::put_lists(std::span<const Run> runs, std::span<const std::byte> beside) {
  const ModelConfig& c = plan_.config;
  lists_copied_.wait();
  x_rows_ = p_rows_ = 0;
  int64_t longest = 0;
  const auto pred_rows = [&](const Run& run) {
    const auto count = int64_t(run.tokens.size());
    return std::clamp<int64_t>(needed_pred_rows_ - run.left, 0, count);
  };
  for (const Run& run : runs) {
    SPS_CHECK(run.slot >= 0 && run.slot < options_.slots && !run.tokens.empty() && run.left >= 0);
    SPS_CHECK(slots_[size_t(run.slot)].open);
    longest = std::max(longest, int64_t(run.tokens.size()));
    x_rows_ += int64_t(run.tokens.size());
    p_rows_ += pred_rows(run);
  }
  SPS_CHECK(x_rows_ <= options_.step_rows && p_rows_ <= most_pred_rows_);

  auto* const staged = reinterpret_cast<std::byte*>(staged_.data());
  std::ranges::copy(beside, staged);
  auto* next = reinterpret_cast<int32_t*>(staged + options_.beside);
  const int32_t* const begin = next;
  const auto list = [&](int64_t numbers) {
    const std::span<int32_t> l{next, size_t(numbers)};
    next += numbers;
    return l;
  };
  // The places of the lists depend on the most rows alone, those of a stream's rows behind them on the
  // counts. Steps of one position a text, which graphs repeat, have short lists, that are copied in no time.
  const int64_t n = options_.slots, most_x = longest > 1 ? options_.step_rows : n,
                most_p = std::min(most_pred_rows_, most_x), most = most_x + most_p;
  const auto tokens = list(most), positions = list(most), starts = list(most), sources = list(most_p);
  const auto slot = list(n), picks = list(n), number = list(1);
  std::array<std::array<std::span<int32_t>, 4>, ops::kMaxQueryStreams> streams;
  for (auto& stream : streams)
    for (auto& l : stream) l = list(n);
  const auto table = list(int64_t(table_.size()));

  int64_t x = 0, p = 0, picked = 0;
  for (size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    Slot& s = slots_[size_t(run.slot)];
    const auto count = int64_t(run.tokens.size()), preds = pred_rows(run);
    SPS_CHECK(s.length + count <= c.context);
    take_pages(run.slot, s.length + count);
    if (options_.share_prefixes) s.ids.insert(s.ids.end(), run.tokens.begin(), run.tokens.end());
    const int64_t first_pred = s.length + count - preds;
    if (preds > 0 && first_pred != s.pred_end) s.pred_first = first_pred;
    slot[r] = int32_t(run.slot);
    const auto put = [&](size_t stream, int64_t row, int64_t rows, int64_t position, int64_t first) {
      const int64_t numbers[4] = {row, rows, position, first};
      for (size_t i = 0; i < 4; ++i) streams[stream][i][r] = int32_t(numbers[i]);
    };
    put(0, x, count, s.length, 0);
    put(1, p, preds, first_pred, s.pred_first);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = run.tokens[size_t(i)];
      SPS_CHECK(token >= 0 && token < c.vocab);
      if (token == c.eot && c.eot_begins()) s.document_start = s.length;
      const auto set = [&](int64_t row) {
        tokens[size_t(row)] = token, positions[size_t(row)] = int32_t(s.length);
        starts[size_t(row)] = int32_t(s.document_start);
      };
      set(x);
      if (i >= count - preds) {
        set(x_rows_ + p);
        sources[size_t(p++)] = int32_t(x);
      }
      ++x, ++s.length;
      if (token == c.eot && !c.eot_begins()) s.document_start = s.length;
    }
    if (preds > 0) s.pred_end = s.length;
    if (run.left == 0) picks[size_t(picked++)] = int32_t((c.readout == Readout::pred ? p : x) - 1);
  }
  std::ranges::copy(table_, table.begin());
  number_ = number_ == INT32_MAX ? 1 : number_ + 1;
  number[0] = number_;

  const int32_t* there = begin;
  if (ex_.device == Device::cuda) {
    auto* const on_device = reinterpret_cast<std::byte*>(on_device_.data());
    copy_bytes(ex_, on_device, staged, size_t(reinterpret_cast<std::byte*>(next) - staged));
    lists_copied_.set(ex_);
    there = reinterpret_cast<const int32_t*>(on_device + options_.beside);
  }
  const auto at = [&](std::span<int32_t> l, int64_t from, int64_t count) {
    return std::span<const int32_t>{there + (l.data() - begin) + from, size_t(count)};
  };
  const auto count = int64_t(runs.size());
  tokens_ = at(tokens, 0, x_rows_ + p_rows_), positions_ = at(positions, 0, x_rows_ + p_rows_);
  sources_ = at(sources, 0, p_rows_), picks_ = at(picks, 0, picked);
  lists_.runs = count, lists_.longest = longest, lists_.slot = at(slot, 0, count);
  lists_.table = {at(table, 0, int64_t(table.size())), per_slot_};
  lists_.schedules = &schedules_, lists_.number = at(number, 0, 1);
  for (size_t s = 0; s < streams.size(); ++s) {
    const auto& l = streams[s];
    lists_.stream[s] = {at(l[0], 0, count), at(l[1], 0, count), at(l[2], 0, count), at(l[3], 0, count),
                        s == 0 ? at(starts, 0, x_rows_) : at(starts, x_rows_, p_rows_)};
  }
}

std::span<const int32_t> Decoder::positions(Part part) const {
  if (part == Part::both) return positions_;
  return part == Part::x ? positions_.first(size_t(x_rows_)) : positions_.subspan(size_t(x_rows_));
}

Decoder::Rows Decoder::rows(Tensor buffer, int64_t cols_x, int64_t cols_p) const {
  const auto part = [&](int64_t from, int64_t count, int64_t cols) {
    Tensor t = buffer.cols_from(from, count * cols);
    t.rows = count, t.cols = cols, t.stride = cols;
    return t;
  };
  Rows r{{}, part(0, x_rows_, cols_x), part(x_rows_ * cols_x, p_rows_, cols_p)};
  if (cols_x == cols_p) r.both = part(0, x_rows_ + p_rows_, cols_x);
  return r;
}

}  // namespace sps
