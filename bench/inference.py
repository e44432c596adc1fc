"""Runs of sps bench decode and prefill, gathered with commit and system in one JSON file.

Usage: inference.py SPS OUT.json RUN...
Each RUN is what follows `sps bench`, as one word: "decode s_standard_20b s_sps_w64_20b --batch 1,16".
"""
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile

sps, out, runs = sys.argv[1], sys.argv[2], sys.argv[3:]


def run(arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        subprocess.run([sps, "-q", "bench", *shlex.split(arguments), "--json", path], check=True)
        with open(path) as file:
            return {"run": arguments, **json.load(file)}


def git(*args):
    return subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()


result = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
          "system": platform.platform(), "cores": os.cpu_count(), "runs": [run(arguments) for arguments in runs]}
with open(out, "w") as file:
    json.dump(result, file, indent=1)
    file.write("\n")
