"""Ours and PyTorch's training step of the demonstration's models, interleaved on this machine; JSON on standard output.

Usage: side_by_side.py PYTHON_WITH_TORCH ROUNDS OUT.json
Every round runs a few steps of ours (`sps bench train`, which also measures the matrix-product ceiling), of eager
PyTorch and of compiled PyTorch. Medians over all steps of all rounds; the ratio is taken against the faster of the two.
"""
import json
import os
import platform
import statistics
import subprocess
import sys

python, rounds, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SIZES = dict(layers=4, d_model=256, heads=4, d_ffn=768, vocab=2112, context=256, batch=16, window=16)
FAMILIES = {"standard": "demo_standard_1m", "sps": "demo_sps_w16_tok_1m"}


def sps(recipe, dtype):
    cmd = ["build/sps", "bench", "train", recipe, f"run.dtype={dtype}", f"model.vocab={SIZES['vocab']}", "model.eot=2047",
           "--steps", "5", "--json"]
    return json.loads(subprocess.run(cmd, check=True, capture_output=True, text=True).stdout)


def cpu():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "unknown")


def git(*args):
    return subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()


peer = None
if python != "none":
    peer = subprocess.Popen([python, "bench/torch_step.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    hello = json.loads(peer.stdout.readline())


def torch_steps(family, dtype, compiled):
    request = dict(SIZES, family=family, dtype=dtype, compile=compiled, steps=5)
    peer.stdin.write(json.dumps(request) + "\n")
    peer.stdin.flush()
    return json.loads(peer.stdout.readline())["seconds"]


dtypes = ["f32"]
if json.loads(subprocess.run(["build/sps", "bench", "gemm", "--json"], check=True, capture_output=True,
                             text=True).stdout).get("bf16_gflops"):
    dtypes.append("bf16")
result = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")), "cpu": cpu(),
          "cores": os.cpu_count(), "system": platform.platform(), "tokens_per_step": 4096, "rounds": rounds, "rows": []}
if peer:
    result["torch"] = hello["torch"]
for dtype in dtypes:
    for family, recipe in FAMILIES.items():
        ours, eager, compiled, ceiling, executed = [], [], [], [], 0
        for _ in range(rounds):
            r = sps(recipe, dtype)
            ours.append(r["seconds_per_step"])
            ceiling.append(r["ceiling_gflops"])
            executed = r["executed_gflops"] * r["seconds_per_step"]
            if peer:
                eager += torch_steps(family, dtype, False)
                compiled += torch_steps(family, dtype, True)
        row = {"family": family, "dtype": dtype, "ms": statistics.median(ours) * 1e3, "ms_low": min(ours) * 1e3,
               "ms_high": max(ours) * 1e3, "ceiling_gflops": max(ceiling),
               "of_ceiling": executed / statistics.median(ours) / max(ceiling)}
        if peer:
            row["torch_eager_ms"] = statistics.median(eager) * 1e3
            row["torch_compiled_ms"] = statistics.median(compiled) * 1e3
            row["speedup"] = min(row["torch_eager_ms"], row["torch_compiled_ms"]) / row["ms"]
        result["rows"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
with open(out, "w") as f:
    json.dump(result, f, indent=1)
    f.write("\n")
print(f"{'family':<10} {'dtype':<5} {'ms/step':>8} {'of ceiling':>10} {'torch eager':>12} {'compiled':>9} {'speed-up':>9}")
for row in result["rows"]:
    peer_cols = (f"{row['torch_eager_ms']:>9.1f} ms {row['torch_compiled_ms']:>6.1f} ms {row['speedup']:>8.2f}x"
                 if peer else "  (no PyTorch)")
    print(f"{row['family']:<10} {row['dtype']:<5} {row['ms']:>8.1f} {row['of_ceiling']:>9.0%} {peer_cols}")
