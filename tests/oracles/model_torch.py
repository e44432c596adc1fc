"""Loss and every gradient of the models in FOLDER (tests/model_torch_test.cpp writes them) against PyTorch in float64.

Usage: model_torch.py FOLDER
Each model is built again from the formulas: dense masks, one softmax over all keys that a row sees, gradients by
autograd. Prints a line a model; at the first disagreement a sentence that names model and tensor, and exit status 1.
"""
import glob
import json
import math
import os
import sys

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "I32": torch.int32}
# Relative distances that are allowed: of the loss, and of a gradient. float64: a few thousand roundings of 1e-16.
# float32: sums of some hundred terms. bfloat16: activations of 8 bits through two or three blocks. How much the formulas
# magnify roundings differs a lot from model to model, so its gradients may be SHAKEN times as far away as weights that
# are moved by at most a rounding of theirs (a row has a few dozen roundings, and errors add up like their root). A rare
# input makes a row nearly zero before a norm: the middle one of the inputs counts. A wrong formula shows in all.
TOLERANCES = {"f64": (1e-9, 1e-9), "f32": (1e-5, 1e-4), "bf16": (1e-2, None)}
SHAKEN = 5


def read_safetensors(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = bytearray(f.read())
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        count = (end - begin) // dtype.itemsize
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=begin).reshape(entry["shape"])
    return metadata, tensors


def float32(number):
    """The program's operations take the attention scale and the epsilon of the norms as float32 numbers."""
    return torch.tensor(number, dtype=torch.float32).item()


def in_band(text, steps):
    """Which steps back, query minus key, a band "lo:hi" shows."""
    if text == "none":
        return torch.zeros_like(steps, dtype=torch.bool)
    lo, hi = text.split(":")
    return (steps >= int(lo)) & (steps <= (math.inf if hi == "inf" else int(hi)))


def rms(x, epsilon):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon)


