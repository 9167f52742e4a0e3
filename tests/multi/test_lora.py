"""Adapters change no number on any strategy; checkpoints hold them alone, and go from one mesh to another."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import GRADIENT_LIMIT, STEPS, Case, compare, few, run_cases
from tests.parity.lora import case
from tests.support.lora_meshes import (
    ADAMW,
    DOUBLED,
    DOUBLED_EXPERTS,
    DROPOUT,
    ENDS,
    EP,
    EXPERTS,
    INT8,
    INTERLEAVED,
    NF4,
    NF4_EXPERTS,
    PP,
    PREFERENCE,
    RECOMPUTE,
    SHARED,
    SOME,
    SP,
    STATIC,
    STEM,
    TIED,
    TP,
)

DORA = {"run": ("--lora.method=dora",)}
# on a base that is quantised
LOKR = {"run": ("--lora.method=lokr", "--lora.lora_plus_ratio=1", "--lora.base_dtype=nf4", "--lora.base_block=16")}

ONES = {
    "sft": case("sft", words=("--train.micro_batch_size=8",)),
    "adamw": case("adamw", words=("--train.micro_batch_size=8",), **ADAMW),
    "tied": case("tied", words=("--train.micro_batch_size=8",), **TIED),
    "some": case("some", words=("--train.micro_batch_size=8",), **SOME),
    "dpo": case("dpo", words=("--train.micro_batch_size=8",), **PREFERENCE),
    "nf4": case("nf4", words=("--train.micro_batch_size=8",), **NF4),
    "dropout": case("dropout", words=("--train.micro_batch_size=8",), **DROPOUT),
    "shared": case("shared", words=("--train.micro_batch_size=8",), **SHARED),
    "lokr": case("lokr", words=("--train.micro_batch_size=8",), **LOKR),
    "dora": case("dora", words=("--train.micro_batch_size=8",), **DORA),
    "experts": case("experts", words=("--train.micro_batch_size=8",), **EXPERTS),
    "nf4 experts": case("nf4 experts", words=("--train.micro_batch_size=8",), **NF4_EXPERTS),
    "doubled": case("doubled", words=("--train.micro_batch_size=8",), **DOUBLED),
    "doubled experts": case("doubled experts", words=("--train.micro_batch_size=8",), **DOUBLED_EXPERTS),
    "ends": case("ends", words=("--train.micro_batch_size=8",), **ENDS),
    "int8": case("int8", **INT8),
}
# other kinds of adapters, and other meshes: test_lora and test_adapter_methods in tests/parity
MANY: dict[str, tuple[str, Case]] = {
    "tp2, sequence parallel, recompute": ("sft", case("tp-sp", 2, {**TP, **SP}, (RECOMPUTE,))),
    "tp2, static": ("sft", case("tp-static", 2, TP, (STATIC,))),
    "pp2 interleaved, tied": ("tied", case("pp-tied", 2, INTERLEAVED, **TIED)),
    "pp2, some": ("some", case("pp-some", 2, PP, **SOME)),
    "stage2": ("adamw", dataclasses.replace(case("stage2", 2, {"sharding": "stage2"}, **ADAMW), trace=True)),
    "stage3, static, recompute": ("adamw", case("stage3", 2, {"sharding": "stage3"}, (STATIC, RECOMPUTE), **ADAMW)),
    "dora, tp2, sequence parallel": ("dora", case("dora-tp", 2, {**TP, **SP}, **DORA)),
    "dropout, tp2, sequence parallel, recompute": (
        "dropout",
        case("dropout-tp", 2, {**TP, **SP}, (RECOMPUTE,), **DROPOUT),
    ),
    "shared, tp2, sequence parallel, recompute": (
        "shared",
        case("shared-tp", 2, {**TP, **SP}, (RECOMPUTE,), **SHARED),
    ),
    "shared, stage2": ("shared", case("shared-stage2", 2, {"sharding": "stage2"}, **SHARED)),
    "shared, stage3, recompute": ("shared", case("shared-stage3", 2, {"sharding": "stage3"}, (RECOMPUTE,), **SHARED)),
    "nf4 experts, ep2, stage3": (
        "nf4 experts",
        case("nf4-experts-stage3", 2, {**EP, "sharding": "stage3"}, (RECOMPUTE,), **NF4_EXPERTS),
    ),
    "ends, tp2, sequence parallel": ("ends", case("ends-tp", 2, {**TP, **SP}, **ENDS)),
    "ends, pp2": ("ends", case("ends-pp", 2, INTERLEAVED, **ENDS)),
    "experts, ep2, stage3": (
        "experts",
        case("experts-stage3", 2, {**EP, "sharding": "stage3"}, (RECOMPUTE,), **EXPERTS),
    ),
    "lokr, tp2, sequence parallel": ("lokr", case("lokr-tp", 2, {**TP, **SP}, (RECOMPUTE,), **LOKR)),
    "int8, stage3, recompute": ("int8", case("int8-stage3", 2, {"sharding": "stage3"}, (RECOMPUTE,), **INT8)),
    "dpo, tp2": ("dpo", case("dpo-tp", 2, TP, **PREFERENCE)),
    "nf4, tp2, sequence parallel, recompute": ("nf4", case("nf4-tp", 2, {**TP, **SP}, (RECOMPUTE,), **NF4)),
    "doubled, tp2, sequence parallel": ("doubled", case("doubled-tp", 2, {**TP, **SP}, **DOUBLED)),
    "doubled experts, ep2, stage3": (
        "doubled experts",
        case("doubled-experts-stage3", 2, {**EP, "sharding": "stage3"}, (RECOMPUTE,), **DOUBLED_EXPERTS),
    ),
}
MANY = few(
    MANY,
    "dora, tp2, sequence parallel", "lokr, tp2, sequence parallel", "ends, pp2", "nf4 experts, ep2, stage3",
    "experts, ep2, stage3", "nf4, tp2, sequence parallel, recompute",
    "doubled experts, ep2, stage3", "int8, stage3, recompute", "shared, tp2, sequence parallel, recompute",
    "shared, stage3, recompute",
)  # fmt: skip
CONTINUED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "adamw": (ADAMW, {**TP, **SP}),  # type: ignore[dict-item]
    "experts": (EXPERTS, EP),  # type: ignore[dict-item]
}
"""What goes on from a checkpoint of one process, and how on two."""
MUTANT = case("mutant", 2, TP, mutation="factor_of_first_rank")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = {**dict.fromkeys(one for one, _ in MANY.values()), **dict.fromkeys(CONTINUED)}
    failed = run_cases(runner, [*map(ONES.__getitem__, ones), *(many for _, many in MANY.values()), MUTANT])
    # what one process has left in the middle, continued there and on another mesh
    cases = []
    for one, (run, parallel) in CONTINUED.items():
        for name, num_ranks, on in ((f"{one}-again", 1, {}), (f"{one}-on-two", 2, parallel)):
            checkpoint = runner.directory / one / "checkpoints" / "step-1"
            shutil.copytree(checkpoint, runner.directory / name / "checkpoints" / "step-1")
            words = ("--train.micro_batch_size=8",) if on is not EP else ()
            cases.append(case(name, num_ranks, on, words, resume=True, **run))  # type: ignore[arg-type]
    return failed | run_cases(runner, cases)


@pytest.mark.parametrize("name", MANY)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = MANY[name]
    assert one not in failed, failed[one]
    assert many.name not in failed, failed[many.name]
    # a second factor begins at zero: it is nothing but a sum of gradients, and has no more digits than those
    limit = GRADIENT_LIMIT
    metrics = {}
    if one == "int8":  # after the first step, inputs may round to the next of their 255 steps
        limit = 1e-2
        metrics = dict.fromkeys(("loss", "grad_norm"), 1e-3)
    found = compare(runner, one, many.name, STEM, limit, metric_limits=metrics)
    assert found.problems == []


def test_copies_of_a_shared_factor_stay_equal(runner: Runner, failed: dict[str, str]) -> None:
    assert "shared" not in failed, failed["shared"]
    values = runner.weights("shared", STEPS, STEM)
    firsts = {name: value for name, value in values.items() if ".q_proj.lora_A" in name or ".gate_proj.lora_A" in name}
    assert len(firsts) == 8, "two for each of four layers"
    for name, value in firsts.items():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            for other in others if first in name else ():
                assert value.tobytes() == values[name.replace(first, other)].tobytes(), name


def test_nothing_is_sent_for_the_gradients_of_the_base(runner: Runner, failed: dict[str, str]) -> None:
    name = MANY["stage2"][1].name
    assert name not in failed, failed[name]
    num_trained = sum(value.size for value in runner.weights(name, STEPS, STEM).values())
    for rank in range(2):
        record = json.loads((runner.directory / name / f"traffic-{rank}.json").read_text())
        sent = sum(math.prod(shape) * count for _, shape, count in record["sent"])
        # a gradient for each micro-batch, then the updated values; a few numbers, and padding to equal parts
        assert sent == pytest.approx((len(record["micro_batches"]) + 1) * num_trained, rel=0.2)


def test_a_factor_that_is_cut_wrongly_is_noticed(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"sft", MUTANT.name} & failed.keys(), failed
    found = compare(runner, "sft", MUTANT.name, STEM, GRADIENT_LIMIT)
    assert found.problems != []
    assert max(found.metrics, found.change) > 1e-3, "not by the error alone"


@pytest.mark.parametrize("one", CONTINUED)
def test_a_checkpoint_is_continued_bit_by_bit_and_on_another_mesh(
    runner: Runner, failed: dict[str, str], one: str
) -> None:
    names = (one, f"{one}-again", f"{one}-on-two")
    assert not {*names} & failed.keys(), failed
    for stem in (STEM, "optimizer"):
        whole, again, on_two = (runner.weights(name, STEPS, stem) for name in names)
        assert whole.keys() == again.keys() == on_two.keys()
        for name, value in whole.items():
            assert value.tobytes() == again[name].tobytes(), name
            assert abs(on_two[name] - value).max() <= 1e-5 * abs(value).max(), name
    assert not list((runner.directory / one).glob("checkpoints/*/model*")), "the base was saved"
