// sps bench decode and sps bench prefill: generation speed of several models side by side.
#pragma once

#include <CLI/CLI.hpp>

namespace sps {

void add_bench_inference(CLI::App* bench);

}  // namespace sps
