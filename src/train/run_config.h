// RunConfig: everything a training run is told (design, section 7). One table of options describes every key;
// the command line, TOML files, `config.toml` in the run directory and `sps train --help` are made from it.
#pragma once

#include <filesystem>
#include <string>

#include "base/options.h"
#include "data/token_file.h"
#include "model/config.h"
#include "optim/schedule.h"

namespace sps {

struct RunConfig {
  std::string name = "custom";  // the recipe, or the TOML file's stem
  ModelKeys model;
  struct Train {
    int64_t tokens = 10'000'000'000;
    int64_t global_batch = 96, micro_batch = 6;  // sequences
    int64_t seed = 1337;
    int64_t eval_every_tokens = 20'000'000, eval_tokens = 10'000'000;
    int64_t save_every_tokens = 1'000'000'000, rolling_every_tokens = 100'000'000;
    int64_t chunk_units = 1;
    std::string recompute = "none";  // model/recompute.h
  } train;
  struct Optim {
    std::string name = "adamw";
    double lr = 6e-4, min_lr = 6e-5, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1;
  } optim;
  struct ScheduleKeys {
    int64_t warmup_tokens = 50'000'000, decay_tokens = 1'000'000'000;
  } schedule;
  struct Phase {
    double at =
        0;  // fraction of the tokens that the standard model is trained on before the prediction tower starts
  } phase;
  struct Freeze {
    std::string from;  // checkpoint or run whose state tower is taken and frozen; "" = none (train/freeze.h)
  } freeze;
  struct Data {
    std::string dir;
  } data;
  struct Run {
    std::string dir;  // "" = runs/<name>
    std::string device = "auto";
    std::string dtype = "auto";  // auto: bf16 where the CPU has instructions for it, else f32
    int64_t threads = 0;         // 0 = all cores
    bool graphs = true;          // on a GPU: steps are recorded and started as a whole
  } run;

  std::filesystem::path run_dir() const;
  Schedule make_schedule() const;  // usage error if its keys contradict each other
};

// Binds every key to the fields of `config`. Keys of the model may be written without "model." in front.
OptionTable bind(RunConfig& config);

// A recipe's name or a TOML file, then key=value overrides in order. Checks all that can be checked without
// data.
RunConfig load_run_config(const std::string& recipe_or_file, const std::vector<std::string>& overrides);

// Takes vocabulary and end-of-text id from a data set, where `keys` leave them open. Usage error where they
// disagree.
void adopt_vocabulary(const TokenMeta& meta, const std::string& data_dir, ModelKeys& keys);

// {scale}_{family}[_{M}+{N}][_w{N|full}][_pooled][_tok][_phase{percent}]_{tokens}[_seed{n}], for instance
// xs_sps_w64_20b, s_standard_10b_seed1, 1b_free_pause_pooled_phase75_100b, s_sequential_6+6_20b.
// The reference's full_attention and w4096 are understood. Throws a usage error that says which part is
// wrong.
RunConfig recipe(const std::string& name);
bool looks_like_recipe(const std::string& name);  // starts with a scale's name and an underscore

}  // namespace sps
