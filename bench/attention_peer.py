"""Attention on a GPU, ours and cuDNN's (through PyTorch) in turns; prints one JSON object.

Usage: attention_peer.py SPS [ROUNDS]
Causal, 4 sequences of 4096 tokens, 16 heads, bf16, head dimensions 64 and 128. Every round runs `sps bench attention` once
and then PyTorch's cuDNN backend: ten calls between two looks at the clock, after a warm-up. Medians over the rounds.
"""
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sps, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
BATCH, LENGTH, HEADS, CALLS = 4, 4096, 16, 10


def seconds(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / CALLS


def cudnn(dim):
    q, k, v, d_out = (torch.randn(BATCH, HEADS, LENGTH, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attention = torch.nn.functional.scaled_dot_product_attention
        with torch.no_grad():
            forward = seconds(lambda: attention(q, k, v, is_causal=True))
        out = attention(q, k, v, is_causal=True)
        backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    return forward * 1e3, backward * 1e3


result = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "rounds": rounds}
for dim in (64, 128):
    ours, theirs = [], []
    for _ in range(rounds):
        out = subprocess.run([sps, "bench", "attention", "--device", "cuda", "--head-dim", str(dim), "--json"], check=True,
                             capture_output=True, text=True).stdout
        ours.append(json.loads(out))
        theirs.append(cudnn(dim))
    row = {"cudnn": {"forward_ms": statistics.median(t[0] for t in theirs),
                     "backward_ms": statistics.median(t[1] for t in theirs)}}
    for family in ("standard", "sps", "free_pause"):
        row[family] = {key: statistics.median(o[family][key] for o in ours) for key in ("forward_ms", "backward_ms")}
    total = {name: r["forward_ms"] + r["backward_ms"] for name, r in row.items()}
    row["standard_over_cudnn"] = total["cudnn"] / total["standard"]
    row["standard_over_cudnn_forward"] = row["cudnn"]["forward_ms"] / row["standard"]["forward_ms"]
    row["standard_over_cudnn_backward"] = row["cudnn"]["backward_ms"] / row["standard"]["backward_ms"]
    row["sps_cost"], row["free_pause_cost"] = total["sps"] / total["standard"], total["free_pause"] / total["standard"]
    result[str(dim)] = row
print(json.dumps(result))
