#!/usr/bin/env bash
# Measures generation on the CPU with models of scale S side by side: decoding beside what memory gives, and prompts.
# Writes bench/results/cpu-inference.json.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "bench: needs python3 (apt-get install python3)" >&2; exit 1; }
mkdir -p bench/results
# Many short rounds: a shared machine changes its speed from one second to the next, and ratios are those of a round.
python3 bench/inference.py "${BENCH_SPS:-build/sps}" bench/results/cpu-inference.json \
  "decode s_standard_20b s_sps_w64_20b s_free_pause_20b --device cpu --batch 1 --tokens 24 --rounds ${BENCH_ROUNDS:-9}" \
  "prefill s_standard_20b s_free_pause_20b s_sequential_6+6_20b --device cpu --batch 1 --prompt 1024 --rounds ${BENCH_ROUNDS:-9}"
