"""Generation speed of several models side by side on this machine: one JSON file with commit and system.

Usage: inference.py SPS OUT.json [options of sps bench decode and prefill, such as --device cuda --batch 1,16]
INFERENCE_MODELS and INFERENCE_PROMPTS name the models of the two runs (default: scale S).
"""
import json
import os
import platform
import subprocess
import sys
import tempfile

sps, out, options = sys.argv[1], sys.argv[2], sys.argv[3:]
MODELS = os.environ.get("INFERENCE_MODELS", "s_standard_20b s_sps_w64_20b s_free_pause_20b s_sequential_6+6_20b").split()
PROMPTS = os.environ.get("INFERENCE_PROMPTS", " ".join(MODELS)).split()


def run(what, models, more):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        subprocess.run([sps, "-q", "bench", what, *models, *more, "--json", path], check=True)
        with open(path) as file:
            return json.load(file)


def git(*args):
    return subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()


decode_only = {"--tokens", "--no-ceiling"}
prefill_options = []
skip = False
for word in options:
    if skip or word in decode_only:
        skip = word == "--tokens"
        continue
    prefill_options.append(word)
result = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")),
          "system": platform.platform(), "cores": os.cpu_count(), "method": "bench/inference.py " + " ".join(options),
          "decode": run("decode", MODELS, options), "prefill": run("prefill", PROMPTS, prefill_options)}
with open(out, "w") as file:
    json.dump(result, file, indent=1)
    file.write("\n")
