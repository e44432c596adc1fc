"""Runs of sps bench decode on a GPU (decode-SCALE.json, as scripts/gpu.sh leaves them) in one JSON object, and a table
on standard error.

Usage: gpu_inference.py FOLDER

The reference is the published implementation, measured by us on the same kind of GPU: prompts of 1024, 256 new tokens,
f32 weights with TF32, a bf16 cache. `wall` compares tokens a second with what its user gets, `busy` with its kernels
alone, without the gaps between them. Ours go on for more tokens, so that attention sees more keys than its did.
"""
import json
import os
import subprocess
import sys

SCALES = ("xs", "s", "m", "l", "xl", "1b")
# Milliseconds of a step: 16 texts, of these the kernels; one text.
REFERENCE = {("xs", "standard"): (11.66, 1.14, 10.94), ("xs", "sps"): (10.57, 1.24, 8.99),
             ("m", "standard"): (24.81, 3.83, 29.42), ("m", "sps"): (21.85, 4.38, 19.45),
             ("xl", "standard"): (58.73, 9.31, 54.96), ("xl", "sps"): (68.36, 12.24, 48.55)}


def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def over_reference(scale, row):
    """How many times as many tokens a second: wall, busy."""
    figures = REFERENCE.get((scale, row["family"]))
    if figures is None or row["batch"] not in (1, 16):
        return None, None
    rate = row["decode_tokens_per_sec"] / row["batch"] * 1e-3  # steps a millisecond
    return (figures[0] * rate, figures[1] * rate) if row["batch"] == 16 else (figures[2] * rate, None)


def number(value, form):
    return "-" if value is None else form % value


runs = {}
for scale in SCALES:
    path = os.path.join(sys.argv[1], f"decode-{scale}.json")
    if os.path.exists(path):
        with open(path) as file:
            runs[scale] = json.load(file)
line = "%-5s %5s %-20s %6s %9s %9s %9s %9s %9s"
print(line % ("scale", "batch", "model", "new", "ms/step", "/standard", "/ceiling", "x wall", "x busy"),
      file=sys.stderr)
for scale, run in runs.items():
    for row in run["results"]:
        if "error" in row:
            print("%-5s %5d %-20s" % (scale, row["batch"], row["model"]), row["error"], file=sys.stderr)
            continue
        wall, busy = over_reference(scale, row)
        row["over_reference"] = {"wall": wall, "busy": busy}
        print(line % (scale, row["batch"], row["model"], row["tokens"], "%.3f" % row["ms_per_step"]["median"],
                      number(row.get("over_standard"), "%.3f"), number(row.get("of_ceiling"), "%.3f"),
                      number(wall, "%.1f"), number(busy, "%.2f")), file=sys.stderr)
gpu = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").split("\n")[0].split(", ")
version = output("nvcc", "--version").partition("release ")[2].partition(",")[0]
print(json.dumps({"gpu": gpu[0], "driver": gpu[-1], "cuda": version,
                  "commit": os.environ.get("GPU_COMMIT") or output("git", "rev-parse", "HEAD"),
                  "method": "sps bench decode, prompts of 1024, bf16; over_reference: see bench/gpu_inference.py",
                  "decode": runs}, indent=1, sort_keys=True))
