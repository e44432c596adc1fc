#!/usr/bin/env bash
# Builds for the GPU of this machine and runs what needs one:
#   scripts/gpu.sh [build] [test] [sanitize] [bench] [infer] [prefill] [decode-peer]
# Without arguments: build, test, bench. Logs and JSON go to GPU_OUT (build-gpu/results); one short table comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${GPU_BUILD:-build-gpu}
out=${GPU_OUT:-$build/results}
phases=${*:-build test bench}
mkdir -p "$out"
# The float64 oracle of the models wants a Python with PyTorch.
SPS_TORCH_PYTHON=${SPS_TORCH_PYTHON:-$(python3 -c "import torch" 2>/dev/null && command -v python3)}
[ -n "$SPS_TORCH_PYTHON" ] && export SPS_TORCH_PYTHON
started=$SECONDS
summary=()
note() { summary+=("$*"); echo "gpu: $* ($((SECONDS - started)) s)"; }

rooms=(rows embedding rmsnorm rope swiglu gates fold_gain adamw clip linear swiglu_linear linear_rmsnorm cross_entropy attention
  decode_attention decode_linear decode_program sample)
programs=(sps_tensor_test)
for room in "${rooms[@]}"; do programs+=("sps_ops_${room}_test"); done
programs+=(sps_optim_test sps_model_test model_torch_test sps_train_test resume_test sps_score_test sps_infer_test convert_test)
# The models' references take five minutes of one core, the attention's a minute: such programs run in parts.
declare -A shards=([sps_model_test]=6 [sps_ops_attention_test]=3 [sps_infer_test]=6 [sps_ops_decode_attention_test]=6)

if [[ " $phases " == *" build "* ]]; then
  generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DSPS_BENCHES=OFF -DSPS_WERROR=OFF \
    ${GPU_CMAKE:-} -DCMAKE_CUDA_ARCHITECTURES="${GPU_ARCH:-90a}" >"$out/configure.log" 2>&1 &&
    cmake --build "$build" --parallel "$(nproc)" --target ${GPU_TARGETS:-sps "${programs[@]}"} >"$out/build.log" 2>&1
  status=$?
  if [ $status != 0 ]; then
    grep -E "error|FAILED|CMake Error" "$out/configure.log" "$out/build.log" | head -n 40
    note "build failed"
    exit 1
  fi
  note "built"
fi

# Each program by itself, so that one that hangs or dies takes no other with it; all at once, since most of the
# time goes into the references on the CPU.
run_tests() { # name, prefix command...
  local kind=$1 failed=0 program shard log status pids=() logs=()
  shift
  for program in ${GPU_PROGRAMS:-"${programs[@]}"}; do
    local count=${shards[$program]:-1}
    for ((shard = 0; shard < count; ++shard)); do
      log=$out/$kind-$program-$shard.log
      OMP_NUM_THREADS=1 GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$shard \
        timeout "${GPU_TIMEOUT:-300}" "$@" "$build/$program" ${GPU_FILTER:+--gtest_filter=$GPU_FILTER} >"$log" 2>&1 &
      pids+=($!)
      logs+=("$log")
    done
  done
  for program in "${!pids[@]}"; do
    log=${logs[program]}
    wait "${pids[program]}"
    status=$?
    if [ $status != 0 ]; then
      failed=$((failed + 1))
      note "$(basename "$log" .log): status $status, $(grep -c '^\[  FAILED  \] .*ms)' "$log") tests failed"
      grep -E "Failure|ERROR|CUDA|error|terminate|what|=========" -A6 "$log" | head -n "${GPU_LINES:-24}"
    fi
  done
  note "$kind: $failed of ${#pids[@]} runs failed, $(cat "${logs[@]}" | grep -c '^\[       OK') tests passed," \
    "$(cat "${logs[@]}" | grep -c '^\[  SKIPPED ] .*ms)') skipped"
}
if [[ " $phases " == *" test "* ]]; then
  # What tests look for in ../shared of the tree that they were built in (stories260K, for one).
  if [ -n "${GPU_SHARED:-}" ] && [ ! -e ../shared ]; then ln -s "$(realpath "$GPU_SHARED")" ../shared; fi
  run_tests test
fi
if [[ " $phases " == *" sanitize "* ]]; then
  # Death tests fork, which a process under a tool does not survive; thousands of launches that only repeat take an
  # hour there. racecheck also reports cuBLAS's own kernels (nvjet), and fails when told to look at ours alone: what
  # names sps is ours. Over attention it wants a build of its own: GPU_CMAKE=-DSPS_RACECHECK=ON.
  for tool in ${GPU_TOOLS:-memcheck racecheck}; do
    options=(--tool "$tool" --error-exitcode 9)
    filter='-*DeathTest*'
    if [ "$tool" = racecheck ]; then
      filter='-*DeathTest*:*VanishingMoments*:*SplittingKeys*:*SkippingTiles*:*ShowsExactly*:*ThreadsChange*:*EveryHeadSize*:*WindowsAsLong*'
    fi
    GPU_FILTER=${GPU_FILTER:-$filter} \
      GPU_PROGRAMS=${GPU_SANITIZE:-$(for room in "${rooms[@]}"; do echo "sps_ops_${room}_test"; done)} \
      run_tests "$tool" compute-sanitizer "${options[@]}"
  done
