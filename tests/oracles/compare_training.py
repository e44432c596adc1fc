"""Trains with Hugging Face's library what a tokenizer.json of ours says, on the same documents; the merges are the same.

Usage: compare_training.py TOKENIZER.json DOCUMENTS...
"""
import json
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from peers import documents

path, *paths = sys.argv[1:]
with open(path, encoding="utf-8") as f:
    ours = json.load(f)
special = {t["content"] for t in ours["added_tokens"]}
vocab = {token: i for token, i in ours["model"]["vocab"].items() if token not in special}
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = Tokenizer.from_file(path).pre_tokenizer
tokenizer.train_from_iterator(documents(paths), trainers.BpeTrainer(
    vocab_size=len(vocab), min_frequency=2, show_progress=False, special_tokens=[],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
theirs = json.loads(tokenizer.to_str())


def pairs(merges):
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]


mine, others = pairs(ours["model"]["merges"]), pairs(theirs["model"]["merges"])
same = next((i for i, (a, b) in enumerate(zip(mine, others)) if a != b), min(len(mine), len(others)))
print(f"{len(mine)} merges of ours, {len(others)} of huggingface, the first {same} are the same")
sys.exit(mine != others or vocab != theirs["model"]["vocab"] or not mine)
