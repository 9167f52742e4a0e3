"""Tokens a second of generation: a live model in several precisions, its exported programs, those with the decoding
loop, llama.cpp, and HF transformers in bf16 and float32, on the same weights.

    python benchmarks/generate.py models/smollm2-135m-instruct --transformers /path/to/python
    python benchmarks/generate.py models/smollm2-135m-instruct --llama_cpp /path/to/python \\
        --gguf f16/model.gguf q8_0/model.gguf

with the path of a Python that has torch and transformers, or llama-cpp-python; without it that engine is left out.
llama.cpp reads GGUF files, which have to be of the same model (`llmsuite convert --layout gguf`) and are told apart by
their directories, and answers one prompt at a time: it is asked for batches of one only. Each engine runs in a
process of its own with the same number of threads. It reads prompts of `--prompt_tokens` random tokens and makes
`--new_tokens` greedily without an end. After one round to warm up the engines take turns for `--rounds` rounds, so that
what else the machine does meets all of them; the median of tokens a second counts, and the median over rounds of each
one's ratio to the last. The tokens of all engines are compared.
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
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, sys.argv[2])).eval()
for line in sys.stdin:
    ids = torch.tensor(asked["batches"][int(line)])
    begun = time.perf_counter()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["new_tokens"],
                             min_new_tokens=asked["new_tokens"], do_sample=False, pad_token_id=0)
    seconds = time.perf_counter() - begun
    print("RESULT " + json.dumps({"seconds": seconds, "tokens": out[:, ids.shape[1]:].tolist()}), flush=True)
"""

_LLAMA_CPP = """
import itertools, json, sys, time
from llama_cpp import Llama
asked = json.load(open(sys.argv[1]))
room = asked["prompt_tokens"] + asked["new_tokens"]
threads = {"n_threads": asked["threads"], "n_threads_batch": asked["threads"]}
model = Llama(sys.argv[2], n_ctx=room + 8, n_batch=room, verbose=False, **threads)
for line in sys.stdin:
    (prompt,) = asked["batches"][int(line)]
    model.reset()  # else it remembers the prompt of the round before
    begun = time.perf_counter()
    tokens = list(itertools.islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), asked["new_tokens"]))
    print("RESULT " + json.dumps({"seconds": time.perf_counter() - begun, "tokens": [tokens]}), flush=True)
"""


def run_llmsuite(path: str, engine: str) -> None:
    """One engine, in its own process: for each number of a batch on stdin, its tokens and seconds on stdout."""
    import time

    from llmsuite.contract.registry import load_plugins
    from llmsuite.devices.start import start_paddle

    asked = json.loads(Path(path).read_text())
    registry = load_plugins()
    backend = registry.devices["cpu"].factory()
    start_paddle(backend, 1, inference_only=True)
    from llmsuite.inference.batch import Batch, DecodingSequence
    from llmsuite.inference.decoder import Decoder, ModelDecoder
    from llmsuite.inference.fused import fuse
    from llmsuite.inference.load import load_model, open_any
    from llmsuite.inference.predictor import Predictor
    from llmsuite.inference.sampling import Sampling

    program, _, precision = engine.partition("_")
    if program in ("static", "loop"):
        decoder: Decoder = Predictor(Path(asked["programs"][precision or "fp32"]), num_threads=asked["threads"])
    else:
        stored = None if engine == "dynamic" else engine
        model = load_model(open_any(Path(asked["model"]), registry.models), backend, packed=stored)
        fuse(model, backend.ops("fp32"))
        decoder = ModelDecoder(model)
    sampling = Sampling(max_new_tokens=asked["new_tokens"])
    for number in sys.stdin:
        prompts = asked["batches"][int(number)]
        if isinstance(decoder, Predictor) and program == "loop":
            begun = time.perf_counter()
            tokens = decoder.greedy(prompts, asked["new_tokens"])
            print("RESULT " + json.dumps({"seconds": time.perf_counter() - begun, "tokens": tokens}), flush=True)
            continue
        sequences = [DecodingSequence(prompt, sampling, set()) for prompt in prompts]
        batch = Batch(decoder)
        begun = time.perf_counter()
        batch.advance(sequences)
        while batch.sequences:
            batch.advance()
        seconds = time.perf_counter() - begun
        print("RESULT " + json.dumps({"seconds": seconds, "tokens": [line.ids for line in sequences]}), flush=True)


