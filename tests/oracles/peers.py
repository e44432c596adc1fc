"""The same tokenizer in tiktoken and in Hugging Face's tokenizers, from files that are on this machine."""
import io
import json
import os
import subprocess
import unicodedata

# Without this tiktoken keeps copies by name and does not see that a file has changed.
os.environ["TIKTOKEN_CACHE_DIR"] = ""
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

END = "<|endoftext|>"
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def alphabet():
    """Byte of each character of the printable alphabet, after the rule of docs/formats/tokenizer.md."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in visible}
    for n, b in enumerate(b for b in range(256) if b not in visible):
        table[chr(256 + n)] = b
    return table


def ranks_of(tokenizer_json):
    """(ranks, special tokens, pattern) of a tokenizer.json of one Split or of GPT-2's ByteLevel."""
    with open(tokenizer_json, encoding="utf-8") as f:
        j = json.load(f)
    special = {t["content"]: t["id"] for t in j["added_tokens"]}
    byte = alphabet()
    ranks = {bytes(byte[c] for c in token): i for token, i in j["model"]["vocab"].items() if token not in special}
    steps = j["pre_tokenizer"].get("pretokenizers", [j["pre_tokenizer"]])
    splits = [s["pattern"]["Regex"] for s in steps if s["type"] == "Split"]
    if len(splits) > 1 or any(s["type"] == "Digits" for s in steps):
        raise ValueError(f"{tokenizer_json}: tiktoken has one pattern only")
    return ranks, special, splits[0] if splits else GPT2


def tiktoken_encoding(path):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks, load_tiktoken_bpe
    if os.path.isdir(path):
        ranks = data_gym_to_mergeable_bpe_ranks(f"{path}/vocab.bpe", f"{path}/encoder.json")
        special, pattern = {END: 50256}, GPT2
    elif path.endswith(".json"):
        ranks, special, pattern = ranks_of(path)
    else:
        ranks, special, pattern = load_tiktoken_bpe(path), {END: 50256}, GPT2
    return tiktoken.Encoding("oracle", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def huggingface_tokenizer(path):
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    if os.path.isdir(path):
        tokenizer = Tokenizer.from_str(ByteLevelBPETokenizer(f"{path}/encoder.json", f"{path}/vocab.bpe").to_str())
    else:
        tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True  # text that spells one is text, as in documents
    return tokenizer


def encoder(peer, path):
    """A function from a list of texts to their lists of ids; None where the peer's normal form is not Unicode's."""
    if peer == "tiktoken":
        encoding = tiktoken_encoding(path)
        return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count())
    tokenizer = huggingface_tokenizer(path)

    def encode(texts):
        ids = [e.ids for e in tokenizer.encode_batch_fast(texts)]
        if tokenizer.normalizer is None:
            return ids
        # The library's NFC knows no combining mark that is newer than Unicode 9 and leaves it where it stands.
        return [i if tokenizer.normalizer.normalize_str(t) == unicodedata.normalize("NFC", t) else None
                for t, i in zip(texts, ids)]
    return encode


def documents(paths):
    """Texts of .jsonl and .jsonl.zst files."""
    for path in paths:
        if path.endswith(".zst"):
            source = subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE)
            yield from (json.loads(line)["text"] for line in io.BufferedReader(source.stdout, 1 << 20))
            if source.wait() != 0:
                raise OSError(f"zstd cannot read {path}")
        else:
            with open(path, "rb") as f:
                yield from (json.loads(line)["text"] for line in f)


def batches(texts, size=8 << 20):
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= size:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
