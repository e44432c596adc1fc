"""Decoding of standard models on a GPU, ours and PyTorch's in turns; prints one JSON object.

Usage: decode_peer.py SPS [--recipes m_standard_20b,xl_standard_20b] [--batches 1,16] [--prompt 1024] [--tokens 64]
                          [--rounds 2] [--limit 100]
       decode_peer.py --check

The peer is the fastest decoder that PyTorch made of the same model here: bf16 weights (random), keys and values in
place for the whole text, the most likely id fed back on the device, and every step one CUDA graph. Several ways are
tried for `limit` seconds: plain kernels and compiled ones, attention by scaled_dot_product_attention, by two products
or by flex_attention, products and launches chosen by measuring. (The whole step left to "reduce-overhead" was slower,
and takes memory from graphs that were recorded before.) A way whose logits are not those of the plain kernels is left
out. Then ours and the best way take turns. A step has ended when the host knows its ids, as in `sps bench decode`;
`free` is the peer's time when the host looks at none. Medians.

--check, on any machine: step by step gives the logits of all positions at once.
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import standard_model

WARM, LOOSE = 3, 0.1  # runs before a graph is recorded; what bf16 may move logits by, of the largest


def rotate(x, cos, sin):
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # of each pair; the sines carry the sign
    return (x.float() * cos + swapped.float() * sin).type_as(x)


def by_sdpa(q, k, v, mask, pos):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def by_products(q, k, v, mask, pos):
    b, heads, rows, dim = q.shape
    q = q.reshape(b, k.shape[1], -1, dim)  # a group's heads read the same keys
    scores = (q @ k.transpose(-1, -2)).float() * dim**-0.5 + mask
    return (scores.softmax(-1).type_as(v) @ v).reshape(b, heads, rows, dim)


def by_flex(q, k, v, mask, pos):
    from torch.nn.attention.flex_attention import flex_attention

    def visible(score, b, h, row, key):
        return torch.where(key <= pos[0], score, -float("inf"))

    return flex_attention(q, k, v, score_mod=visible, enable_gqa=q.shape[1] != k.shape[1])


ATTENTION = {"sdpa": by_sdpa, "products": by_products, "flex": by_flex}


def make_block(c, attention):
    """A block: what the block before it left to be added comes along, so that sum and norm are one kernel."""
    heads, kv_heads, dim, eps = c["heads"], c["kv_heads"], c["head_dim"], c["norm_eps"]

    def block(x, delta, w, k_cache, v_cache, cos, sin, mask, pos):
        x = x + delta
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], w["norm1"], eps), w["qkv"])
        q, k, v = qkv.unflatten(-1, (-1, dim)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
        if c["qk_norm"]:
            q, k = F.rms_norm(q, (dim,), w["q_norm"], eps), F.rms_norm(k, (dim,), w["k_norm"], eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if pos is None:  # the prompt
            k_cache[:, :, :k.shape[2]], v_cache[:, :, :k.shape[2]] = k, v
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        else:
            k_cache[:, :, pos], v_cache[:, :, pos] = k, v
            o = attention(q, k_cache, v_cache, mask, pos)
        x = x + F.linear(o.transpose(1, 2).flatten(2), w["out"])
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], w["norm2"], eps), w["gate_up"]).chunk(2, -1)
        return x, F.linear(F.silu(gate) * up, w["down"])

    return block


class Weights:
    def __init__(self, c, device, dtype):
        torch.manual_seed(0)
        d, dim = c["d_model"], c["head_dim"]

        def matrix(*shape):
            return (0.02 * torch.randn(*shape, device=device)).to(dtype)

        def ones(n):
            return torch.ones(n, device=device, dtype=dtype)

        self.config = c
        self.embed, self.norm = matrix(c["vocab"], d), ones(d)
        self.blocks = [
            {"norm1": ones(d), "qkv": matrix((c["heads"] + 2 * c["kv_heads"]) * dim, d), "q_norm": ones(dim),
             "k_norm": ones(dim), "out": matrix(d, c["heads"] * dim), "norm2": ones(d), "gate_up": matrix(2 * ffn, d),
             "down": matrix(d, ffn)} for ffn in c["d_ffn"]]


class Decoder:
    """The texts of a batch: keys and values, the ids to feed next, the position they stand at."""

    def __init__(self, weights, batch, prompt, tokens):
        self.w, c = weights, weights.config
        like = {"device": weights.embed.device, "dtype": weights.embed.dtype}
        shape = (batch, c["kv_heads"], prompt + tokens, c["head_dim"])
        self.k = [torch.zeros(shape, **like) for _ in weights.blocks]
        self.v = [torch.zeros(shape, **like) for _ in weights.blocks]
        self.place = torch.arange(prompt + tokens, device=like["device"])
        angle = self.place[:, None] * c["rope_theta"] ** (
            -torch.arange(0, c["head_dim"], 2, device=like["device"]) / c["head_dim"])
        self.cos = angle.cos().repeat_interleave(2, -1)
        self.sin = torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)
        self.hidden = torch.zeros((), **like), torch.full((), -float("inf"), **like)
        self.pos = torch.full((1,), prompt, device=like["device"])
        self.ids = torch.zeros((batch, 1), dtype=torch.long, device=like["device"])
        self.logits = torch.zeros((batch, c["vocab"]), **like)
        self.attend("sdpa")

    def attend(self, attention):
        self.block = make_block(self.w.config, ATTENTION[attention])

    def head(self, x, delta):
        x = x[:, -1:] + delta[:, -1:]
        return F.linear(F.rms_norm(x, x.shape[-1:], self.w.norm, self.w.config["norm_eps"]), self.w.embed)[:, 0]

    def read_prompt(self, ids):
        """Leaves keys and values of all positions behind; logits of the last one."""
        x = F.embedding(ids, self.w.embed)
        delta = torch.zeros_like(x)
        cos, sin = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        for w, k, v in zip(self.w.blocks, self.k, self.v):
            x, delta = make_block(self.w.config, None)(x, delta, w, k, v, cos, sin, None, None)
        return self.head(x, delta)

    def begin(self, ids, pos):
        self.ids.copy_(ids), self.pos.fill_(pos)

    def step(self):
        x = F.embedding(self.ids, self.w.embed)
        delta = torch.zeros_like(x)
        cos, sin = self.cos[self.pos], self.sin[self.pos]
        mask = torch.where(self.place <= self.pos, *self.hidden)[None, None, None]
        for w, k, v in zip(self.w.blocks, self.k, self.v):
            x, delta = self.block(x, delta, w, k, v, cos, sin, mask, self.pos)
        self.logits.copy_(self.head(x, delta))
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        self.pos.add_(1)

    def tensors(self):
        yield from (self.w.embed, self.w.norm, *self.k, *self.v, self.place, self.cos, self.sin, *self.hidden, self.pos,
                    self.ids, self.logits)
        for w in self.w.blocks:
            yield from w.values()


def recorded(begin, step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            begin(), step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Peer:
    """One model and batch: the ways that were tried, and the best."""

    def __init__(self, weights, recipe, batch, args):
        self.recipe, self.batch, self.args = recipe, batch, args
        self.decoder = Decoder(weights, batch, args.prompt, args.tokens)
        vocab = weights.config["vocab"]
        self.first = torch.randint(vocab, (batch, 1), device="cuda")
        self.decoder.read_prompt(torch.randint(vocab, (batch, args.prompt), device="cuda"))
        self.want, self.ways, self.best, self.run = None, {}, None, None

    def begin(self):
        self.decoder.begin(self.first, self.args.prompt)

    def look(self):
        """Milliseconds of each step, of which the host takes the ids."""
        self.begin()
        times = []
        torch.cuda.synchronize()
        for _ in range(self.args.tokens):
            began = time.perf_counter()
            self.run()
            self.decoder.ids.tolist()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    def free(self):
        self.begin()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(self.args.tokens):
            self.run()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / self.args.tokens

    def attention_so_far(self):
        compiled = {name: way["ms"] for name, way in self.ways.items() if name.startswith("compiled") and "ms" in way}
        return min(compiled, key=compiled.get).split("/")[1] if compiled else "sdpa"

    def attempt(self, name):
        how, attention = name.split("/")
        attention = self.attention_so_far() if attention == "best" else attention
        kept, began = self.run, time.perf_counter()
        try:
            self.decoder.attend(attention)
            self.run = self.made(how)
            self.begin()
            self.run()
            torch.cuda.synchronize()
            logits = self.decoder.logits.float().clone()
            self.want = logits if self.want is None else self.want
            error = float((logits - self.want).abs().max() / self.want.abs().max())
            if not error < LOOSE:
                raise RuntimeError(f"logits differ by {error:.3f} of the largest")
            self.look()
            way = {"ms": self.look(), "attention": attention, "seconds": time.perf_counter() - began}
        except Exception as e:  # a way that PyTorch cannot go here
            way = {"error": str(e).strip().split("\n")[0][:200]}
        self.ways[name] = way
        if "ms" in way and (self.best is None or way["ms"] < self.ways[self.best]["ms"]):
            self.best = name
        else:
            self.run = kept

    def made(self, how):
        decoder = self.decoder
        if how == "plain":
            return recorded(self.begin, decoder.step)
        mode = {"compiled": "default", "measured": "max-autotune-no-cudagraphs"}[how]
        with torch._inductor.config.patch(coordinate_descent_tuning=how == "measured"):
            decoder.block = torch.compile(decoder.block, mode=mode, dynamic=False)
            return recorded(self.begin, decoder.step)


# The most promising first.
WAYS = ("plain/sdpa", "compiled/sdpa", "compiled/flex", "measured/best", "compiled/products", "plain/products")


def measure(args):
    import torch._dynamo
    import torch._inductor.config
    began = time.perf_counter()
    for limit in ("recompile_limit", "cache_size_limit"):  # one block, compiled for every model, batch and way
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 256)
    recipes, batches = args.recipes.split(","), [int(b) for b in args.batches.split(",")]
    weights = {r: Weights(standard_model.config(args.sps, r), "cuda", torch.bfloat16) for r in recipes}
    peers = [Peer(weights[r], r, b, args) for r in recipes for b in batches]
    for way in WAYS:
        for peer in peers:
            if time.perf_counter() - began > args.limit:
                peer.ways[way] = {"skipped": "no time left"}
            else:
                peer.attempt(way)
                print(peer.recipe, peer.batch, way, peer.ways[way], file=sys.stderr, flush=True)
    mine, theirs, free = {}, {}, {}
    for _ in range(args.rounds):
        for recipe in recipes:
            for batch, ms in standard_model.decode(args.sps, recipe, args.batches, args.prompt, args.tokens)[1].items():
                mine.setdefault((recipe, batch), []).append(ms)
        for peer in peers:
            theirs.setdefault((peer.recipe, peer.batch), []).append(peer.look())
            free.setdefault((peer.recipe, peer.batch), []).append(peer.free())
    rows = []
    for peer in peers:
        key = peer.recipe, peer.batch
        ms, peer_ms, free_ms = (statistics.median(of[key]) for of in (mine, theirs, free))
        rows.append({"recipe": peer.recipe, "batch": peer.batch, "ms": ms, "peer_ms": peer_ms, "peer_free_ms": free_ms,
                     "peer_over_ours": peer_ms / ms, "peer_free_over_ours": free_ms / ms, "way": peer.best,
                     "ways": peer.ways})
    print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "prompt": args.prompt,
                      "tokens": args.tokens, "rounds": args.rounds, "results": rows}))


def check():
    base = {"d_model": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "d_ffn": [96, 96], "vocab": 97, "norm_eps": 1e-6,
            "rope_theta": 10000.0, "qk_norm": False}
    for change in ({}, {"kv_heads": 2, "qk_norm": True}):
        weights = Weights(base | change, "cpu", torch.float32)
        for w in weights.blocks:  # lively: attention must matter
            w["qkv"].mul_(20), w["out"].mul_(5)
        ids = torch.randint(97, (3, 7))
        for attention in ("sdpa", "products"):
            decoder, whole = (Decoder(weights, 3, 7, 6) for _ in range(2))
            decoder.attend(attention)
            text = torch.cat((ids, decoder.read_prompt(ids).argmax(-1, keepdim=True)), 1)
            decoder.begin(text[:, -1:], 7)
            for _ in range(5):
                decoder.step()
                want = whole.read_prompt(text)
                error = float((decoder.logits - want).abs().max() / want.abs().max())
                assert error < 1e-4, (change, attention, error)
                text = torch.cat((text, decoder.ids), 1)
            assert float((whole.read_prompt(text) - want).abs().max()) > 1e-2  # not one answer to everything
    print("decode_peer.py: step by step as all at once")


parser = argparse.ArgumentParser()
parser.add_argument("sps", nargs="?")
parser.add_argument("--recipes", default="m_standard_20b,xl_standard_20b")
parser.add_argument("--batches", default="1,16")
parser.add_argument("--prompt", type=int, default=1024)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--limit", type=float, default=100)
parser.add_argument("--check", action="store_true")
arguments = parser.parse_args()
with torch.no_grad():
    check() if arguments.check else measure(arguments)
