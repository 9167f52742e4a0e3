"""Tokens a second of generation: a live model, its exported program, and HF transformers, on the same weights.

    python benchmarks/generate.py models/smollm2-135m-instruct --transformers /path/to/python

with the path of a Python that has torch and transformers; without it that engine is left out. Each engine runs in a
process of its own with the same number of threads. It reads prompts of `--prompt_tokens` random tokens, makes
`--new_tokens` greedily without an end, once to warm up and `--repeats` times to be timed; the median counts. The tokens
of all engines are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TRANSFORMERS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
asked = json.load(open(sys.argv[1]))
torch.set_num_threads(asked["threads"])
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
results = []
for prompts in asked["batches"]:
    ids, times = torch.tensor(prompts), []
    for _ in range(asked["repeats"] + 1):
        begun = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["new_tokens"],
                                 min_new_tokens=asked["new_tokens"], do_sample=False, pad_token_id=0)
        times.append(time.perf_counter() - begun)
    results.append({"times": times[1:], "tokens": out[:, ids.shape[1]:].tolist()})
print("RESULT " + json.dumps(results))
"""


def run_llmsuite(path: str, engine: str) -> None:
    """One engine, in its own process."""
    import time

    from llmsuite.cli import commands
    from llmsuite.devices.start import start_paddle
    from llmsuite.plugins import builtin
    from llmsuite.plugins.manager import load_plugins

    asked = json.loads(Path(path).read_text())
    registry = load_plugins(builtin, commands)
    backend = registry.devices["cpu"].factory()
    start_paddle(backend, 1)
    from llmsuite.inference.batch import Batch, Line
    from llmsuite.inference.decoder import Decoder, ModelDecoder
    from llmsuite.inference.fused import fuse
    from llmsuite.inference.load import load_model, open_any
    from llmsuite.inference.predictor import Predictor
    from llmsuite.inference.sampling import Sampling

    if engine == "static":
        decoder: Decoder = Predictor(Path(asked["static"]), num_threads=asked["threads"])
    else:
        model = load_model(open_any(Path(asked["model"]), registry.models), backend)
        fuse(model)
        decoder = ModelDecoder(model)
    sampling, results = Sampling(max_new_tokens=asked["new_tokens"]), []
    for prompts in asked["batches"]:
        times = []
        for _ in range(asked["repeats"] + 1):
            lines, batch = [Line(prompt, sampling, set()) for prompt in prompts], Batch(decoder)
            begun = time.perf_counter()
            batch.advance(lines)
            while batch.lines:
                batch.advance()
            times.append(time.perf_counter() - begun)
        results.append({"times": times[1:], "tokens": [line.ids for line in lines]})
    print("RESULT " + json.dumps(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help="model directory in the HF layout")
    parser.add_argument("--transformers", help="a Python that has torch and transformers")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    import random

    with tempfile.TemporaryDirectory() as place:
        static, asked = Path(place) / "static", Path(place) / "asked.json"
        model, draw = str(Path(arguments.model).absolute()), random.Random(0)
        llmsuite = [sys.executable, "-m", "llmsuite"]
        subprocess.run([*llmsuite, "export", model, "-o", str(static)], check=True)
        vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        batches = [
            [[draw.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(size)]
            for size in arguments.batch_sizes
        ]
        content: dict[str, Any] = {**vars(arguments), "model": model, "static": str(static), "batches": batches}
        asked.write_text(json.dumps(content))
        engines = {name: [sys.executable, __file__, "--run", str(asked), name] for name in ("dynamic", "static")}
        if arguments.transformers:
            engines["transformers"] = [arguments.transformers, "-c", _TRANSFORMERS, str(asked)]
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
        found: dict[str, list[dict[str, Any]]] = {}
        for name, command in engines.items():
            done = subprocess.run(command, env={**os.environ, **threads}, stdout=subprocess.PIPE, text=True, check=True)
            line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
            found[name] = json.loads(line.removeprefix("RESULT "))
    last = list(found)[-1]
    print(f"| batch | engine | tokens/s | against {last} | same tokens |")
    print("|---|---|---|---|---|")
    for number, size in enumerate(arguments.batch_sizes):
        speeds = {
            name: size * arguments.new_tokens / statistics.median(result[number]["times"])
            for name, result in found.items()
        }
        for name, speed in speeds.items():
            same = sum(a == b for a, b in zip(found[name][number]["tokens"], found[last][number]["tokens"]))
            print(f"| {size} | {name} | {speed:.1f} | {speed / speeds[last]:.2f} | {same} of {size} |")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_llmsuite(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
