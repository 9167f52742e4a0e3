"""What a training step sends is what it ought to send, tensor for tensor: nothing is silently brought together.

traffic.json is the budget: operation, shape of what a rank gives, how often a layer, how often besides, on which
pipeline stage ("" for every one), and why.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, many_processes, run_cases
from tests.parity.points import point
from tests.parity.traffic import Traffic

BUDGET = json.loads(Path(__file__).with_name("traffic.json").read_text())
LAYERS, HIDDEN, VOCABULARY = 4, 96, 512  # compiled batches are 64 tokens long, which is the tiny shape's width
RUNS = {
    "tensor parallel": (point(tp=2), ("tensor parallel",)),
    "sequence parallel": (point(tp=2, sequence_parallel=True), ("sequence parallel",)),
    "pipeline": (point(tp=2, pp=2, tied=True), ("tensor parallel", "pipeline", "tied pipeline")),
    "pipeline of cut sequences": (
        point(tp=2, pp=2, sequence_parallel=True),
        ("sequence parallel", "pipeline of cut sequences"),
    ),
    "compiled": (point(tp=2, mode="to_static"), ("compiled tensor parallel",)),
    "compiled, sequence parallel": (
        point(tp=2, sequence_parallel=True, mode="to_static"),
        ("compiled sequence parallel",),
    ),
}
# of the other families, with tensor parallel 2; what is not in here is as in Llama
PARTS = {
    "qwen": lambda kind: (kind, "qwen heads"),
    "gpt": lambda kind: (kind if kind == "compiled tensor parallel" else f"gpt {kind}",),
    "deepseek": lambda kind: (f"deepseek {kind}",),
}
RUNS |= {
    f"{family}, {kind}": (
        point(tp=2, sequence_parallel="sequence" in kind, mode="to_static" if "compiled" in kind else "dynamic"),
        parts(kind),
    )
    for family, parts in PARTS.items()
    for kind in ("tensor parallel", "sequence parallel", "compiled tensor parallel", "compiled sequence parallel")
}


def _case(name: str) -> Case:
    """One micro-batch a step."""
    case = many_processes(RUNS[name][0].but(micro_batch_size=2, stage="tokens"))
    words = [word.replace("global_batch_size=8", "global_batch_size=2") for word in case.words]
    words.append(f"--model.config.hidden_size={HIDDEN}")
    family = name.partition(",")[0]
    if family in PARTS:
        words.append(f"--model.family={family}")
    return dataclasses.replace(case, name=name, words=words, trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert run_cases(runner, map(_case, RUNS)) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_what_it_ought_to(runs: Runner, name: str) -> None:
    strategy, parts = RUNS[name]
    for rank in range(strategy.num_ranks):
        found, sizes = _sent(runs, name, rank)
        stage, num_stages = rank // strategy["tp"], strategy["pp"]
        expected: Traffic = collections.Counter()
        for part in ("anywhere", *parts):
            for what, shape, per_layer, besides, where, _ in BUDGET[part]:
                if where in ("", *["first"] * (stage == 0), *["last"] * (stage == num_stages - 1)):
                    dims = tuple(sizes[size] if size in sizes else int(size) for size in shape.split())
                    expected[what, dims] += per_layer * LAYERS // num_stages + besides
        assert found == +expected, (rank, sizes)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_as_long_as_the_vocabulary_travels(runs: Runner, name: str) -> None:
    for rank in range(RUNS[name][0].num_ranks):
        found, _ = _sent(runs, name, rank)
        assert [shape for _, shape in found if VOCABULARY in shape] == []


def _sent(runs: Runner, name: str, rank: int) -> tuple[Traffic, dict[str, int]]:
    """What a rank has sent in a step, and the sizes that the names in the budget stand for."""
    record = json.loads((runs.directory / name / f"traffic-{rank}.json").read_text())
    ((batch, length, supervised),) = record["micro_batches"]
    tp = RUNS[name][0]["tp"]
    sizes = {"B": batch, "L": length, "L/tp": length // tp, "N": supervised, "D": HIDDEN, "V/tp": VOCABULARY // tp}
    assert len({*sizes.values(), VOCABULARY}) == len(sizes) + 1, "sizes that are equal could be taken for each other"
    # of a head, of what DeepSeek compresses queries and keys to and rotates, and its heads and experts on a rank
    sizes |= {"K": 16, "Q": 24, "C": 16, "R": 8, "H/tp": 4 // tp, "E/tp": 8 // tp}
    return collections.Counter({(what, tuple(shape)): count for what, shape, count in record["sent"]}), sizes
