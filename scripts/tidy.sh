#!/usr/bin/env bash
# clang-tidy over everything that is compiled, with the checks of .clang-tidy. Any finding fails.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is not installed (apt-get install clang-tidy)" >&2; exit 1; }
[ -f build/compile_commands.json ] || cmake --preset release >/dev/null
# GCC-only flags in the compile commands are no finding, and neither is the loop variable of each benchmark.
git ls-files 'src/*.cpp' 'src/*.cc' 'tests/*.cpp' ':!*_bench.cpp' |
  xargs -P "$(nproc)" -n 4 clang-tidy -p build --quiet --extra-arg=-Wno-unknown-warning-option \
    --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-unused-command-line-argument
