#include "data/sampler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/rng.h"

namespace sps {
namespace {

constexpr uint64_t kValidationSeed = 42;

// A random order of 0..n-1 (Fisher-Yates).
std::vector<uint32_t> shuffled(int64_t n, const Rng& rng) {
  std::vector<uint32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0u);
  for (uint64_t i = uint64_t(n); i > 1; --i) std::swap(order[i - 1], order[rng.below(i, i)]);
  return order;
}

int64_t checked_context(int64_t context) {
  if (context < 1) usage_error("context is {}, but at least 1 token is expected", context);
  return context;
}

// Whole windows of context + 1 tokens whose inputs do not overlap.
int64_t windows_of(const TokenFile& file, int64_t context) {
  const int64_t windows = file.size() > 0 ? (file.size() - 1) / context : 0;
  if (windows == 0)
    fail("{}: has {} tokens, but one window of context {} needs {}", file.path().string(), file.size(),
         context, context + 1);
  if (windows > int64_t{std::numeric_limits<uint32_t>::max()})
    fail("{}: has {} windows of context {}, more than the {} that can be shuffled; use a longer context",
         file.path().string(), windows, context, std::numeric_limits<uint32_t>::max());
  return windows;
}

}  // namespace

Sampler::Sampler(const TokenFile& file, const SamplerOptions& options) : file_(file), options_(options) {
  const int64_t context = checked_context(options.context), windows = windows_of(file, context);
  if (options.chunk_units < 1)
    usage_error("chunk_units is {}, but at least 1 window is expected", options.chunk_units);
  SPS_CHECK(options.world >= 1 && options.rank >= 0 && options.rank < options.world);
  // One unit fewer than fit at most, so that there is room for `context` offsets; never fewer than one.
  units_ = std::max<int64_t>(1, (file.size() - context) / context);
  offsets_ = file.size() - units_ * context;
  SPS_CHECK(units_ <= windows && offsets_ >= 1);
  options_.chunk_units = std::min(options.chunk_units, units_);
  order_epoch_ = std::numeric_limits<uint64_t>::max();
}

int64_t Sampler::offset(uint64_t epoch) const {
  return int64_t(Rng(options_.seed, "training window offset").below(epoch, uint64_t(offsets_)));
}

int64_t Sampler::start(uint64_t n) {
  const uint64_t epoch = n / uint64_t(units_);
  const int64_t i = int64_t(n % uint64_t(units_)), size = options_.chunk_units;
  const int64_t chunks = (units_ + size - 1) / size;
  if (order_epoch_ != epoch) {
    order_ = shuffled(chunks, Rng(options_.seed, fmt::format("training order of epoch {}", epoch)));
    short_place_ = std::find(order_.begin(), order_.end(), uint32_t(chunks - 1)) - order_.begin();
    order_epoch_ = epoch;
  }
  // Everything behind the short chunk stands `missing` samples earlier than in a list of whole chunks.
  const int64_t missing = chunks * size - units_;
  const int64_t behind = (short_place_ + 1) * size - missing;
  const int64_t whole = i < behind ? i : i + missing;
  const int64_t unit = int64_t{order_[size_t(whole / size)]} * size + whole % size;
  return offset(epoch) + unit * options_.context;
}

void Sampler::batch(uint64_t begin, int64_t count, std::vector<int64_t>& starts) {
  starts.clear();
  const uint64_t world = uint64_t(options_.world), rank = uint64_t(options_.rank);
  const uint64_t first = begin + (rank + world - begin % world) % world;
  for (uint64_t n = first; n < begin + uint64_t(count); n += world) starts.push_back(start(n));
}

int64_t Sampler::dropped_tokens() const {
  return file_.size() - (units_ * options_.context + 1);
}

std::string Sampler::stream_hash(uint64_t begin, uint64_t end) {
  Hasher hasher;
  std::vector<int32_t> ids(size_t(options_.context) + 1);
  for (uint64_t n = begin; n < end; ++n) {
    file_.read(start(n), int64_t(ids.size()), ids.data());
    hasher.update(ids.data(), ids.size() * sizeof(int32_t));
  }
  return hex(hasher.digest());
}

ValidationWindows::ValidationWindows(const TokenFile& file, int64_t context, int64_t eval_tokens)
    : available_(windows_of(file, checked_context(context))) {
  if (eval_tokens < 0) usage_error("eval_tokens is {}, but 0 (all) or more is expected", eval_tokens);
  dropped_ = file.size() - (available_ * context + 1);
  const int64_t wanted = eval_tokens / context + (eval_tokens % context != 0);
  if (eval_tokens == 0 || wanted >= available_) {
    starts_.resize(size_t(available_));
    for (int64_t i = 0; i < available_; ++i) starts_[size_t(i)] = i * context;
    return;
  }
  const auto order = shuffled(available_, Rng(kValidationSeed, "validation windows"));
  starts_.resize(size_t(wanted));
  for (size_t i = 0; i < starts_.size(); ++i) starts_[i] = int64_t{order[i]} * context;
}

}  // namespace sps