fi
if [[ " $phases " == *" bench "* ]]; then
  "$build/sps" bench gemm --device cuda --json >"$out/gemm.json" && note "ceilings $(cat "$out/gemm.json")"
  if [ -n "$SPS_TORCH_PYTHON" ]; then
    "$SPS_TORCH_PYTHON" bench/attention_peer.py "$build/sps" >"$out/attention.json" &&
      note "attention $(python3 -c "
import json, sys
r = json.load(open(sys.argv[1]))
print('; '.join('head dim %s: %.0f %% of cuDNN (forward %.0f, backward %.0f), sps(64) %.2fx, free_pause %.2fx' % (
    d, 100 * r[d]['standard_over_cudnn'], 100 * r[d]['standard_over_cudnn_forward'],
    100 * r[d]['standard_over_cudnn_backward'], r[d]['sps_cost'], r[d]['free_pause_cost']) for d in ('64', '128')))" \
        "$out/attention.json")"
  else
    for dim in 64 128; do
      "$build/sps" bench attention --device cuda --head-dim $dim --json >"$out/attention-$dim.json" &&
        note "attention $(cat "$out/attention-$dim.json")"
    done
  fi
  # Recipe, micro-batch and perhaps how much is made again of each row, as in the comparison that docs/benchmarks.md
  # makes.
  for row in ${GPU_ROWS:-xs_standard_20b:6 xs_sps_w64_20b:6 s_standard_20b:6 s_sps_w64_20b:6 m_standard_20b:6 m_sps_w64_20b:6 \
    m_free_pause_20b:6 m_free_pause_pooled_20b:6 m_sequential_12+12_20b:6 xl_standard_20b:3 xl_sps_w64_20b:3 \
    xl_free_pause_20b:3 xl_free_pause_pooled_20b:3 xl_sequential_24+24_20b:3 xl_sps_w64_20b:3:block}; do
    IFS=: read -r recipe micro recompute <<<"$row"
    name=$recipe${recompute:+-$recompute}
    if timeout 90 "$build/sps" bench train "$recipe" train.micro_batch="$micro" train.global_batch="$micro" \
      train.recompute="${recompute:-none}" model.vocab=50304 model.eot=50256 run.device=cuda \
      --document "${GPU_DOCUMENT:-800}" --no-ceiling --steps "${GPU_STEPS:-8}" --json \
      >"$out/train-$name.json" 2>"$out/train-$name.log"; then
      note "$name: $(python3 -c "
import json, sys
r = json.load(open(sys.argv[1]))
print('%.1f ms, %.0f tokens/s, %.0f TFLOP/s required, %.1f GiB used, %.1f forecast' % (
    r['seconds_per_step'] * 1e3, r['tokens_per_second'], r['required_gflops'] / 1e3, r['memory_used_bytes'] / 2**30,
    r['memory_forecast_bytes'] / 2**30))" \
        "$out/train-$name.json")"
    else
      note "$name failed: $(tail -n 1 "$out/train-$name.log")"
    fi
  done
fi
# Generation. GPU_OPTIONS holds more for sps bench (--step-rows 4096).
generation() { # what, scale, option...
  local what=$1 scale=$2
  shift 2
  if timeout "${GPU_TIMEOUT:-300}" "$build/sps" -q bench "$what" "${scale}_standard_20b" "${scale}_sps_w64_20b" \
    "${scale}_free_pause_20b" --device cuda "$@" ${GPU_OPTIONS:-} --json "$out/$what-$scale.json" \
    >"$out/$what-$scale.log" 2>&1; then
    note "$what $scale"
  else
    note "$what $scale failed: $(tail -n 1 "$out/$what-$scale.log")"
    rm -f "$out/$what-$scale.json"
  fi
}
if [[ " $phases " == *" infer "* ]]; then
  # The published workload: prompts of 1024, 3072 new tokens, 16 texts. Other batches go less far, 64 texts a quarter of
  # a thousand tokens: all of it in about three minutes.
  for scale in ${GPU_SCALES:-xs s m xl}; do
    generation decode "$scale" --batch "${GPU_BATCHES:-1,4,16,64}" --tokens "${GPU_TOKENS:-1024,1024,3072,256}" \
      --rounds "${GPU_ROUNDS:-1}"
  done
  python3 bench/gpu_inference.py "$out" 2>"$out/inference.txt" >"$out/inference.json"
fi
if [[ " $phases " == *" prefill "* ]]; then
  for scale in ${GPU_SCALES:-xs m xl}; do generation prefill "$scale" --batch "${GPU_BATCHES:-1,16}"; done
fi
if [[ " $phases " == *" decode-peer "* ]]; then
  if [ -z "$SPS_TORCH_PYTHON" ]; then
    note "decode-peer: no Python with PyTorch here"
  elif "$SPS_TORCH_PYTHON" bench/decode_peer.py "$build/sps" ${GPU_PEER:-} >"$out/decode-peer.json" \
    2>"$out/decode-peer.log"; then
    note "decode-peer: $(python3 -c "
import json, sys
for r in json.load(open(sys.argv[1]))['results']:
    print('%(recipe)s x%(batch)d %(ms).3f ms, PyTorch %(peer_ms).3f (%(way)s; unobserved %(peer_free_ms).3f), %(peer_over_ours).2fx' %
          r, end='; ')" "$out/decode-peer.json")"
  else
    note "decode-peer failed: $(tail -n 1 "$out/decode-peer.log")"
  fi
fi
printf '%s\n' "-----" "${summary[@]}"
if [[ " $phases " == *" infer "* ]]; then cat "$out/inference.txt"; fi
if [[ " $phases " == *" prefill "* ]]; then grep -hv ' runs/s' "$out"/prefill-*.log; fi
