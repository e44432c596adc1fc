#!/usr/bin/env bash
# Builds the fuzzers with clang and runs each for FUZZ_SECONDS (600) with FUZZ_JOBS (1) processes; then one table.
# FUZZ_ONLY="name ..." runs some of them. Stops at the first input that breaks something and keeps it in
# build-fuzz/found/NAME; the inputs that reached new code stay in build-fuzz/corpus/NAME for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang++ >/dev/null ||
  { echo "fuzz: clang++ is not installed, and only clang has libFuzzer (apt-get install clang)" >&2; exit 1; }
build=${FUZZ_BUILD:-build-fuzz}
seconds=${FUZZ_SECONDS:-600}
jobs=${FUZZ_JOBS:-1}
mkdir -p "$build"
cmake --preset fuzz -B "$build" >"$build/configure.log" 2>&1 || { cat "$build/configure.log" >&2; exit 1; }
ninja -C "$build" fuzzers
build=$(cd "$build" && pwd)
"$build/fuzz_seeds" "$build/seeds"

TMPDIR=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/sps-fuzz.XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# The timeout is of the wall clock: on a busy machine an input waits its turn. A frame of zstd may ask for 2 GiB of addresses (documents); what is used of them is held to the lower limit.
limits=(-timeout=60 -rss_limit_mb=1024 -malloc_limit_mb=3072)
names=${FUZZ_ONLY:-$(cd "$build/seeds" && ls)}

table=$(printf '%-16s %12s %10s %10s %10s' fuzzer executions coverage inputs bytes)
for name in $names; do
  corpus=$build/corpus/$name found=$build/found/$name log=$build/$name.log
  mkdir -p "$corpus" "$found"
  echo "fuzz: $name, $seconds s, $jobs at a time"
  pids=()
  for ((job = 1; job <= jobs; ++job)); do
    "$build/fuzz_$name" -max_total_time="$seconds" -max_len=16384 "${limits[@]}" -reload=1 -print_final_stats=1 \
      -dict=fuzz/dictionary -artifact_prefix="$found/" "$corpus" "$build/seeds/$name" >"$log.$job" 2>&1 &
    pids+=($!)
  done
  failed=
  for ((job = 1; job <= jobs; ++job)); do wait "${pids[job - 1]}" || failed=$log.$job; done
  if [ -n "$failed" ]; then
    tail -n 60 "$failed" >&2
    echo "fuzz: $name found an input, kept in $found; the whole report is $failed" >&2
    exit 1
  fi
  # Executions of all processes; coverage and corpus of the one that saw most.
  row=$(awk -v name="$name" '
    /number_of_executed_units/ { runs += $2 }
    / cov: / { for (i = 1; i < NF; ++i) if ($i == "cov:" && $(i + 1) > cov) cov = $(i + 1)
               for (i = 1; i < NF; ++i) if ($i == "corp:") { split($(i + 1), c, "/"); if (c[1] >= corp) { corp = c[1]; size = c[2] } } }
    END { printf "%-16s %12d %10d %10d %10s", name, runs, cov, corp, size }' "$log".*)
  table+=$'\n'$row
done
echo "$table"
