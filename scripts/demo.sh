#!/usr/bin/env bash
# The demonstration: real English text from a Debian package, four models trained on it one after the other on the
# same tokens in the same order, one table, one sample from each. DEMO_SECONDS (default 300) is the time to spend on
# training; the number of tokens follows from this machine's measured speed, DEMO_TOKENS fixes it instead.
set -euo pipefail
cd "$(dirname "$0")/.."

sps=build/sps
out=build/demo
seconds=${DEMO_SECONDS:-300}
# The two-stream models start from the token's own embedding (or, sequential, from the finished state): with the
# papers' constant start the first minutes go into learning to fetch the current token (docs/benchmarks.md).
names=(standard sps_w16_tok free_pause_pooled_tok sequential_2+2)
settings=("" "" "" "pred.input=state model.tie_head=true")

mkdir -p "$out"
scripts/documentation.sh "$out/text"
[ -f "$out/tokenizer.json" ] || "$sps" tokenizer train "$out/text" --vocab-size 2048 --out "$out/tokenizer.json"
[ -f "$out/data/meta.json" ] || "$sps" prepare "$out/text" --tokenizer "$out/tokenizer.json" --out "$out/data"

field() { sed -n "s/.*\"$1\":\([0-9.e+-]*\).*/\1/p"; }

# A demonstration that was stopped goes on with the tokens it began with; `rm -r build/demo` starts anew.
tokens=${DEMO_TOKENS:-}
[ -n "$tokens" ] || tokens=$(cat "$out/tokens" 2>/dev/null || true)
if [ -z "$tokens" ]; then
  echo "demo: measuring this machine"
  per_step=0
  for i in "${!names[@]}"; do
    # shellcheck disable=SC2086
    s=$("$sps" bench train "demo_${names[$i]}_1m" ${settings[$i]} data.dir="$out/data" --steps 5 --no-ceiling --json | field seconds_per_step)
    per_step=$(awk "BEGIN {print $per_step + $s}")
  done
  # Steps of 4096 tokens, between 40 and 700 (2.9 M tokens: less than one pass over the text).
  tokens=$(awk "BEGIN {n = int($seconds / $per_step); if (n < 40) n = 40; if (n > 700) n = 700; print n * 4096}")
fi
echo "$tokens" >"$out/tokens"
echo "demo: training ${#names[@]} models on $tokens tokens each"

runs=()
for i in "${!names[@]}"; do
  run="$out/runs/${names[$i]}"
  # shellcheck disable=SC2086
  "$sps" train "demo_${names[$i]}_10m" ${settings[$i]} data.dir="$out/data" run.dir="$run" \
    train.tokens="$tokens" schedule.warmup_tokens=$((tokens / 20)) schedule.decay_tokens=$((tokens / 5)) \
    train.eval_every_tokens=$((tokens / 4)) train.eval_tokens=65536 train.save_every_tokens=0 \
    train.rolling_every_tokens=$((tokens / 4)) --json >"$out/${names[$i]}.json"
  runs+=("$run")
done

echo
"$sps" report "${runs[@]}" --data "$out/data"
echo
echo "A sample from each (temperature 0.7, the same seed):"
for i in "${!names[@]}"; do
  echo "--- ${names[$i]}"
  "$sps" generate "${runs[$i]}" --prompt "The following example shows" --tokens 160 --temperature 0.7 --seed 1
done
