"""Decoding of standard models, ours and another native engine's in turns; prints one JSON object.

Usage: engine_peer.py ENGINE SPS [--kind calm|yalm] [--recipes m_standard_20b,xl_standard_20b] [--prompt 1024]
                      [--tokens 64] [--rounds 3] [--device cuda|cpu] [--folder FOLDER]
       engine_peer.py ENGINE --check [--kind calm|yalm] [--device cuda|cpu]

ENGINE is the program that a checkout of github.com/zeux/calm (build/run) or github.com/andrewkchan/yalm (build/main)
builds. The model has the recipe's shapes, random weights in f16 (as many bytes as our bf16), a head that is the
embedding; norms of queries and keys, which neither engine has, are left out. It is written into a temporary folder,
or FOLDER, and takes two bytes a parameter.

One text, the most likely id fed back, keys and values of `prompt` positions there before the first of `tokens` steps.
The peer's figure is its own report of a run that the host's choice of ids is part of; its clock counts milliseconds,
so calm repeats the text REPEATS times in a run. calm is told to begin at position `prompt` (its CALM_POSO) over a
cache of whatever the memory holds; yalm reads a prompt first, which its report tells apart. Medians over the rounds.

--check, without `sps`: the engine continues a text with a tiny model, and every id that it chose must be the most
likely one of a forward pass written out here, or as good as that.
"""
import argparse
import json
import math
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile

import standard_model

REPEATS = 8
PERIOD = 4194301  # values after which random weights begin again; a prime, so no two rows of a matrix are alike
LOOSE = 0.02  # what f16 arithmetic may move logits by, of the largest
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Weights:
    """Random halves of both signs from [2**exponent, 2**(exponent + 1))."""

    def __init__(self, exponent):
        words = random.Random(exponent).randbytes(2 * PERIOD)
        keep, exponents = b"\xff\x83" * PERIOD, struct.pack("<H", (exponent + 15) << 10) * PERIOD  # sign and fraction
        bits = int.from_bytes(words, "little") & int.from_bytes(keep, "little") | int.from_bytes(exponents, "little")
        self.halves, self.at = memoryview(bits.to_bytes(2 * PERIOD, "little")), 0

    def write(self, file, count):
        while count:
            part = min(count, PERIOD - self.at)
            file.write(self.halves[2 * self.at:2 * (self.at + part)])
            self.at, count = (self.at + part) % PERIOD, count - part


def words(vocab):
    """One for every id; no two of them make a third."""
    return [LETTERS[i] if i < len(LETTERS) else f"[{i}]" for i in range(vocab)]


def ids_of(text):
    found = re.findall(r"\[(\d+)\]|([a-z])", text)
    return [int(number) if number else LETTERS.index(letter) for number, letter in found]


