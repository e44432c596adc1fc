#include "cli/bench_generation.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/hash.h"
#include "base/progress.h"
#include "base/rng.h"
#include "cli/bench_memory.h"
#include "tensor/device.h"

namespace sps {

namespace {

// Ids of text, none of which ends a document.
std::vector<int32_t> random_prompt(const ModelConfig& c, const Rng& rng, int64_t text, int64_t length) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) {
    const auto id = int32_t(rng.below(uint64_t(text * length + i), uint64_t(c.text_ids() - 1)));
    ids.push_back(id >= c.eot ? id + 1 : id);
  }
  return ids;
}

// Runs what the engine has been given, texts with handles from 0 and prompts of one length.
void time_engine(Engine& engine, const StepTraffic& traffic, int64_t texts, int64_t prompt,
                 GenerationTimes& times) {
  std::vector<double> seconds;
  std::vector<std::vector<int64_t>> positions;           // of each timed step, that each text's id stands at
  std::vector<int64_t> next(size_t(texts), prompt - 1);  // position of the id that a text feeds next
  int64_t begun = 0;                                     // texts that have a new token
  Hasher ids;
  const double began = monotonic_seconds();
  while (!engine.idle()) {
    const bool all = begun == texts;
    const double before = monotonic_seconds();
    const std::vector<Drawn> drawn = engine.step();
    const double after = monotonic_seconds();
    if (all && int64_t(drawn.size()) == texts) seconds.push_back(after - before), positions.push_back(next);
    for (const Drawn& d : drawn) {
      if (d.finish == Finish::failed) fail("text {}: {}", d.handle, d.error);
      begun += next[size_t(d.handle)]++ == prompt - 1 ? 1 : 0;
      ids.update(&d.handle, sizeof(d.handle)), ids.update(&d.id, sizeof(d.id));
    }
    if (!all && begun == texts) times.prefill.push_back(after - began);
  }
  times.whole.push_back(monotonic_seconds() - began);
  if (times.whole.size() == 1) times.drawn = ids.digest(), times.programs = engine.program_launches();
  if (seconds.empty()) return;
  StepBytes sum;
  std::vector<double> rates;
  double total = 0;
  for (size_t i = 0; i < seconds.size(); ++i) {
    const StepBytes bytes = traffic.of(positions[i]);
    sum.weights += bytes.weights, sum.keys += bytes.keys, sum.logits += bytes.logits;
    total += seconds[i];
    rates.push_back(bytes.total() / seconds[i]);
  }
  times.bytes_per_second.push_back(median(rates));
  const auto n = double(seconds.size());
  times.bytes = {sum.weights / n, sum.keys / n, sum.logits / n};
  times.step_medians.push_back(median(seconds));
  times.step_tokens_per_second.push_back(double(texts) * n / total);
  times.steps.insert(times.steps.end(), seconds.begin(), seconds.end());
}

// `tokens`: new ones of each text; `most`: for as many there is room.
void take_turn(const BenchSubject& subject, const StepTraffic& traffic, const GenerationBench& bench,
               int64_t batch, int64_t tokens, int64_t most, uint64_t seed, GenerationTimes& times) {
  EngineOptions options;
  options.max_sequences = batch, options.step_rows = bench.rows_of(batch);
  options.int8 = subject.int8(), options.program = bench.program;
  const int64_t pages = (bench.prompt + most + options.page - 1) / options.page;
  options.cache_tokens = batch * pages * options.page;
  std::unique_ptr<Engine> engine;
  try {
    engine = std::make_unique<Engine>(subject.config(), subject.parameters(), subject.store(), options);
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::usage) throw;
    times.error = e.what();
    return;
  }
  const Rng rng(seed, "bench prompts");
  for (int64_t text = 0; text < batch; ++text) {
    Request request;
    request.prompt = random_prompt(subject.config(), rng, text, bench.prompt);
    request.options.max_new = tokens;
    request.options.stop_at_eot = false;
    request.options.sampling = bench.sampling;
    request.options.sampling.seed += uint64_t(text);
    engine->add(std::move(request));
  }
  time_engine(*engine, traffic, batch, bench.prompt, times);
  times.memory = engine->memory();
  times.scratch = subject.store().device() == Device::cuda ? device_scratch_bytes() : thread_scratch_bytes();
}

}  // namespace

double quantile(std::vector<double> values, double q) {
  SPS_CHECK(!values.empty() && q >= 0 && q <= 1);
  const auto at = values.begin() + std::lround(q * double(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

int64_t GenerationBench::rows_of(int64_t batch) const {
  return step_rows > 0 ? step_rows : std::max(batch, std::min<int64_t>(batch * prompt, 16384));
}

std::vector<std::vector<GenerationTimes>> bench_generation(const std::vector<BenchSubject>& subjects,
                                                           DType dtype, Device device,
                                                           const GenerationBench& bench) {
  SPS_CHECK(bench.tokens.size() == bench.batches.size());
  std::vector<std::vector<GenerationTimes>> all(subjects.size(),
                                                std::vector<GenerationTimes>(bench.batches.size()));
  std::vector<StepTraffic> traffic;
  traffic.reserve(subjects.size());
  for (const BenchSubject& s : subjects)
    traffic.emplace_back(make_plan(s.config()), dtype, s.int8() != nullptr);
  const bool gpu = device == Device::cuda;
  const std::unique_ptr<ReadCeiling> reads =
      bench.ceiling && !gpu ? std::make_unique<ReadCeiling>() : nullptr;
  const auto turns = int64_t(subjects.size() * bench.batches.size());
  Progress progress("bench", turns * (bench.rounds + 1), "runs");
  int64_t done = 0;
  for (int round = 0; round <= bench.rounds; ++round) {
    for (size_t b = 0; b < bench.batches.size(); ++b)
      for (size_t s = 0; s < subjects.size(); ++s) {
        GenerationTimes& times = all[s][b];
        // Memory grows and products are chosen before anything counts.
        GenerationTimes warm;
        if (times.error.empty()) {
          const double before = reads && round > 0 ? reads->bytes_per_second() : 0;
          const int64_t tokens = bench.tokens[b];
          take_turn(subjects[s], traffic[s], bench, bench.batches[b],
                    round > 0 ? tokens : std::min<int64_t>(tokens, 8), tokens, uint64_t(round),
                    round > 0 ? times : warm);
          if (reads && round > 0) times.ceilings.push_back((before + reads->bytes_per_second()) / 2);
        }
        if (round == 0) times.error = warm.error;
        progress.update(++done);
      }
    if (gpu && round > 0 && bench.ceiling) {
      const double copied = gpu_copy_bytes_per_second();
      for (auto& of_subject : all)
        for (GenerationTimes& times : of_subject) times.ceilings.push_back(copied);
    }
  }
  progress.finish(done);
  return all;
}

}  // namespace sps
