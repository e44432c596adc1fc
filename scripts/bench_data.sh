#!/usr/bin/env bash
# Measures encoding, training a tokenizer and preparation, beside tiktoken and Hugging Face's tokenizers in the
# environment of `make oracles`. The text is the corpus beside the repository where it is there, otherwise Debian's
# python3.11-doc. Writes bench/results/tokenizer.json and prepare.json. BENCH_PARTS (default "train encode prepare"; also
# memory, which writes BENCH_GB = 3 GB) and BENCH_ROUNDS (5) say what is done.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/oracles.sh --python
sps=${BENCH_SPS:-build/sps}
work=${BENCH_WORK:-build/bench-data}
rounds=${BENCH_ROUNDS:-5}
corpus=../shared/data/corpus/train-00.jsonl.zst
mkdir -p "$work" bench/results
if [ ! -f "$work/texts.jsonl" ]; then
  if [ -f "$corpus" ]; then
    zstd -dcq "$corpus" >"$work/texts.jsonl.part"
  else
    scripts/documentation.sh "$work/documentation"
    # One document a file, as the corpus has them.
    python3 - "$work/documentation" >"$work/texts.jsonl.part" <<'PYTHON'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.txt")):
    print(json.dumps({"text": path.read_text(encoding="utf-8")}))
PYTHON
  fi
  mv "$work/texts.jsonl.part" "$work/texts.jsonl"
fi
for part in ${BENCH_PARTS:-train encode prepare}; do
  echo "bench: $part"
  case $part in
    encode | train) python=build/oracles/python/bin/python out=tokenizer ;;
    *) python=python3 out=prepare ;;
  esac
  "$python" bench/tokenizer.py "$part" "$sps" "$work" "$rounds" "bench/results/$out.json" "$work/texts.jsonl"
done
