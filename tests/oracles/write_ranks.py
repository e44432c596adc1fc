"""Writes the ranks of a tokenizer.json with tiktoken's own function. Usage: write_ranks.py TOKENIZER.json OUT"""
import sys
import types

from peers import ranks_of

# tiktoken opens the file through this package, which is for remote storage: for a local one it is open().
sys.modules["blobfile"] = types.SimpleNamespace(BlobFile=open)
from tiktoken.load import dump_tiktoken_bpe  # noqa: E402

dump_tiktoken_bpe(ranks_of(sys.argv[1])[0], sys.argv[2])
