#include "train/freeze.h"

#include <cstring>

#include "base/hash.h"
#include "model/checkpoint_files.h"
#include "model/keys.h"
#include "model/load.h"

namespace sps {

namespace {

// Every key that decides what the state rows are, depth and widths first: the others follow from them.
constexpr const char* kStateKeys[] = {"model.state_layers",
                                      "model.d_model",
                                      "model.heads",
                                      "model.kv_heads",
                                      "model.head_dim",
                                      "model.d_ffn",
                                      "model.vocab",
                                      "model.eot",
                                      "model.bos",
                                      "model.qk_norm",
                                      "model.rope_pairs",
                                      "model.rope_theta",
                                      "model.rope_fraction",
                                      "model.norm_eps",
                                      "model.sliding_window",
                                      "model.full_attention_every",
                                      "model.band.xx"};

}  // namespace

void check_freeze(const RunConfig& run, const ModelConfig& model) {
  if (run.freeze.from.empty()) return;
  check_freezable(model);
  if (run.phase.at > 0)
    usage_error("freeze.from needs phase.at = 0, found {}: the frozen tower has been trained already",
                run.phase.at);
}

LoadedCheckpoint open_freeze_source(const RunConfig& run, const ModelConfig& model) {
  LoadedCheckpoint source = load_checkpoint(find_checkpoint(run.freeze.from), CheckpointParts::weights);
  const ModelConfig from = checkpoint_model_config(source);
  const std::string at = source.path.string();
  if (!from.xp.empty() || (from.has_pred() && from.ffn == FfnMode::pooled))
    usage_error(
        "freeze.from: the state of {} depends on its prediction stream ({}), so it cannot be had without", at,
        from.xp.empty() ? "model.ffn = pooled" : "model.band.xp = " + band_text(from.xp));
  ModelKeys ours = keys_of(model), theirs = keys_of(from);
  OptionTable our_table, their_table;
  bind_model(our_table, ours), bind_model(their_table, theirs);
  for (const char* key : kStateKeys)
    if (our_table.text(key) != their_table.text(key))
      usage_error("freeze.from: {} has {} = {}, but this run has {}", at, key, their_table.text(key),
                  our_table.text(key));
  if (model.context > from.context)
    usage_error("freeze.from: {} was trained with model.context = {}, but this run has {}, which is longer",
                at, from.context, model.context);
  return source;
}

Freeze freeze_of(const LoadedCheckpoint& source, const ModelConfig& model) {
  return {true, make_plan(model).read_head && source.weights.tensors().contains("read_head.kv")};
}

void copy_frozen(const LoadedCheckpoint& source, Model& model) {
  const ParameterStore& store = model.store();
  std::vector<std::pair<const StoredTensor*, Tensor>> pairs;
  for (size_t i = 0; i < store.list().size(); ++i) {
    const Parameter& p = store.list()[i];
    if (!p.frozen) continue;
    const StoredTensor& stored = source.weights.at(p.name);
    if (stored.shape != p.shape)
      fail("freeze.from: {} in {} does not have the shape that its own configuration gives it", p.name,
           source.path.string());
    if (stored.dtype != stored_type(store.master()))
      fail("freeze.from: the weights of {} are {}, but a run with run.dtype = {} needs {}",
           source.path.string(), stored_name(stored.dtype), dtype_name(store.compute()),
           stored_name(stored_type(store.master())));
    pairs.emplace_back(&stored, store.weight(int(i)));
  }
  const Exec ex = exec_on(store.device());
  for (const auto& [stored, weight] : pairs) copy_bytes(ex, weight.data, stored->data, stored->bytes);
  synchronize(ex);
  model.store().round();
}

uint64_t frozen_hash(const Model& model) {
  const ParameterStore& store = model.store();
  std::string parts;
  for (size_t i = 0; i < store.list().size(); ++i) {
    const Parameter& p = store.list()[i];
    if (!p.frozen) continue;
    const OnHost weight(store.weight(int(i)));
    const uint64_t values = hash64(weight->data, size_t(p.count()) * dtype_size(store.master()));
    parts += fmt::format("{} {}\n", p.name, hex(values));
  }
  return hash64(parts);
}

nlohmann::json frozen_state(Freeze freeze, uint64_t hash) {
  return {{"read_head", freeze.read_head}, {"xxh3", hex(hash)}};
}

std::optional<FrozenState> frozen_state_of(const LoadedCheckpoint& checkpoint) {
  if (!checkpoint.state.contains("frozen")) return std::nullopt;
  try {
    const nlohmann::json& frozen = checkpoint.state.at("frozen");
    return FrozenState{{true, frozen.at("read_head").get<bool>()}, frozen.at("xxh3").get<std::string>()};
  } catch (const nlohmann::json::exception& e) {
    fail("{} does not say what is frozen: {}", (checkpoint.path / kStateFile).string(), e.what());
  }
}

void check_frozen(const LoadedCheckpoint& checkpoint, const FrozenState& state, const Model& model) {
  const std::string hash = hex(frozen_hash(model));
  if (hash != state.hash)
    fail("the frozen weights of {} are not those that its run began with: their hash is {}, expected {}",
         checkpoint.path.string(), hash, state.hash);
}

}  // namespace sps
