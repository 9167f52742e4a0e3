"""Adapters on strategies: what is run, on how many ranks, and compared with one process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, Comparison, compare, four_layers, norm, once, run_cases

LORA = ("--lora.rank=4", "--lora.lora_plus_ratio=4")

VECTOR_LIMIT = 1e-4
"""How far the gradient of a factor may be off that begins with singular vectors of a gradient. They are as exact as the
rounding of that gradient, about 2e-7 of its largest singular value, divided by the distance to the next one, which is
down to a hundredth of the largest in these shapes. So vectors are off by up to 3e-5, and in one process with
micro-batches of 1 by 2.5e-6; and the gradient of a factor is a product with those of the other one."""
UPDATE_LIMIT = 2e-5
"""How far what such adapters have learnt may be off, as an update of their matrix: it depends on the space that the
vectors span more than on each of them. In one process with micro-batches of 1 it is off by 2e-6; between meshes by up
to 5e-6, in attention of the latent kind 8e-6."""


def recipe(family: str, stage: str = "lora") -> str:
    """The recipe of a stage; adapters go with all of them."""
    return f"recipes/{family}/{stage}.json"


def case(
    name: str,
    num_ranks: int = 1,
    parallel: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    run: Sequence[str] = (),
    family: str = "llama",
    stage: str = "lora",
    optimizer: str = "sgd",
    mutation: str | None = None,
    resume: bool = False,
) -> Case:
    """A run of adapters.

    Args:
        name: of its directory.
        num_ranks: of the launch.
        parallel: the section of the recipe.
        words: how it is computed; with a micro-batch of 1 where they say nothing, to add up gradients.
        run: what is computed; the run in one process has it too.
        family: of the model.
        stage: whose recipe is taken.
        optimizer: which of `OPTIMIZERS`.
        mutation: an error that is put in.
        resume: see `Case`.
    """
    micro = (
        () if any(word.startswith("--train.micro_batch_size") for word in words) else ("--train.micro_batch_size=1",)
    )
    one = ("--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}", "--engine.recompute=none")
    many = ("--checkpoint.save_steps=null",)
    every = [*COMMON, *OPTIMIZERS[optimizer], *four_layers(family), *LORA, *run]
    given = [*(one if num_ranks == 1 else many), *micro, f"--parallel={json.dumps(parallel or {})}", *words]
    words = once([*every, f"--launch.num_devices={num_ranks}", *given])
    return Case(name, num_ranks, words, mutation, recipe(family, stage), resume=resume)


def compare_updates(runner: Runner, one: str, many: str) -> Comparison:
    """Compare adapters that begin with singular vectors of a gradient with those of one process: metrics as everywhere,
    and of the factors the product, which is what a matrix becomes."""
    found = compare(runner, one, many, "adapter_model", math.inf, gradient_limit=VECTOR_LIMIT)
    updates, others = (_updates(runner, name) for name in (one, many))
    assert updates.keys() == others.keys()
    changes = {name: norm(others[name] - update) / norm(update) for name, update in updates.items()}
    found.change = max(found.check(f"update of {name}", far, UPDATE_LIMIT) for name, far in changes.items())
    return found


def _updates(runner: Runner, name: str) -> dict[str, np.ndarray]:
    """B A in the layout of PEFT, by module, after the last step."""
    values = {key: value.astype("float64") for key, value in runner.weights(name, STEPS, "adapter_model").items()}
    first = ".lora_A.weight"
    modules = [key.removesuffix(first) for key in values if key.endswith(first)]
    return {module: values[f"{module}.lora_B.weight"] @ values[f"{module}{first}"] for module in modules}


def run_and_continue(runner: Runner, cases: Sequence[Case], continued: Mapping[str, Case]) -> dict[str, str]:
    """Run cases, then others that go on from the first step of some of them. Returns what `run_cases` does.

    Args:
        runner: that runs them.
        cases: to be run first.
        continued: names of some of these, and the cases that go on; `check_continued` compares them.
    """
    failed = run_cases(runner, cases)
    for whole, again in continued.items():
        step = "checkpoints/step-1"
        shutil.copytree(runner.directory / whole / step, runner.directory / again.name / step)
    return failed | run_cases(runner, list(continued.values()))


def check_continued(runner: Runner, whole: str, again: str, stems: Sequence[str]) -> None:
    """Assert that a run which went on from the first step of another has what that has, bit for bit.

    Args:
        runner: that ran both.
        whole: name of the run that was not stopped.
        again: name of the one that went on.
        stems: of the files to compare, the parameters' first; these have to have changed since the first step.
    """
    for stem in stems:
        ours, theirs = (runner.weights(name, STEPS, stem) for name in (whole, again))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.tobytes() == theirs[name].tobytes(), name
    before, after = (runner.weights(whole, step, stems[0]) for step in (1, STEPS))
    assert any((value != before[name]).any() for name, value in after.items())
