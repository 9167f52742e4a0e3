"""Prefixes on two ranks equal one process, and go on from a checkpoint bit by bit. `make parity` has more meshes."""

from __future__ import annotations

import shutil

import pytest

from tests.multi.conftest import Runner
from tests.multi.test_lora import RECOMPUTE, SP, STEM, TP
from tests.parity.cases import GRADIENT_LIMIT, STEPS, compare, run_cases
from tests.parity.lora import case

PREFIX = ("--lora.rank=null", "--lora.lora_plus_ratio=1", "--prefix.tokens=6", "--data.packing=best_fit")
RUN = {"stage": "sft", "run": (*PREFIX, "--train.learning_rate=10", "--train.max_grad_norm=null")}
CHANGE_LIMIT = GRADIENT_LIMIT
"""What has changed is made of three gradients, and so as far off as they are."""
ONE_PASS = ("--train.micro_batch_size=8",)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    one = case("one", words=ONE_PASS, **RUN)  # type: ignore[arg-type]
    many = case("tp-sp", 2, {**TP, **SP}, (RECOMPUTE,), **RUN)  # type: ignore[arg-type]
    failed = run_cases(runner, [one, many])
    shutil.copytree(runner.directory / "one/checkpoints/step-1", runner.directory / "again/checkpoints/step-1")
    return failed | run_cases(runner, [case("again", words=ONE_PASS, resume=True, **RUN)])  # type: ignore[arg-type]


def test_tensor_and_sequence_parallel_equal_one_process(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "tp-sp"} & failed.keys(), failed
    found = compare(runner, "one", "tp-sp", STEM, CHANGE_LIMIT)
    print(f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


def test_a_checkpoint_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "again"} & failed.keys(), failed
    for stem in (STEM, "optimizer"):
        whole, again = (runner.weights(name, STEPS, stem) for name in ("one", "again"))
        assert whole.keys() == again.keys()
        for name, value in whole.items():
            assert value.tobytes() == again[name].tobytes(), name
    saved = {path.name for path in (runner.directory / "one/checkpoints/step-3").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json"} <= saved
    assert not any(name.startswith("model") for name in saved), "the model is not saved along"
