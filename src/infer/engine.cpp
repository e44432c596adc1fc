#include "infer/engine.h"

#include <algorithm>

#include "base/error.h"
#include "base/threads.h"

namespace sps {

namespace {

DecoderOptions decoder_options(const EngineOptions& o) {
  if (o.max_sequences < 1) usage_error("max_sequences = {}: expected 1 or more", o.max_sequences);
  if (o.page < 1) usage_error("page = {}: expected 1 or more positions", o.page);
  if (o.cache_tokens < 0)
    usage_error("cache_tokens = {}: expected 0 (whole contexts) or more", o.cache_tokens);
  if (o.step_rows < 0) usage_error("step_rows = {}: expected 0 (automatic) or more", o.step_rows);
  return {o.max_sequences, o.cache_tokens == 0 ? 0 : (o.cache_tokens + o.page - 1) / o.page, o.page,
          o.step_rows, o.share_prefixes};
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
    : decoder_(config, parameters, store, decoder_options(options)) {}

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
                                                 .forbidden = std::move(forbidden),
                                                 .seen = std::move(seen)}));
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
  const Tensor logits = decoder_.step(runs);
  SPS_CHECK(logits.rows == int64_t(readers.size()));
  const int64_t vocab = config().vocab;
  const OnHost host(logits);
  const Tensor there = host;
  const float* from = nullptr;
  if (there.dtype == DType::f64) {
    logits_.assign(there.as<double>(), there.as<double>() + there.count());
    from = logits_.data();
  } else {
    from = there.as<float>();
  }

  const size_t before = drawn.size();
  drawn.resize(before + readers.size());
  parallel_for(int64_t(readers.size()), [&](int64_t i) {
    const std::span<const float> row(from + i * vocab, size_t(vocab));
    drawn[before + size_t(i)] = draw(*readers[size_t(i)], row);
  });
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

// Runs beside other texts' draws.
Drawn Engine::draw(Text& text, std::span<const float> logits) const {
  Drawn d{.handle = text.handle};
  try {
    d.id = text.next.draw(logits, text.forbidden, uint64_t(text.drawn()), text.seen);
  } catch (const Error& e) {
    d.finish = Finish::failed;
    d.error = e.what();
    return d;
  }
  if (text.request.log_probabilities) d.log_probability = log_probability(logits, d.id);
  const auto& stops = text.request.stop_ids;
  if (d.id == config().eot)
    d.finish = Finish::end_of_text;
  else if (std::find(stops.begin(), stops.end(), d.id) != stops.end())
    d.finish = Finish::stop_id;
  if (d.finish != Finish::no) return d;
  text.ids.push_back(d.id);
  text.seen[size_t(d.id)] = true;
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
