"""Our tokenizers and preparation, interleaved with tiktoken and Hugging Face's tokenizers on the same documents.

Usage: tokenizer.py PART SPS WORK ROUNDS OUT.json TEXTS.jsonl
  encode   our encoder on one thread and on all, tiktoken and Hugging Face likewise; ids are checked to be equal
  train    `sps tokenizer train` of 32,768 tokens and Hugging Face's trainer; merges are checked to be equal
  prepare  `sps prepare` to bytes and to GPT-2's ids (or a trained tokenizer's), from .jsonl and .jsonl.zst
  memory   `sps prepare` of BENCH_GB (3) GB of text: peak memory
WORK is a folder for what is made on the way. OUT.json keeps the other parts that it has. Only encode and train import
the other libraries: the peak memory of a child counts its parent's at the moment of the fork.
"""
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time

part, sps, work, rounds, out, texts_file = sys.argv[1:]
rounds = int(rounds)
gpt2 = "../shared/data/tokenizer"
has_gpt2 = os.path.exists(f"{gpt2}/encoder.json")
trained = f"{work}/llama3-32k.json"
cores = len(os.sched_getaffinity(0))
os.environ["RAYON_NUM_THREADS"] = str(cores)


def cpu():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "unknown")


def git(*args):
    return subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()


def run(*args):
    return subprocess.run([sps, *args], check=True, capture_output=True, text=True).stdout


