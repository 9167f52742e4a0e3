"""Prefixes on two ranks equal one process, and go on from a checkpoint bit by bit. `make parity` has more meshes."""

from __future__ import annotations

import shutil

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import STEPS, compare, run_cases
from tests.parity.lora import case
from tests.support.lora_meshes import INTERLEAVED, RECOMPUTE, SP, STEM, TP
from tests.support.prefix_runs import CHANGE_LIMIT, NETWORK, NETWORK_STEM, ONE_PASS, RUN


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    one = case("one", words=ONE_PASS, **RUN)  # type: ignore[arg-type]
    many = case("tp-sp", 2, {**TP, **SP}, (RECOMPUTE,), **RUN)  # type: ignore[arg-type]
    made = case("network one", words=ONE_PASS, **NETWORK)  # type: ignore[arg-type]
    cut = case("network pp", 2, INTERLEAVED, (RECOMPUTE,), **NETWORK)  # type: ignore[arg-type]
    failed = run_cases(runner, [one, many, made, cut])
    for name, again in (("one", "again"), ("network one", "network again")):
        shutil.copytree(runner.directory / name / "checkpoints/step-1", runner.directory / again / "checkpoints/step-1")
    again = case("again", words=ONE_PASS, resume=True, **RUN)  # type: ignore[arg-type]
    made_again = case("network again", words=ONE_PASS, resume=True, **NETWORK)  # type: ignore[arg-type]
    return failed | run_cases(runner, [again, made_again])


def test_tensor_and_sequence_parallel_equal_one_process(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "tp-sp"} & failed.keys(), failed
    found = compare(runner, "one", "tp-sp", STEM, CHANGE_LIMIT)
    print(f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


def test_a_network_that_all_stages_share_equals_one_process(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"network one", "network pp"} & failed.keys(), failed
    found = compare(runner, "network one", "network pp", NETWORK_STEM, CHANGE_LIMIT)
    print(f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


@pytest.mark.parametrize(
    ("one", "more", "stems"), [("one", "again", ()), ("network one", "network again", (NETWORK_STEM,))]
)
def test_a_checkpoint_is_continued_bit_by_bit(
    runner: Runner, failed: dict[str, str], one: str, more: str, stems: tuple[str, ...]
) -> None:
    assert not {one, more} & failed.keys(), failed
    for stem in (STEM, "optimizer", *stems):
        whole, again = (runner.weights(name, STEPS, stem) for name in (one, more))
        assert whole.keys() == again.keys()
        for name, value in whole.items():
            assert value.tobytes() == again[name].tobytes(), name
    saved = {path.name for path in (runner.directory / one / "checkpoints/step-3").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json"} <= saved
    assert not any(name.startswith("model") for name in saved), "the model is not saved along"
