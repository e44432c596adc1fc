"""What the decoding benchmarks ask `sps` about a standard model."""
import json
import subprocess
import sys


def config(sps, recipe):
    """The recipe's settings; ends the program where a plain decoder-only transformer would not be the same model."""
    out = subprocess.run([sps, "info", recipe, "--json"], check=True, capture_output=True, text=True).stdout
    c = json.loads(out)["config"]
    if c["pred_layers"] or c["sliding_window"] or c["rope_fraction"] != 1 or c["rope_pairs"] != "adjacent" or \
            c["tie_head"] != "true":
        sys.exit(f"{sys.argv[0]}: {recipe} is not a model that is written out here")
    return c


def decode(sps, recipe, batches, prompt, tokens, device="cuda"):
    """The name of the device, and milliseconds of a step by batch, one round of `sps bench decode`."""
    out = json.loads(subprocess.run(
        [sps, "-q", "bench", "decode", recipe, "--device", device, "--batch", batches, "--prompt", str(prompt),
         "--tokens", str(tokens), "--rounds", "1", "--no-ceiling", "--json", "-"], check=True, capture_output=True,
        text=True).stdout)
    return out["device"], {row["batch"]: row["ms_per_step"]["median"] for row in out["results"]}
