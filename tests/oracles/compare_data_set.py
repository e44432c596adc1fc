"""Compares a data set without validation part, written by `sps prepare`, with tiktoken's ids of the same documents.

Usage: compare_data_set.py DATA TOKENIZER DOCUMENTS...
The order of the documents is the data set's own business; which ones there are, and their ids, is not.
"""
import array
import collections
import json
import sys

from peers import batches, documents, encoder

data, tokenizer, *paths = sys.argv[1:]
with open(f"{data}/meta.json", encoding="utf-8") as f:
    meta = json.load(f)
ids = array.array({"uint16": "H", "uint32": "I"}[meta["dtype"]])
with open(f"{data}/train.bin", "rb") as f:
    ids.frombytes(f.read())
if sys.byteorder == "big":
    ids.byteswap()
eot, found, begin = meta["tokenizer"]["eot"], collections.Counter(), 0
while begin < len(ids):
    end = ids.index(eot, begin)
    found[tuple(ids[begin:end])] += 1
    begin = end + 1
encode = encoder("tiktoken", tokenizer)
expected = collections.Counter(tuple(i) for batch in batches(t for t in documents(paths) if t) for i in encode(batch))
print(f"{found.total()} documents in the data set, {expected.total()} in the text, "
      f"{(found - expected).total()} and {(expected - found).total()} have no counterpart")
sys.exit(found != expected or found.total() == 0)
