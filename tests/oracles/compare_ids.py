"""Compares the ids of `sps tokenizer encode` with those of another library, document by document.

Usage: compare_ids.py SPS tiktoken|huggingface TOKENIZER DOCUMENTS...
Prints one line; exit status 1 and the first differences if there are any.
"""
import json
import subprocess
import sys

from peers import batches, documents, encoder

sps, peer, tokenizer, *paths = sys.argv[1:]
encode = encoder(peer, tokenizer)
ours = subprocess.Popen([sps, "tokenizer", "encode", "--json", "--tokenizer", tokenizer, "--documents", *paths],
                        stdout=subprocess.PIPE)
texts = ids = different = unknown = 0
for batch in batches(documents(paths)):
    for text, theirs in zip(batch, encode(batch)):
        line = ours.stdout.readline()
        if not line:
            sys.exit(f"sps stopped after {texts} documents with status {ours.wait()}")
        mine = json.loads(line)
        texts += 1
        ids += len(mine)
        if theirs is None:
            unknown += 1
        elif mine != theirs:
            different += 1
            if different <= 5:
                at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
                print(f"document {texts}, id {at}: ours {mine[at:at + 8]}, {peer} {theirs[at:at + 8]}; text {text[:80]!a}")
if ours.stdout.read() or ours.wait() != 0:
    sys.exit(f"sps gave more than the {texts} documents, or failed: status {ours.returncode}")
print(f"{peer}: {texts} documents, {ids} ids, {different} documents differ"
      + f", {unknown} with marks that it does not know" * (unknown > 0))
sys.exit(different != 0 or texts == 0 or unknown * 1000 > texts)
