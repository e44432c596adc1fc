#!/usr/bin/env bash
# Compares our tokenizers, data sets and Parquet reader with tiktoken, Hugging Face's tokenizers and pyarrow, which are
# installed into an environment of their own (build/oracles/python; versions: tests/oracles/requirements.txt). The build
# that is tested (build/oracles/build) takes Arrow from there too. `oracles.sh --python` only sets up the environment.
# Losses and gradients are compared with PyTorch's: SPS_TORCH_PYTHON is a Python that has it, by default that of
# `make bench`; without one this part says skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null ||
  { echo "oracles: needs python3 (apt-get install python3 python3-venv)" >&2; exit 1; }
command -v zstd >/dev/null || { echo "oracles: needs the program zstd (apt-get install zstd)" >&2; exit 1; }
here=build/oracles
python=$PWD/$here/python/bin/python
mkdir -p "$here"
if ! cmp -s tests/oracles/requirements.txt "$here/installed"; then
  echo "oracles: installing $(tr '\n' ' ' <tests/oracles/requirements.txt)into $here/python"
  rm -rf "$here/python"
  python3 -m venv "$here/python" ||
    { echo "oracles: python3-venv is missing (apt-get install python3-venv)" >&2; exit 1; }
  "$python" -m pip install -q --disable-pip-version-check -r tests/oracles/requirements.txt
  cp tests/oracles/requirements.txt "$here/installed"
fi
[ "${1:-}" != --python ] || exit 0

cmake --preset release -B "$here/build" -DSPS_BENCHES=OFF -DSPS_PYTHON="$python" >"$here/configure.log" 2>&1 ||
  { cat "$here/configure.log" >&2; exit 1; }
ninja -C "$here/build" sps oracle_test model_torch_test sps_data_test
"$python" -m pip freeze --disable-pip-version-check >"$here/versions"
echo "oracles: $(grep -E '^(tiktoken|tokenizers|pyarrow)=' "$here/versions" | tr '\n' ' ')"
# With Parquet in the build its tests must run: none of them may say skipped.
"$here/build/sps_data_test" --gtest_filter='ParquetFiles.*' | tee "$here/parquet.log"
if grep -q 'SKIPPED' "$here/parquet.log"; then
  echo "oracles: the Parquet tests did not run; $here/configure.log says why" >&2
  exit 1
fi
SPS_TORCH_PYTHON=${SPS_TORCH_PYTHON:-$PWD/build/bench-venv/bin/python} "$here/build/model_torch_test"
SPS_ORACLES=$python "$here/build/oracle_test"