def write_model(path, c, exponent=-6):
    """A safetensors file as both engines' converters leave it. Matrices are (output, input); pairs are adjacent.

    The last id begins texts. Its embedding is zero, so that it is never the most likely one: calm would end there.
    """
    d, rows, kv_rows, ffn, vocab = (c["d_model"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"],
                                    c["d_ffn"][0], c["vocab"])
    if any(width != ffn for width in c["d_ffn"]):
        sys.exit(f"{sys.argv[0]}: the engines have one width for the FFNs of all layers, here they are {c['d_ffn']}")
    tokens = b"".join(word.encode() + b"\0" for word in words(vocab))
    ones = {n: struct.pack("<f", 1) * n for n in (d, vocab)}
    tensors = [("model.embed.weight", "F16", (vocab, d), None)]
    for layer in range(len(c["d_ffn"])):
        at = f"model.layers.{layer}."
        tensors += [(at + "attn.norm.weight", "F32", (d,), ones[d]), (at + "attn.wq.weight", "F16", (rows, d), None),
                    (at + "attn.wk.weight", "F16", (kv_rows, d), None),
                    (at + "attn.wv.weight", "F16", (kv_rows, d), None), (at + "attn.wo.weight", "F16", (d, rows), None),
                    (at + "mlp.norm.weight", "F32", (d,), ones[d]), (at + "mlp.w1.weight", "F16", (ffn, d), None),
                    (at + "mlp.w2.weight", "F16", (d, ffn), None), (at + "mlp.w3.weight", "F16", (ffn, d), None)]
    tensors += [("model.norm.weight", "F32", (d,), ones[d]), ("tokenizer.tokens", "U8", (len(tokens),), tokens),
                ("tokenizer.scores", "F32", (vocab,), ones[vocab])]
    settings = {"arch": "LlamaForCausalLM", "dtype": "fp16", "dim": d, "hidden_dim": ffn, "head_dim": c["head_dim"],
                "n_layers": len(c["d_ffn"]), "n_heads": c["heads"], "n_kv_heads": c["kv_heads"], "vocab_size": vocab,
                "max_seq_len": 4096, "rope_theta": c["rope_theta"], "rotary_dim": c["head_dim"],
                "norm_eps": c["norm_eps"], "norm_type": "rmsnorm", "act_type": "silu", "bos_token_id": vocab - 1,
                "eos_token_id": -1}
    header, end = {"__metadata__": {name: str(value) for name, value in settings.items()}}, 0
    for name, dtype, shape, _ in tensors:
        begin, end = end, end + math.prod(shape) * {"F16": 2, "F32": 4, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (256 - (8 + len(text)) % 256)  # at least one: calm writes over the last
    weights = Weights(exponent)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, shape, content in tensors:
            if content is None:
                weights.write(file, math.prod(shape))
            else:
                file.write(content)
        file.seek(8 + len(text) + 2 * (vocab - 1) * d)
        file.write(bytes(2 * d))
    return end


def finished(command, **options):
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)
    if run.returncode:
        sys.exit(f"{sys.argv[0]}: {command[0]} ended with status {run.returncode}: {run.stderr.strip()[-300:]}")
    return run


class Calm:
    def __init__(self, args):
        self.args = args

    def run(self, model, context, options, environment, stdout):
        environment = os.environ | environment | ({"CALM_CPU": "1"} if self.args.device == "cpu" else {})
        return finished([self.args.engine, model, "-t", "0", "-c", str(context), *options], env=environment,
                        stdout=stdout)

    def ms(self, model, prompt, tokens, context):
        err = self.run(model, context, ["-n", str(tokens), "-r", str(REPEATS)], {"CALM_POSO": str(prompt)},
                       subprocess.DEVNULL).stderr
        runs = re.findall(r"# (\d+) tokens: .* total ([\d.]+) sec", err)
        if [int(count) for count, _ in runs] != [tokens] * REPEATS:
            sys.exit(f"{sys.argv[0]}: calm did not report {REPEATS} runs of {tokens} tokens: {err[-300:]}")
        return 1e3 * sum(float(seconds) for _, seconds in runs) / (tokens * REPEATS)

    def continued(self, model, text, tokens, context):
        lines = self.run(model, context, ["-n", str(len(text) + tokens), "-i", text], {},
                         subprocess.PIPE).stdout.splitlines()
        said = "".join(line for line in lines if not line.startswith("#"))
        return ids_of(said.removeprefix(text))


class Yalm:
    def __init__(self, args):
        self.args = args

    def run(self, model, text, tokens, context):
        with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(model)) as file:  # a long text is no argument
            file.write(text)
            file.flush()
            return finished([self.args.engine, model, "-d", self.args.device, "-m", "completion", "-t", "0", "-n",
                             str(tokens), "-T", str(context), "-f", file.name], stdout=subprocess.PIPE).stdout

    def ms(self, model, prompt, tokens, context):
        out = self.run(model, text_of(prompt - 1), tokens, context)  # and the id that begins texts
        found = re.search(r"(\d+) tokens\n.*hydrate: ([\d.]+)s\n.*total: ([\d.]+)s", out, re.DOTALL)
        if not found or int(found[1]) != prompt + tokens:
            sys.exit(f"{sys.argv[0]}: yalm did not report {prompt + tokens} tokens: {out[-300:]}")
        return 1e3 * (float(found[3]) - float(found[2])) / tokens

    def continued(self, model, text, tokens, context):
        return ids_of(re.search(r"Encoding stats: .*\n\n(.*)\n", self.run(model, text, tokens, context))[1])


ENGINES = {"calm": Calm, "yalm": Yalm}


def text_of(count):
    return "".join(random.Random(count).choices(LETTERS, k=count))


def measure(args):
    engine, rows, device = ENGINES[args.kind](args), [], None
    for recipe in args.recipes.split(","):
        config = standard_model.config(args.sps, recipe)
        context = (args.prompt + args.tokens + 31) // 32 * 32
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            model = os.path.join(folder, "model")
            size = write_model(model, config)
            mine, theirs = [], []
            for _ in range(args.rounds):
                device, by_batch = standard_model.decode(args.sps, recipe, "1", args.prompt, args.tokens, args.device)
                mine.append(by_batch[1])
                theirs.append(engine.ms(model, args.prompt, args.tokens, context))
                print(recipe, f"ours {mine[-1]:.4f} ms, {args.kind} {theirs[-1]:.4f}", file=sys.stderr, flush=True)
        ms, peer_ms = statistics.median(mine), statistics.median(theirs)
        rows.append({"recipe": recipe, "ms": ms, "peer_ms": peer_ms, "peer_over_ours": peer_ms / ms,
                     "peer_bytes": size, "all_ms": mine, "all_peer_ms": theirs})
    print(json.dumps({"peer": args.kind, "device": device, "prompt": args.prompt, "tokens": args.tokens,
                      "rounds": args.rounds, "results": rows}))


