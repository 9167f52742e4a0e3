"""Saving, loading and merging beside Paddle's own, in one run, each in a process of its own: MB/s and peak memory.

python benchmarks/checkpoint.py [--megabytes 500] [--directory DIR]

The model is a Llama of that size in float32. "peak" is the highest resident memory of the process beyond what it had
when Paddle was imported and the model was there. Every row reads or writes the same tensors on the same disk; files are
flushed to it before the clock stops. Only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 7
ROOT = Path(__file__).resolve().parents[1]


def shape(megabytes: int) -> Any:
    """A Llama with about so many bytes of float32 parameters."""
    from llmsuite.models.families.llama import LlamaConfig

    hidden = 1024
    middle = 2816
    one_layer = 4 * (4 * hidden * hidden + 3 * hidden * middle)
    layers = max(1, round((megabytes * 1e6 - 2 * 4 * 8000 * hidden) / one_layer))
    return LlamaConfig(
        vocab_size=8000, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip


def state(config: Any) -> dict[str, Any]:
    """Parameters by our names, as Paddle tensors."""
    import paddle

    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.inference.load import parameter_shapes

    rng = np.random.default_rng(0)
    shapes = parameter_shapes(llmsuite_register_models()[0], config)
    return {n: paddle.to_tensor(rng.standard_normal(s, dtype="float32")) for n, s in shapes.items()}


# each case: prepare what is not measured, and give what is


def save_llmsuite(here: Path, config: Any) -> Callable[[], None]:
    from llmsuite.base.files import committed_directory
    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.checkpoint.model_writer import write_model
    from llmsuite.checkpoint.tensors import TensorSpec

    tensors = state(config)
    specs = [TensorSpec(name, tuple(t.shape), "float32") for name, t in tensors.items()]

    def work() -> None:
        manifest: dict[str, Any] = {"format": 1}
        with committed_directory(here / "llmsuite", manifest) as directory:
            family = llmsuite_register_models()[0]
            written = write_model(directory, family, config, lambda name: tensors[name].numpy(), specs, "paddlenlp")
            manifest.update(dataclasses.asdict(written))

    return work


def save_paddle(here: Path, config: Any) -> Callable[[], None]:
    import paddle

    tensors = state(config)

    def work() -> None:
        paddle.save(tensors, str(here / "paddle.pdparams"))
        flush(here / "paddle.pdparams")

    return work


def save_distcp(here: Path, config: Any) -> Callable[[], None]:
    import paddle.distributed as dist

    tensors = {re.sub(r"^model\.", "llama.", name): tensor for name, tensor in state(config).items()}

    def work() -> None:
        dist.save_state_dict(tensors, str(here / "distcp"))
        for path in (here / "distcp").iterdir():
            flush(path)
        (here / "distcp/config.json").write_text(json.dumps(config.to_hf()))

    return work


def load_llmsuite(here: Path, config: Any) -> Callable[[], None]:
    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.devices.ops import Ops

    family = llmsuite_register_models()[0]
    model = family.factory()(config, Ops())

    def load() -> None:
        source = open_model(here / "llmsuite", {"llama": family})
        for name, parameter in model.named_parameters():
            parameter.set_value(np.ascontiguousarray(source.read(name), dtype="float32"))

    return load


def load_paddle(here: Path, config: Any) -> Callable[[], None]:
    import paddle

    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.devices.ops import Ops

    model = llmsuite_register_models()[0].factory()(config, Ops())
    return lambda: model.set_state_dict(paddle.load(str(here / "paddle.pdparams")))


def merge_llmsuite(here: Path, config: Any) -> Callable[[], None]:
    import paddle  # noqa: F401  (so that its memory is not counted)

    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
    from llmsuite.checkpoint.convert.sources import open_source
    from llmsuite.inference.load import parameter_shapes

    families = {"llama": llmsuite_register_models()[0]}

    def work() -> None:
        model = open_source(here / "distcp", families, parameter_shapes)
        Rewrite(model, OutputFormat("paddlenlp", max_file_bytes=1 << 28)).write(here / "merged")

    return work


def merge_paddle(here: Path, config: Any) -> Callable[[], None]:
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_merged_state_dict

    def work() -> None:
        merged = load_merged_state_dict(str(here / "distcp"))
        paddle.save(merged, str(here / "merged.pdparams"))
        flush(here / "merged.pdparams")

    return work


CASES = {
    "save: llmsuite (hashed, atomic)": save_llmsuite,
    "save: paddle.save": save_paddle,
    "save: dist.save_state_dict": save_distcp,
    "load: llmsuite": load_llmsuite,
    "load: paddle.load": load_paddle,
    "merge: llmsuite merge (hashed, atomic)": merge_llmsuite,
    "merge: load_merged_state_dict + paddle.save": merge_paddle,
}


def against_copy(here: Path, megabytes: int) -> None:
    """Merges of the same safetensors beside plain copies of them, in turn; prints seconds as JSON.

    In turn, as the speed of a machine changes; and each removes what it has written, so that the memory the system
    keeps files in is the same for all.
    """
    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
    from llmsuite.checkpoint.convert.sources import open_source
    from llmsuite.inference.load import parameter_shapes

    families = {"llama": llmsuite_register_models()[0]}

    def source() -> Any:
        return open_source(here / "llmsuite", families, parameter_shapes)

    def copy(target: Path) -> None:
        target.mkdir()
        for path in (here / "llmsuite").glob("*.safetensors"):
            shutil.copyfile(path, target / path.name)
            flush(target / path.name)

    ways = {
        "copy": copy,
        "merge": lambda target: Rewrite(source(), OutputFormat("paddlenlp", max_file_bytes=1 << 28)).write(target),
        "other layout": lambda target: Rewrite(source(), OutputFormat("hf")).write(target),
        "bf16": lambda target: Rewrite(source(), OutputFormat("paddlenlp", "bfloat16")).write(target),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, work in ways.items():
            start = time.perf_counter()
            work(here / "again")
            if number:  # the first time what is read may not be in memory, and memory is new to the system
                seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(here / "again")
    print(json.dumps(seconds))


def stall(here: Path, megabytes: int) -> None:
    """What a step waits for a save, in the background and not; prints milliseconds and parts as JSON.

    A step is a multiplication of matrices of about a second; after every third the model is saved.
    """
    import paddle

    from llmsuite.builtin import llmsuite_register_models
    from llmsuite.checkpoint.save import GatheredTensor
    from llmsuite.checkpoint.train_state import TrainState
    from llmsuite.contract.schema.recipe import CheckpointSection
    from llmsuite.engine.checkpointer import CheckpointContents, Checkpointer

    config = shape(megabytes)
    tensors = [GatheredTensor(n, tuple(t.shape), "float32", lambda t=t: t) for n, t in state(config).items()]

    @dataclasses.dataclass
    class State:
        parameters: Any
        optimizer_state: Any

    matrix = paddle.randn([1024, 1024])

    def step(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            float(paddle.matmul(matrix, matrix)[0, 0])
        return time.perf_counter() - start

    repeats = max(1, round(20 / step(20)))
    result: dict[str, float] = {}
    for name in ("synchronous", "async"):
        section = CheckpointSection(async_save=name == "async", keep_last=2)
        root = here / f"stall-{name}"
        contents = CheckpointContents(llmsuite_register_models()[0], config, None, lambda: State(tensors, []))
        checkpointer = Checkpointer(root, section, contents)
        waits = []
        steps = []
        for number in range(1, 10):
            steps.append(step(repeats))
            checkpointer.check()
            if number % 3 == 0:
                start = time.perf_counter()
                checkpointer.save(TrainState(number, number, 0, ""))
                waits.append(time.perf_counter() - start)
        checkpointer.finish()
        result[f"{name} wait"] = float(np.median(waits))
        result[f"{name} steps"] = sum(steps)
        cpu = time.process_time()
        start = time.perf_counter()
        time.sleep(2)  # nothing is asked of it
        result[f"{name} idle"] = (time.process_time() - cpu) / (time.perf_counter() - start)
    print(json.dumps(result))


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: str, here: Path, megabytes: int) -> None:
    """One case in this process; prints seconds and peak as JSON."""
    config = shape(megabytes)
    work = CASES[case](here, config)
    before = peak()
    start = time.perf_counter()
    work()
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak() - before}))


def in_own_process(case: str, here: Path, megabytes: int) -> dict[str, Any]:
    """What a case prints."""
    command = [sys.executable, __file__, "--case", case, "--directory", str(here), "--megabytes", str(megabytes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_minloglevel": "2"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--case", default=None)
    arguments = parser.parse_args()
    if arguments.case in ("stall", "against copy"):
        {"stall": stall, "against copy": against_copy}[arguments.case](arguments.directory, arguments.megabytes)
        return
    if arguments.case:
        measure(arguments.case, arguments.directory, arguments.megabytes)
        return
    here = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="benchmark-"))
    first: dict[str, float] = {}
    rates: dict[str, float] = {}
    print(f"a Llama of {arguments.megabytes} MB in float32\n")
    print("| | MB/s | against llmsuite | peak MB |\n|---|---|---|---|")
    try:
        for case in CASES:
            result = in_own_process(case, here, arguments.megabytes)
            rate = rates[case] = arguments.megabytes / result["seconds"]
            against = rate / first.setdefault(case.partition(":")[0], rate)
            print(f"| {case} | {rate:,.0f} | {against:.2f} | {result['peak'] / 1e6:,.0f} |", flush=True)
        rounds = in_own_process("against copy", here, arguments.megabytes)
        print(
            f"\n| {ROUNDS} rounds in turn | MB/s, median | of a plain copy, median | best | worst |"
            "\n|---|---|---|---|---|"
        )
        for name, seconds in rounds.items():
            parts = np.array(rounds["copy"]) / np.array(seconds)
            values = " | ".join(f"{part:.0%}" for part in (np.median(parts), parts.max(), parts.min()))
            print(f"| {name} | {arguments.megabytes / np.median(seconds):,.0f} | {values} |", flush=True)
        result = in_own_process("stall", here, arguments.megabytes)
        waits = result["async wait"], result["synchronous wait"]
        print(f"a step waits {waits[0] * 1e3:,.0f} ms with async_save, {waits[0] / waits[1]:.0%} of the ", end="")
        print(f"{waits[1] * 1e3:,.0f} ms without; beside the writer steps take ", end="")
        print(f"{result['async steps'] / result['synchronous steps']:.2f} of their time")
        print(f"with nothing to save the process takes {result['async idle']:.1%} of a core")
    finally:
        shutil.rmtree(here)


if __name__ == "__main__":
    main()
