#!/usr/bin/env bash
# Measures generation with models of scale S side by side: decoding beside what memory gives, and prompts. Writes
# bench/results/cpu-inference.json.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "bench: needs python3 (apt-get install python3)" >&2; exit 1; }
mkdir -p bench/results
python3 bench/inference.py "${BENCH_SPS:-build/sps}" bench/results/cpu-inference.json --device cpu "$@"