class Reference:
    """The forward pass of a model file, one position after the other, in double precision."""

    def __init__(self, path, c):
        with open(path, "rb") as file:
            content = file.read()
        start = 8 + struct.unpack_from("<Q", content)[0]
        self.tensors, self.c, self.keys, self.values = {}, c, {}, {}
        for name, t in json.loads(content[8:start]).items():
            if name.startswith("model."):
                n = math.prod(t["shape"])
                flat = struct.unpack_from(f"<{n}{'e' if t['dtype'] == 'F16' else 'f'}", content,
                                          start + t["data_offsets"][0])
                width = t["shape"][-1]
                self.tensors[name.removesuffix(".weight")] = [flat[i:i + width] for i in range(0, n, width)]

    def product(self, name, x):
        return [sum(a * b for a, b in zip(row, x)) for row in self.tensors[name]]

    def normed(self, name, x):
        scale = (sum(a * a for a in x) / len(x) + self.c["norm_eps"])**-0.5
        return [a * scale * gain for a, gain in zip(x, self.tensors[name][0])]

    def heads(self, flat, pos=None):
        dim, out = self.c["head_dim"], []
        for begin in range(0, len(flat), dim):
            head = list(flat[begin:begin + dim])
            for i in range(0, dim if pos is not None else 0, 2):
                angle = pos * self.c["rope_theta"]**(-i / dim)
                cos, sin = math.cos(angle), math.sin(angle)
                head[i], head[i + 1] = head[i] * cos - head[i + 1] * sin, head[i] * sin + head[i + 1] * cos
            out.append(head)
        return out

    def attended(self, queries, keys, values):
        out, group = [], self.c["heads"] // self.c["kv_heads"]
        for h, q in enumerate(queries):
            scores = [sum(a * b for a, b in zip(q, k[h // group])) / len(q)**0.5 for k in keys]
            weights = [math.exp(s - max(scores)) for s in scores]
            out += [sum(w * v[h // group][i] for w, v in zip(weights, values)) / sum(weights) for i in range(len(q))]
        return out

    def logits(self, token, pos):
        x = list(self.tensors["model.embed"][token])
        for layer in range(len(self.c["d_ffn"])):
            at = f"model.layers.{layer}."
            row = self.normed(at + "attn.norm", x)
            keys, values = self.keys.setdefault(layer, []), self.values.setdefault(layer, [])
            keys.append(self.heads(self.product(at + "attn.wk", row), pos))
            values.append(self.heads(self.product(at + "attn.wv", row)))
            row = self.attended(self.heads(self.product(at + "attn.wq", row), pos), keys, values)
            x = [a + b for a, b in zip(x, self.product(at + "attn.wo", row))]
            row = self.normed(at + "mlp.norm", x)
            gated = [g / (1 + math.exp(-g)) * u
                     for g, u in zip(self.product(at + "mlp.w1", row), self.product(at + "mlp.w3", row))]
            x = [a + b for a, b in zip(x, self.product(at + "mlp.w2", gated))]
        return self.product("model.embed", self.normed("model.norm", x))


def check(args):
    base = {"d_model": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "d_ffn": [160, 160], "vocab": 256,
            "norm_eps": 1e-6, "rope_theta": 10000.0}
    tokens = 16
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for c in (base, base | {"kv_heads": 2}):
            model = os.path.join(folder, "model")
            write_model(model, c, exponent=-3)  # lively: attention must matter
            text = text_of(20)
            chosen = ENGINES[args.kind](args).continued(model, text, tokens, 64)
            assert len(chosen) == tokens and len(set(chosen)) > tokens // 2, chosen  # not one answer to everything
            reference = Reference(model, c)
            read = [c["vocab"] - 1, *ids_of(text), *chosen]
            for pos, token in enumerate(read[:-1]):
                logits = reference.logits(token, pos)
                if pos >= len(text):
                    short = (max(logits) - logits[read[pos + 1]]) / max(map(abs, logits))
                    assert short < LOOSE, (c, pos, short)
    print(f"engine_peer.py: {args.kind} chooses as the forward pass here")


parser = argparse.ArgumentParser()
parser.add_argument("engine")
parser.add_argument("sps", nargs="?")
parser.add_argument("--kind", choices=ENGINES, default="calm")
parser.add_argument("--recipes", default="m_standard_20b,xl_standard_20b")
parser.add_argument("--prompt", type=int, default=1024)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
parser.add_argument("--folder")
parser.add_argument("--check", action="store_true")
if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments)
    elif arguments.sps:
        measure(arguments)
    else:
        parser.error("SPS is missing")
