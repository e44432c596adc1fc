"""The demonstration's model and training step in PyTorch, for the side-by-side measurement of scripts/bench.sh.

Reads one JSON object a line from standard input, {"family": ..., "dtype": ..., "compile": bool, "steps": n, ...model
sizes}, times n steps (forward, backward, gradient norm with clipping, AdamW) and answers with one line
{"seconds": [...]}. Models stay alive between requests, so the caller can interleave them with ours.

Written the way one writes such a model in PyTorch: fused attention (scaled_dot_product_attention), one fused AdamW over
all tensors, autocast for bf16. The two-stream model runs the interleaved 2T sequence with its mask, as the papers'
reference does.
"""
import json
import math
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        x32 = x.float()
        return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, d, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(d), Norm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def forward(self, x, rope, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, rope):
    cos, sin = rope
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


class Model(nn.Module):
    def __init__(self, r):
        super().__init__()
        d, t = r["d_model"], r["context"]
        self.two = r["family"] == "sps"
        self.embed = nn.Embedding(r["vocab"], d)
        self.start = nn.Parameter(0.02 * torch.randn(1, d))
        self.blocks = nn.ModuleList(Block(d, r["heads"], r["d_ffn"]) for _ in range(r["layers"]))
        self.norm = Norm(d)
        nn.init.normal_(self.embed.weight, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)
        pos = torch.arange(t).repeat_interleave(2) if self.two else torch.arange(t)
        hd = d // r["heads"]
        angle = pos[:, None] * 10000 ** (-torch.arange(0, hd, 2) / hd)
        self.rope = (angle.cos(), angle.sin())
        self.mask = self.sps_mask(pos, r["window"]) if self.two else None

    @staticmethod
    def sps_mask(pos, w):
        slot = torch.arange(len(pos))
        back = pos[:, None] - pos[None, :]
        causal = slot[:, None] >= slot[None, :]
        return causal & ((slot[None, :] % 2 == 0) | (back <= w))

    def forward(self, ids, targets):
        x = self.embed(ids)
        if self.two:
            x = torch.stack((x, x + self.start), 2).flatten(1, 2)
        for block in self.blocks:
            x = block(x, self.rope, self.mask)
        if self.two:
            x = x[:, 1::2]
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Step:
    def __init__(self, r):
        torch.manual_seed(0)
        self.model = Model(r)
        self.forward = torch.compile(self.model) if r["compile"] else self.model
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-4,
            betas=(0.9, 0.95), fused=True)
        shape = (r["batch"], r["context"])
        self.ids = torch.randint(0, 2047, shape)
        self.targets = torch.randint(0, 2047, shape)
        self.bf16 = r["dtype"] == "bf16"
        for _ in range(3):
            self()

    def __call__(self):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.forward(self.ids, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began


def main():
    steps = {}
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        r = json.loads(line)
        key = json.dumps({k: v for k, v in r.items() if k != "steps"}, sort_keys=True)
        if key not in steps:
            steps[key] = Step(r)
        seconds = [steps[key]() for _ in range(r["steps"])]
        assert all(math.isfinite(s) for s in seconds)
        print(json.dumps({"seconds": seconds}), flush=True)


main()