class Network:
    """Streams are [batch, length, width], heads [batch, length, head, head_dim]."""

    def __init__(self, keys, weights):
        self.keys, self.weights = keys, weights
        self.shared = {"all": "attention,norms,ffn"}.get(keys["share"], keys["share"]).split(",")
        self.pooled = keys["ffn"] == "pooled"
        self.together = self.pooled or keys["band"]["xp"] != "none"
        self.pred_writes_keys = keys["band"]["xp"] != "none" or keys["band"]["pp"] != "none"
        self.epsilon = float32(keys["norm_eps"])
        state, pred, level = keys["state_layers"], keys["pred_layers"], keys["read"]["level"]
        if level in ("same", "post", "top", "final"):
            first = {"same": 0, "post": 1, "top": state - pred + 1, "final": state}[level]
            self.levels = [first if level == "final" else first + i for i in range(pred)]
        else:
            self.levels = [int(part) for part in level.split(",")]

    def weight(self, stream, block, kind, name):
        """A tensor of a block; the prediction stream takes the state's where this kind is shared."""
        if kind in self.shared or (kind == "ffn" and self.pooled):
            stream = "state"
        return self.weights[f"{stream}.{block}.{name}"]

    def norm(self, x, gain):
        return rms(x, self.epsilon) * gain

    def is_full(self, block):
        every = self.keys["full_attention_every"]
        return self.keys["sliding_window"] == 0 or (every > 0 and (block + 1) % every == 0)

    def rotated(self, x, block):
        """(a, b) -> (a cos - b sin, a sin + b cos) by position * base^(-2m / width), m the number of the pair."""
        width = head_dim = self.keys["head_dim"]
        if self.is_full(block):
            width = max(2, 2 * math.floor(head_dim * self.keys["rope_fraction"] / 2 + 0.5))
        exponents = -2 * torch.arange(width // 2, dtype=torch.float64) / width
        angles = self.positions[:, :, None, None] * self.keys["rope_theta"] ** exponents
        adjacent = self.keys["rope_pairs"] == "adjacent"
        part, rest = x[..., :width], x[..., width:]
        a, b = (part[..., 0::2], part[..., 1::2]) if adjacent else part.chunk(2, -1)
        turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.cat([torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1), rest], -1)

    def heads(self, x, matrix, gain, block):
        """Projected to heads, normed if they have a gain, rotated."""
        y = (x @ matrix.T).unflatten(-1, (-1, self.keys["head_dim"]))
        return self.rotated(y if gain is None else self.norm(y, gain), block)

    def gain(self, name):
        return self.weights[name] if self.keys["qk_norm"] else None

    def query(self, stream, block, n):
        rows = self.weight(stream, block, "attention", "out").shape[1]
        owner = "state" if "attention" in self.shared else stream
        fused = owner == "state" or self.pred_writes_keys
        matrix = self.weights[f"{owner}.{block}." + ("qkv" if fused else "q")]
        return self.heads(n, matrix[:rows], self.gain(f"{owner}.{block}.q_norm"), block)

    def keys_and_values(self, n, matrix, gain, block):
        """Rows of `matrix`: all keys, then all values."""
        k, v = matrix.chunk(2)
        return self.heads(n, k, gain, block), (n @ v.T).unflatten(-1, (-1, self.keys["head_dim"]))

    def own_keys(self, stream, block, x):
        """What a block's own attention may read of its stream."""
        owner = "state" if "attention" in self.shared else stream
        matrix = self.weights[f"{owner}.{block}.qkv"]
        rows = self.weights[f"{owner}.{block}.out"].shape[1]
        n = self.norm(x, self.weight(stream, block, "norms", "norm1"))
        return self.keys_and_values(n, matrix[rows:], self.gain(f"{owner}.{block}.k_norm"), block)

    def read_keys(self, block, state_levels, state_keys):
        """What prediction block `block` reads of the state."""
        level = self.levels[block]
        if self.keys["read"]["kv"] == "own":
            n = self.norm(state_levels[level], self.weights[f"pred.{block}.read_norm"])
            if "attention" not in self.shared:
                gain = self.gain(f"pred.{block}.read_k_norm")
                return self.keys_and_values(n, self.weights[f"pred.{block}.read_kv"], gain, block)
            rows = self.weights[f"state.{block}.out"].shape[1]
            matrix = self.weights[f"state.{block}.qkv"][rows:]
            return self.keys_and_values(n, matrix, self.gain(f"state.{block}.k_norm"), block)
        if level < self.keys["state_layers"]:
            return state_keys[level]
        n = self.norm(state_levels[level], self.weights["read_head.norm"])
        return self.keys_and_values(n, self.weights["read_head.kv"], self.gain("read_head.k_norm"), block)

    def attention(self, stream, block, x, sets):
        """The residual x after attention to `sets` of (keys and values, band, are they the state's?)."""
        q = self.query(stream, block, self.norm(x, self.weight(stream, block, "norms", "norm1")))
        ks, vs, masks = [], [], []
        for (k, v), band, of_state in sets:
            mask = in_band(band, self.steps) & self.same_document
            if of_state and not self.is_full(block):
                mask = mask & (self.steps < self.keys["sliding_window"])
            ks.append(k), vs.append(v), masks.append(mask)
        group = self.keys["heads"] // self.keys["kv_heads"]
        k = torch.cat(ks, 1).repeat_interleave(group, 2)
        v = torch.cat(vs, 1).repeat_interleave(group, 2)
        mask = torch.cat(masks, -1)
        assert mask.any(-1).all(), "a row sees nothing"
        scores = torch.einsum("bihc,bjhc->bhij", q, k) * float32(self.keys["head_dim"] ** -0.5)
        p = torch.softmax(scores.masked_fill(~mask[:, None], -math.inf), -1)
        o = torch.einsum("bhij,bjhc->bihc", p, v).flatten(-2)
        return x + o @ self.weight(stream, block, "attention", "out").T

    def swiglu(self, stream, block, n):
        gate, up = (n @ self.weight(stream, block, "ffn", "gate_up").T).chunk(2, -1)
        return (gate * torch.sigmoid(gate) * up) @ self.weight(stream, block, "ffn", "down").T

    def feed_forward(self, stream, block, x):
        widths = self.keys["d_ffn" if stream == "state" else "pred_ffn"]
        if widths[block] == 0:
            return x
        return x + self.swiglu(stream, block, self.norm(x, self.weight(stream, block, "norms", "norm2")))

    def pooled_feed_forward(self, block, x, p):
        a = self.norm(x, self.weight("state", block, "norms", "norm2"))
        b = self.norm(p, self.weight("pred", block, "norms", "norm2"))
        gate = {name: self.weights[f"pool.{block}.{name}"] for name in ("in", "state", "pred")}
        g = torch.sigmoid(torch.cat([a, b], -1) @ gate["in"].T)
        f = self.swiglu("state", block, g * a + (1 - g) * b)
        return x + torch.sigmoid(a @ gate["state"].T) * f, p + torch.sigmoid(b @ gate["pred"].T) * f

    def prediction_start(self, tokens, state):
        kind = self.keys["pred_input"]
        if kind == "state":
            return state
        if kind == "table":
            return self.weights["pred_embed"][tokens]
        if kind == "row":
            return self.weights["embed"][torch.full_like(tokens, self.keys["pred_row"])]
        vector = self.weights["pred_input"].expand(*tokens.shape, -1)
        return vector + self.weights["embed"][tokens] if kind == "token" else vector

    def loss(self, tokens, positions, targets):
        """The sum of -log p(target) over the positions that carry a loss: those whose token is no end of text."""
        keys, band = self.keys, self.keys["band"]
        self.positions = positions.double()
        at = torch.arange(tokens.shape[1])
        self.steps = (at[:, None] - at[None, :]).expand(len(tokens), -1, -1)
        ends = (tokens == keys["eot"]).long()
        document = ends.cumsum(1) - ends  # an end of text belongs to the document that it closes
        self.same_document = document[:, :, None] == document[:, None, :]

        x, p = self.weights["embed"][tokens], None
        state_levels, state_keys = [], []

        def attend_from_pred(block, p, own):
            sets = [(self.read_keys(block, state_levels, state_keys), band["px"], True)]
            sets += [(own, band["pp"], False)] if own else []
            return self.attention("pred", block, p, sets)

        if self.together:  # both streams advance block by block, each from the rows that entered the block
            p = self.prediction_start(tokens, None)
        for block in range(keys["state_layers"]):
            state_levels.append(x)
            state_keys.append(self.own_keys("state", block, x))
            sets = [(state_keys[block], band["xx"], True)]
            if self.together:
                own = self.own_keys("pred", block, p) if self.pred_writes_keys else None
                sets += [(own, band["xp"], False)] if own else []
                p = attend_from_pred(block, p, own)
            x = self.attention("state", block, x, sets)
            if self.pooled:
                x, p = self.pooled_feed_forward(block, x, p)
            else:
                x = self.feed_forward("state", block, x)
                p = self.feed_forward("pred", block, p) if self.together else p
        state_levels.append(x)
        if not self.together and keys["pred_layers"] > 0:
            p = self.prediction_start(tokens, x)
            for block in range(keys["pred_layers"]):
                own = self.own_keys("pred", block, p) if self.pred_writes_keys else None
                p = self.feed_forward("pred", block, attend_from_pred(block, p, own))

        last = self.norm(x if keys["readout"] == "x" else p, self.weights["final_norm"])
        logits = last @ self.weights["embed" if keys["tie_head"] == "true" else "head"].T
        scored = ends == 0
        logits, targets = logits[scored], targets[scored]
        assert (targets >= 0).all(), "a position that carries a loss has no target"
        return (torch.logsumexp(logits, -1) - logits[torch.arange(len(targets)), targets]).sum()


