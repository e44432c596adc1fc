#!/usr/bin/env bash
# Measures the demonstration's training step: against this machine's matrix-product ceiling, and against PyTorch in an
# environment of its own (build/bench-venv; BENCH_TORCH=none leaves the peer out). Writes bench/results/cpu-step.json.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "bench: needs python3 (apt-get install python3 python3-venv)" >&2; exit 1; }
python=${BENCH_TORCH:-build/bench-venv/bin/python}
if [ "$python" != none ] && [ ! -x "$python" ]; then
  echo "bench: installing PyTorch into build/bench-venv (BENCH_TORCH=none to do without)"
  python3 -m venv build/bench-venv || { echo "bench: python3-venv is missing (apt-get install python3-venv)" >&2; exit 1; }
  build/bench-venv/bin/pip install -q torch numpy
fi
mkdir -p bench/results
python3 bench/side_by_side.py "$python" "${BENCH_ROUNDS:-7}" bench/results/cpu-step.json