class Engine:
    """A process that generates when it is told to."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def generate(self, number: int) -> dict[str, Any]:
        """The tokens and seconds of a batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(number, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
        raise SystemExit(f"an engine has ended with {self._process.wait()}")

    def stop(self) -> None:
        self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help="model directory in the HF layout")
    parser.add_argument(
        "--engines",
        nargs="*",
        default=["dynamic", "bf16", "int8", "nf4", "static", "loop", "static_bf16", "loop_bf16"],
        help="ours; behind static and loop the precision of the program, unless it is fp32",
    )
    parser.add_argument("--programs", help="a directory for what `llmsuite export` writes; default: a temporary one")
    parser.add_argument("--transformers", help="a Python that has torch and transformers")
    parser.add_argument("--llama_cpp", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", nargs="*", default=[], help="files for it, each an engine of its own")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    import random

    with tempfile.TemporaryDirectory() as place:
        asked = Path(place) / "asked.json"
        programs = Path(arguments.programs or place).absolute()
        model = str(Path(arguments.model).absolute())
        draw = random.Random(0)
        llmsuite = [sys.executable, "-m", "llmsuite"]
        split = [engine.partition("_") for engine in arguments.engines]
        precisions = {precision or "fp32" for name, _, precision in split if name in ("static", "loop")}
        exported = {precision: str(programs / f"program-{precision}") for precision in sorted(precisions)}
        for precision, target in exported.items():
            if not Path(target).exists():
                options = ["--precision", precision, "--decoding_loop"]
                subprocess.run([*llmsuite, "export", model, "-o", target, *options], check=True)
        vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        batches = [
            [[draw.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(size)]
            for size in arguments.batch_sizes
        ]
        content: dict[str, Any] = {**vars(arguments), "model": model, "programs": exported, "batches": batches}
        asked.write_text(json.dumps(content))
        commands = {name: [sys.executable, __file__, "--run", str(asked), name] for name in arguments.engines}
        if arguments.llama_cpp:
            for file in arguments.gguf:
                name = f"llama.cpp {Path(file).absolute().parent.name}"
                commands[name] = [arguments.llama_cpp, "-c", _LLAMA_CPP, str(asked), file]
        if arguments.transformers:
            python = [arguments.transformers, "-c", _TRANSFORMERS, str(asked)]
            commands["transformers bf16"] = [*python, "bfloat16"]
            commands["transformers"] = [*python, "float32"]
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
        engines = {name: Engine(command, {**os.environ, **threads}) for name, command in commands.items()}
        last = next(name for name in reversed(engines) if not name.startswith("llama.cpp"))
        print(f"| batch | engine | tokens/s | against {last}, median (lowest to highest) | same tokens |")
        print("|---|---|---|---|---|")
        for number, size in enumerate(arguments.batch_sizes):
            asked_now = {n: e for n, e in engines.items() if size == 1 or not n.startswith("llama.cpp")}
            rounds = [
                {name: engine.generate(number) for name, engine in asked_now.items()}
                for _ in range(arguments.rounds + 1)
            ]
            for name in asked_now:
                speed = size * arguments.new_tokens / statistics.median(r[name]["seconds"] for r in rounds[1:])
                ratios = sorted(r[last]["seconds"] / r[name]["seconds"] for r in rounds[1:])
                same = sum(a == b for a, b in zip(rounds[0][name]["tokens"], rounds[0][last]["tokens"]))
                ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"| {size} | {name} | {speed:.1f} | {ratio} | {same} of {size} |", flush=True)
        for engine in engines.values():
            engine.stop()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_llmsuite(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