def measured(*args):
    """Seconds and peak MiB of one command."""
    began = time.perf_counter()
    child = subprocess.Popen([sps, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"sps {' '.join(args)} ended with status {child.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def summary(samples):
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "samples": samples}


def train_ours(path):
    return run("tokenizer", "train", texts_file, "--vocab-size", "32768", "--pattern", "llama3", "--out", path, "--force")


def the_tokenizers():
    if not os.path.exists(trained):
        train_ours(trained)
    return ([("gpt2", gpt2)] if has_gpt2 else []) + [("llama3-32k", trained)]


def encode():
    import peers
    texts, characters = [], 0
    for text in peers.documents([texts_file]):  # about 6 MB, the documents from the beginning
        if characters >= 6_000_000:
            break
        texts.append(text)
        characters += len(text)
    documents = f"{work}/encode.jsonl"
    with open(documents, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts)
    size = sum(len(t.encode()) for t in texts)
    rows = []
    for name, path in the_tokenizers():
        encoding, hugging = peers.tiktoken_encoding(path), peers.huggingface_tokenizer(path)

        def ours(threads):
            info = run("tokenizer", "info", path, "--file", documents, "--threads", str(threads), "--json")
            return json.loads(info)["encode_seconds"]

        def numpy_arrays():
            for t in texts:
                encoding.encode_to_numpy(t, disallowed_special=())

        def batch(parallel):
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
            return [e.ids for e in hugging.encode_batch_fast(texts, add_special_tokens=False)]

        ids = [json.loads(line) for line in
               run("tokenizer", "encode", "--tokenizer", path, "--documents", documents, "--json").splitlines()]
        if ids != encoding.encode_ordinary_batch(texts, num_threads=cores) or ids != batch(True):
            sys.exit(f"{name}: the three libraries do not give the same ids")
        ways = {
            "ours_1": lambda: ours(1),
            "tiktoken_1": lambda: timed(lambda: [encoding.encode_ordinary(t) for t in texts]),
            "tiktoken_numpy_1": lambda: timed(numpy_arrays),
            "huggingface_1": lambda: timed(lambda: batch(False)),
            "ours_all": lambda: ours(cores),
            "tiktoken_batch": lambda: timed(lambda: encoding.encode_ordinary_batch(texts, num_threads=cores)),
            "huggingface_batch": lambda: timed(lambda: batch(True)),
        }
        seconds = {way: [] for way in ways}
        for _ in range(rounds):
            for way, measure in ways.items():
                seconds[way].append(measure())
        speed = {way: summary([size / s / 1e6 for s in all_]) for way, all_ in seconds.items()}
        median = {way: s["median"] for way, s in speed.items()}
        tiktoken = max(median["tiktoken_1"], median["tiktoken_numpy_1"])
        rows.append({"tokenizer": name, "documents": len(texts), "text_bytes": size, "tokens": sum(map(len, ids)),
                     "mb_per_second": speed, "over_tiktoken_1": median["ours_1"] / tiktoken,
                     "over_huggingface_1": median["ours_1"] / median["huggingface_1"],
                     "over_tiktoken_batch": median["ours_all"] / median["tiktoken_batch"],
                     "over_huggingface_batch": median["ours_all"] / median["huggingface_batch"],
                     "scaling": median["ours_all"] / median["ours_1"]})
    return rows


def train():
    import peers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    texts = list(peers.documents([texts_file]))
    train_ours(trained)
    with open(trained, encoding="utf-8") as f:
        merges = json.load(f)["model"]["merges"]
    splits = Tokenizer.from_file(trained).pre_tokenizer
    ours, theirs = [], []
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    for _ in range(rounds):
        ours.append(timed(lambda: train_ours(trained)))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = splits
        trainer = trainers.BpeTrainer(vocab_size=32767, min_frequency=2, show_progress=False, special_tokens=[],
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        theirs.append(timed(lambda: tokenizer.train_from_iterator(texts, trainer)))
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    if [m if isinstance(m, str) else " ".join(m) for m in found] != \
            [m if isinstance(m, str) else " ".join(m) for m in merges]:
        sys.exit("the two trainers do not find the same merges")
    return {"vocab_size": 32768, "text_bytes": sum(len(t.encode()) for t in texts), "ours_seconds": summary(ours),
            "huggingface_seconds": summary(theirs),
            "over_huggingface": statistics.median(theirs) / statistics.median(ours)}


def prepare():
    zst = f"{work}/texts.jsonl.zst"
    if not os.path.exists(zst):
        subprocess.run(["zstd", "-q", "-f", texts_file, "-o", zst], check=True)
    named = [("bytes", "bytes"), the_tokenizers()[0]]
    samples = {(name, kind): [] for name, _ in named for kind in ("jsonl", "jsonl.zst")}
    for _ in range(rounds):
        for name, path in named:
            for kind, source in (("jsonl", texts_file), ("jsonl.zst", zst)):
                shutil.rmtree(f"{work}/data", ignore_errors=True)
                samples[name, kind].append(measured("prepare", source, "--tokenizer", path, "--out", f"{work}/data"))
                with open(f"{work}/data/meta.json") as f:
                    meta = json.load(f)
                size = meta["train"]["text_bytes"] + meta["val"]["text_bytes"]
    shutil.rmtree(f"{work}/data")
    return [{"tokenizer": name, "input": kind, "text_bytes": size,
             "mb_per_second": summary([size / s / 1e6 for s, _ in runs]), "peak_mib": max(m for _, m in runs)}
            for (name, kind), runs in samples.items()]


def memory():
    goal = float(os.environ.get("BENCH_GB", "3")) * 1e9
    big = f"{work}/big.jsonl"
    name, path = the_tokenizers()[0]
    try:
        with open(big, "wb") as f:
            while f.tell() < goal:
                with open(texts_file, "rb") as source:
                    shutil.copyfileobj(source, f, 1 << 22)
        shutil.rmtree(f"{work}/data", ignore_errors=True)
        _, peak = measured("prepare", big, "--tokenizer", path, "--out", f"{work}/data")
        return {"tokenizer": name, "input": "jsonl", "input_bytes": os.path.getsize(big), "peak_mib": peak}
    finally:
        shutil.rmtree(f"{work}/data", ignore_errors=True)
        if os.path.exists(big):
            os.remove(big)


if part in ("encode", "train"):
    sys.path.insert(0, "tests/oracles")
try:
    with open(out) as f:
        result = json.load(f)
except FileNotFoundError:
    result = {}
result[part] = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")), "cpu": cpu(),
                "cores": cores, "system": platform.platform(), "rounds": 1 if part == "memory" else rounds,
                "rows": {"encode": encode, "train": train, "prepare": prepare, "memory": memory}[part]()}
if part in ("encode", "train"):
    from importlib.metadata import version
    result[part]["versions"] = {"python": platform.python_version(),
                                **{name: version(name) for name in ("tiktoken", "tokenizers")}}
with open(out, "w") as f:
    json.dump(result, f, indent=1)
    f.write("\n")
