"""Writes into FOLDER what the comparisons need, always the same.

Usage: make_files.py FOLDER
  text.jsonl      the sources of Python's own library, a document each: something to train on
  random.jsonl    strings of characters from all of Unicode, mostly where patterns have their corners
  newlines.jsonl  runs of 1 to 64 line breaks between, before and after words and spaces
  FAMILY.json     tokenizers as Hugging Face's library writes them, trained by it on text.jsonl
"""
import glob
import json
import os
import random
import sys

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from peers import END

folder = sys.argv[1]
rng = random.Random(20)


def write(name, texts):
    with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t}, ensure_ascii=bool(i % 2)) + "\n" for i, t in enumerate(texts))


sources = []
for path in sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py")):
    with open(path, encoding="utf-8") as f:
        sources.append(f.read())
write("text.jsonl", sources)

PLAIN = " \n\r\t\x0b\x0c'stlLreRvedmDS0975azAZ!/_-\0"
# Line and paragraph separators, other spaces, zero widths, marks, letters that fold to ASCII, digraphs, modifiers,
# numbers that are no digits, emoji with joiners, the last characters.
CORNERS = [0x2028, 0x2029, 0x85, 0xa0, 0x1680, 0x180e, 0x200b, 0x200d, 0x3000, 0xfeff, 0x17f, 0x212a, 0x2bc, 0x2019,
           0x300, 0x301, 0x323, 0x1c5, 0x2b0, 0x3007, 0x2160, 0xb2, 0xbd, 0x661, 0x966, 0x1f469, 0x1f3fd, 0xe0100,
           0x378, 0xac00, 0x1100, 0x1161, 0x11a8, 0x212b, 0x2126, 0xfb01, 0x10ffff, 0xffff]


def character():
    r = rng.random()
    if r < 0.35:
        return rng.choice(PLAIN)
    if r < 0.5:
        return chr(rng.choice(CORNERS))
    if r < 0.75:
        return chr(rng.randrange(0x20, 0x3000))
    c = rng.randrange(0x110000 - 0x800)
    return chr(c if c < 0xd800 else c + 0x800)


texts = ["".join(character() for _ in range(rng.randrange(1, 80))) for _ in range(20000)]
texts += [f"{END}{END} a{END}\n{END}", "<|end_of_text|>", "<|im_end|>x"]
texts += [chr(c) + "a 1" + chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000 and (c < 0x3000 or c % 17 == 0)]
write("random.jsonl", texts)

runs = []
for n in range(1, 65):
    for unit in ("\n", "\r\n", "\r", " \n", "\n ", "\t\n"):
        run = unit * n
        runs += [run, "a" + run, run + "b", "a" + run + "b", "a." + run + " b", "1 " + run + "  2", run + "'s", run + "\u00a0"]
write("newlines.jsonl", runs)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
# A pattern that no known family has.
OTHER = r"[\p{P}\p{S}][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|\p{N}"


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
families = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, {}),
    "llama3": (split(LLAMA3), None, {"ignore_merges": True}),
    "qwen2": (split(QWEN2), normalizers.NFC(), {}),
    "smollm": (digits, None, {}),
    "other": (split(OTHER), None, {}),
}
for name, (pre_tokenizer, normalizer, options) in families.items():
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, special_tokens=[END],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.save(f"{folder}/{name}.json")