def compare(name, path):
    """The line about a model; exits where it and PyTorch disagree."""
    metadata, file = read_safetensors(path)
    keys = json.loads(metadata["keys"])["model"]
    weights = {n.removeprefix("weight."): t.requires_grad_() for n, t in file.items() if n.startswith("weight.")}
    backends = sorted({n.split("/")[0] for n in file if "/" in n}, reverse=True)  # f64 first
    inputs = sorted({n.split(".")[0] for n in file if n.endswith(".tokens")})
    if "f64" not in backends or not inputs or not weights:
        sys.exit(f"{name}: the file lacks the weights, the inputs or the results in f64")
    network, distances, losses = Network(keys, weights), {}, []
    random = torch.Generator().manual_seed(4)
    moved = {n: (w * (1 + (torch.rand(w.shape, generator=random, dtype=w.dtype) - 0.5) / 256)).detach().requires_grad_()
             for n, w in weights.items()}
    shaken = Network(keys, moved)
    for n in inputs:
        tokens, targets = file[f"{n}.tokens"].long(), file[f"{n}.targets"].long()
        loss = network.loss(tokens, file[f"{n}.positions"], targets)
        if not torch.equal(network.same_document.int().argmax(-1), file[f"{n}.document_start"]):
            sys.exit(f"{name}, input {n}: document_start is not where the documents of the tokens begin")
        gradients = dict(zip(weights, torch.autograd.grad(loss, weights.values(), allow_unused=True)))
        moved_loss = shaken.loss(tokens, file[f"{n}.positions"], targets)
        moved_gradients = dict(zip(moved, torch.autograd.grad(moved_loss, moved.values(), allow_unused=True)))
        losses.append(loss.item())
        whole = math.sqrt(sum((g * g).sum().item() for g in gradients.values() if g is not None))
        # A tensor with a tiny gradient carries the rounding of the large ones around it.
        def distance(got, want):
            return (got - want).norm().item() / (want.norm().item() + 0.02 * whole)

        for tensor, want in gradients.items():
            if want is not None:
                distances.setdefault(("shaken", tensor), []).append(distance(moved_gradients[tensor], want))
        for backend in backends:
            tolerance = TOLERANCES[backend.split()[0]][0]
            got = file[f"{backend}/{n}.loss"].item()
            if not abs(got - loss.item()) <= tolerance * loss.item():
                sys.exit(f"{name}, {backend}, input {n}: the loss is {got!r}, PyTorch has {loss.item()!r}")
            for tensor, want in gradients.items():
                got = file[f"{backend}/{n}.gradient.{tensor}"].double()
                if want is None:
                    if got.any():
                        sys.exit(f"{name}, {backend}, input {n}: {tensor} has a gradient, in PyTorch the loss does not "
                                 "depend on it")
                    continue
                distances.setdefault((backend, tensor), []).append(distance(got, want))
    for found in distances.values():
        found.sort(key=lambda d: (math.isnan(d), d))
    worst = dict.fromkeys(backends, 0.0)
    for (backend, tensor), found in distances.items():
        if backend == "shaken":
            continue
        if backend.startswith("bf16"):
            middle = len(found) // 2
            far, allowed = found[middle], SHAKEN * distances["shaken", tensor][middle]
        else:
            far, allowed = found[-1], TOLERANCES[backend.split()[0]][1]
        if not far <= allowed:
            sys.exit(f"{name}, {backend}: the gradient of {tensor} is {far:.2g} of its length away from PyTorch's, "
                     f"allowed {allowed:.2g}")
        worst[backend] = max(worst[backend], far / allowed if backend.startswith("bf16") else far)
    return (f"{name}: loss {sum(losses) / len(losses):.6f}, {len(weights)} gradients, largest distance "
            + ", ".join(f"{backend} {far:.1e}" + " of what is allowed" * backend.startswith("bf16")
                        for backend, far in worst.items()))


def main():
    torch.set_num_threads(1)
    paths = sorted(glob.glob(os.path.join(sys.argv[1], "*.safetensors")))
    if not paths:
        sys.exit(f"there are no models in {sys.argv[1]}")
    for path in paths:
        print(compare(os.path.basename(path).removesuffix(".safetensors"), path), flush=True)


main()
