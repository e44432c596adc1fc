#include "infer/engine.h"

#include <algorithm>

#include "base/error.h"

namespace sps {

namespace {

DecoderOptions decoder_options(const EngineOptions& o) {
  if (o.max_sequences < 1) usage_error("max_sequences = {}: expected 1 or more", o.max_sequences);
  if (o.page < 1) usage_error("page = {}: expected 1 or more positions", o.page);
  if (o.cache_tokens < 0)
    usage_error("cache_tokens = {}: expected 0 (whole contexts) or more", o.cache_tokens);
  if (o.step_rows < 0) usage_error("step_rows = {}: expected 0 (automatic) or more", o.step_rows);
  return {.slots = o.max_sequences,
          .pages = o.cache_tokens == 0 ? 0 : (o.cache_tokens + o.page - 1) / o.page,
          .page = o.page,
          .step_rows = o.step_rows,
          .beside = o.max_sequences * int64_t(sizeof(ops::SampleRow)),
          .share_prefixes = o.share_prefixes,
          .program = o.program,
          .int8 = o.int8};
}

}  // namespace

std::string_view name_of(Finish finish) {
  switch (finish) {
    case Finish::no:
      return "no";
    case Finish::length:
      return "length";
    case Finish::end_of_text:
      return "end_of_text";
    case Finish::stop_id:
      return "stop_id";
    case Finish::failed:
      return "failed";
  }
  return "?";
}

Engine::Engine(const ModelConfig& config, const ModelParameters& parameters, const ParameterStore& store,
               const EngineOptions& options)
    : decoder_(config, parameters, store, decoder_options(options)), ex_(exec_on(store.device())) {
  const int64_t slots = decoder_.options().slots, words = ops::id_words(config.vocab);
  if (config.vocab > ops::kMostIds)
    usage_error("a vocabulary of {} ids: generation takes at most {}", config.vocab, ops::kMostIds);
  const auto lay_out = [&](Arena& arena) {
    forbidden_ = arena.take(DType::i32, slots, words), seen_ = arena.take(DType::i32, slots, words);
  };
  Arena plan;
  lay_out(plan);
  sets_ = Arena(plan.peak(), store.device());
  lay_out(sets_);
  sampled_ =
      Bytes(size_t(slots) * sizeof(ops::Sampled), ex_.device == Device::cuda ? Memory::pinned : Memory::host);
}

int64_t Engine::add(Request request) {
  const ModelConfig& c = config();
  std::vector<int32_t> ids = checked_prompt(c, request.prompt, request.options);
  const auto length = int64_t(ids.size());
  const int64_t pages = decoder_.pages_of(length + request.options.max_new);
  if (pages > decoder_.options().pages)
    usage_error("a prompt of {} tokens and {} new ones do not fit the cache of {} positions", length,
                request.options.max_new, decoder_.options().pages * decoder_.options().page);
  std::vector<bool> forbidden = forbidden_ids(c, request.options);
  const auto known = [&](const std::vector<int32_t>& list, const char* what) {
    for (const int32_t id : list)
      if (id < 0 || id >= c.vocab)
        usage_error("the {} ids hold {}: the model's vocabulary has {} ids", what, id, c.vocab);
  };
  known(request.stop_ids, "stop"), known(request.forbidden, "forbidden");
  for (const int32_t id : request.forbidden) forbidden[size_t(id)] = true;
  std::vector<bool> seen(size_t(c.vocab), false);
  for (const int32_t id : ids) seen[size_t(id)] = true;

  const NextId next(request.options.sampling);
  waiting_.push_back(std::make_unique<Text>(Text{.handle = next_handle_,
                                                 .reserved = pages,
                                                 .request = std::move(request),
                                                 .ids = std::move(ids),
                                                 .prompt = length,
                                                 .next = next,
                                                 .forbidden = id_set(forbidden),
                                                 .seen = id_set(seen)}));
  return next_handle_++;
}

bool Engine::cancel(int64_t handle) {
  const auto is_it = [&](const std::unique_ptr<Text>& text) { return text->handle == handle; };
  if (std::erase_if(waiting_, is_it) > 0) return true;
  const auto found = std::find_if(live_.begin(), live_.end(), is_it);
  if (found == live_.end()) return false;
  leave(**found);
  live_.erase(found);
  return true;
}

void Engine::leave(const Text& text) {
  decoder_.close(text.slot);
  reserved_ -= text.reserved;
}

void Engine::admit() {
  while (!waiting_.empty() && int64_t(live_.size()) < decoder_.options().slots &&
         reserved_ + waiting_.front()->reserved <= decoder_.options().pages) {
    live_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    Text& text = *live_.back();
    text.slot = decoder_.open(text.ids);
    text.fed = decoder_.length(text.slot);
    shared_positions_ += text.fed;
    reserved_ += text.reserved;
    const auto put = [&](const IdSet& from, Tensor to) {
      copy_bytes(ex_, to.row<int32_t>(text.slot), from.data(), from.size() * sizeof(int32_t));
    };
    put(text.forbidden, forbidden_), put(text.seen, seen_);
  }
}

std::vector<Drawn> Engine::step() {
  std::vector<Drawn> drawn;
  // Nothing to draw: such a text ends before it begins.
  std::erase_if(waiting_, [&](const std::unique_ptr<Text>& text) {
    if (text->request.options.max_new > 0) return false;
    drawn.push_back({.handle = text->handle, .finish = Finish::length});
    return true;
  });
  admit();
  if (live_.empty()) return drawn;

  // One row for every text that draws; prompts share the rest in the order of their texts.
  int64_t rows = decoder_.options().step_rows;
  for (const auto& text : live_) rows -= text->fed >= text->prompt ? 1 : 0;
  std::vector<Decoder::Run> runs;
  std::vector<Text*> readers;  // texts whose next id this step decides
  for (const auto& text : live_) {
    const bool draws = text->fed >= text->prompt;
    const int64_t left = int64_t(text->ids.size()) - text->fed, count = draws ? 1 : std::min(left, rows);
    if (count == 0) continue;
    if (!draws) rows -= count;
    runs.push_back(
        {text->slot, std::span(text->ids).subspan(size_t(text->fed), size_t(count)), left - count});
    text->fed += count;
    if (count == left) readers.push_back(text.get());
  }
  const std::vector<ops::SampleRow> settings = settings_of(readers);
  const size_t before = drawn.size();
  // Of a GPU's logits only what was drawn comes to the host: the GPU writes it there.
  const std::span sampled(reinterpret_cast<ops::Sampled*>(sampled_.data()), readers.size());
  const auto draw = [&](Tensor logits, const std::byte* beside) {
    SPS_CHECK(logits.rows == int64_t(settings.size()));
    const std::span there(reinterpret_cast<const ops::SampleRow*>(beside), settings.size());
    ops::sample(ex_, logits, there, forbidden_, seen_, sampled);
  };
  decoder_.step(runs, draw, std::as_bytes(std::span(settings)));
  synchronize(ex_);
  for (size_t i = 0; i < readers.size(); ++i) drawn.push_back(take(*readers[i], sampled[i]));
  std::erase_if(live_, [&](const std::unique_ptr<Text>& text) {
    for (size_t i = before; i < drawn.size(); ++i) {
      if (drawn[i].handle != text->handle || drawn[i].finish == Finish::no) continue;
      leave(*text);
      return true;
    }
    return false;
  });
  return drawn;
}

// How the texts want their next ids.
std::vector<ops::SampleRow> Engine::settings_of(const std::vector<Text*>& readers) const {
  std::vector<ops::SampleRow> settings;
  for (const Text* text : readers) {
    ops::SampleRow& row = settings.emplace_back(text->next.row(uint64_t(text->drawn()), text->slot));
    row.log_probability = text->request.log_probabilities ? 1 : 0;
  }
  return settings;
}

Drawn Engine::take(Text& text, const ops::Sampled& sampled) const {
  Drawn d{.handle = text.handle};
  if (sampled.problem != ops::SampleProblem::none) {
    d.finish = Finish::failed;
    d.error = problem_text(sampled);
    return d;
  }
  d.id = sampled.id, d.log_probability = sampled.log_probability;
  const auto& stops = text.request.stop_ids;
  if (d.id == config().eot)
    d.finish = Finish::end_of_text;
  else if (std::find(stops.begin(), stops.end(), d.id) != stops.end())
    d.finish = Finish::stop_id;
  if (d.finish != Finish::no) return d;
  text.ids.push_back(d.id);
  if (text.drawn() == text.request.options.max_new) d.finish = Finish::length;
  return d;
}

EngineMemory Engine::memory() const {
  const CacheSize size = cache_size(decoder_.plan(), decoder_.dtype());
  EngineMemory m;
  m.decoder = decoder_.memory();
  m.bytes_per_position = size.bytes_per_position, m.bytes_per_sequence = size.bytes_per_sequence;
  m.pages = decoder_.options().pages, m.used_pages = m.pages - decoder_.free_pages(),
  m.reserved_pages = reserved_;
  m.shared_positions = shared_positions_;
  m.live = int64_t(live_.size()), m.waiting = int64_t(waiting_.size());
  return m;
}

}  // namespace sps
