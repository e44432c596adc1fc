// A checkpoint: state.json with a right checksum, config.json, and the weights' file.
#include "base/hash.h"
#include "fuzz/fuzz.h"
#include "model/checkpoint_files.h"
#include "model/load.h"

namespace {

using namespace sps;

// What a state.json would be if its writer had meant it.
std::string with_checksum(std::string_view text) {
  nlohmann::json state = parse_json(text, "state");
  if (!state.is_object()) return std::string(text);
  state.erase("check");
  state["check"] = hex(hash64(dump_json(state)));
  return dump_json(state);
}

CheckpointFile file_of(const char* name, std::string_view content) {
  return {name, {content.size(), hash64(content)}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::Scratch scratch;
  fuzz::Input input(data, size);
  const bool own_state = input.choose(2) == 1;
  const std::string_view state = input.part(), config = input.part(), weights = input.rest();
  const CheckpointName name{CheckpointKind::named, 4096};
  const std::filesystem::path run = scratch.path() / "run", folder = checkpoints_dir(run) / name.text();
  std::filesystem::create_directories(folder);
  const std::string in_run = "run/checkpoints/" + name.text() + "/";
  std::string state_text;
  if (!fuzz::accepts([&] {
        state_text =
            own_state ? with_checksum(state)
                      : checkpoint_state_text(name, parse_json(state, "state"),
                                              {file_of(kConfigFile, config), file_of(kWeightsFile, weights)});
      }))
    state_text = state;
  scratch.write(in_run + kStateFile, state_text);
  scratch.write(in_run + kConfigFile, config);
  scratch.write(in_run + kWeightsFile, weights);

  fuzz::accepts([&] { latest_checkpoint(run); });
  fuzz::accepts([&] {
    const LoadedCheckpoint loaded = load_checkpoint(find_checkpoint(run));
    const ModelConfig model = checkpoint_model_config(loaded);
    fuzz::must_accept([&] { SPS_CHECK(resolve(keys_of(model)) == model); });
  });
  return 0;
}
