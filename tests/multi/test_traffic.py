"""What a training step sends is what it ought to send, tensor for tensor: nothing is silently brought together.

traffic.json is the budget: operation, shape of what a rank gives, how often a layer, how often besides, on which
pipeline stage ("" for every one), and why.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, many_processes, once, run_cases
from tests.parity.points import point
from tests.parity.traffic import Traffic
from tests.support.families import tiny

BUDGET = json.loads(Path(__file__).with_name("traffic.json").read_text())
LAYERS = 4  # compiled batches are 64 tokens long, which is the tiny shape's width
HIDDEN = 96
VOCABULARY = 512
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
    "deepseek": lambda kind: (f"deepseek {kind}", "deepseek balance"),
}
RUNS |= {
    f"{family}, {kind}": (
        point(tp=2, sequence_parallel="sequence" in kind, mode="to_static" if "compiled" in kind else "dynamic"),
        parts(kind),
    )
    for family, parts in PARTS.items()
    for kind in ("tensor parallel", "sequence parallel", "compiled tensor parallel", "compiled sequence parallel")
}
EXPERTS = "deepseek, expert parallel"


def _case(name: str) -> Case:
    """One micro-batch a step. What is sent in the second step is sent in all that follow."""
    strategy = point(data_ranks=2) if name == EXPERTS else RUNS[name][0]
    case = many_processes(strategy.but(micro_batch_size=2, stage="tokens"))
    size = 2 * strategy["data_ranks"]
    words = [word.replace("global_batch_size=8", f"global_batch_size={size}") for word in case.words]
    words += [f"--model.config.hidden_size={HIDDEN}", "--train.max_steps=2"]
    if name == EXPERTS:
        words.append("--parallel.expert_parallel_degree=2")
    family = name.partition(",")[0]
    if family in PARTS:
        words.append(f"--model.family={family}")
    return dataclasses.replace(case, name=name, words=once(words), trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert run_cases(runner, map(_case, [*RUNS, EXPERTS])) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_what_it_ought_to(runs: Runner, name: str) -> None:
    strategy, parts = RUNS[name]
    for rank in range(strategy.num_ranks):
        found, sizes = _sent(runs, name, rank)
        stage = rank // strategy["tp"]
        num_stages = strategy["pp"]
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


def test_experts_of_two_ranks_exchange_rows_and_no_parameters(runs: Runner) -> None:
    """Their weights are not added up over the ranks, nor brought together; nothing is padded or sent to everybody."""
    shapes = {name: tuple(p.shape) for name, p in tiny("deepseek", hidden_size=HIDDEN).named_parameters()}
    reduced = [shape for name, shape in shapes.items() if not name.endswith("bias") and ".experts." not in name]
    numbers = sum(math.prod(shape) for shape in reduced)  # all of them in one bucket
    experts = {shape for name, shape in shapes.items() if ".mlp.experts." in name}
    num_rows = num_pairs = 0
    for rank in range(2):
        found, (batch, length, _) = _record(runs, EXPERTS, rank)
        expected: Traffic = collections.Counter({("all_reduce", (numbers,)): 1})
        sizes: dict[str, Any] = {"E": 8, "D": HIDDEN, "rows": "rows"}
        for part in ("anywhere", "deepseek balance", "deepseek expert parallel"):
            for what, shape, _, count, _, _ in BUDGET[part]:
                expected[what, tuple(sizes[size] if size in sizes else int(size) for size in shape.split())] += count
        rows = {key: count for key, count in found.items() if key[0] == "send"}
        assert {shape[1:] for _, shape in rows} == {(HIDDEN,)}
        num_rows += sum(shape[0] * count for (_, shape), count in rows.items())
        num_pairs += batch * length * 2 * (LAYERS - 1)
        together = found - collections.Counter(rows)
        together["send", ("rows", HIDDEN)] = sum(rows.values())  # type: ignore[index]
        assert together == +expected
        assert not {shape for _, shape in found} & experts
    # there and back, forward and backward: those whose expert is on the other rank
    assert 0 < num_rows < 4 * num_pairs


def _sent(runs: Runner, name: str, rank: int) -> tuple[Traffic, dict[str, int]]:
    """What a rank has sent in a step, and the sizes that the names in the budget stand for."""
    found, (batch, length, supervised) = _record(runs, name, rank)
    tp = RUNS[name][0]["tp"]
    sizes = {"B": batch, "L": length, "L/tp": length // tp, "N": supervised, "D": HIDDEN, "V/tp": VOCABULARY // tp}
    assert len({*sizes.values(), VOCABULARY}) == len(sizes) + 1, "sizes that are equal could be taken for each other"
    # of a head, of what DeepSeek compresses queries and keys to and rotates, its heads on a rank, experts of a token
    sizes |= {"K": 16, "Q": 24, "C": 16, "R": 8, "H/tp": 4 // tp, "k": 2}
    return found, sizes


def _record(runs: Runner, name: str, rank: int) -> tuple[Traffic, list[int]]:
    """What a rank has sent in a step, and sequences, length and supervised tokens of its one micro-batch."""
    record = json.loads((runs.directory / name / f"traffic-{rank}.json").read_text())
    ((*sizes, _),) = record["micro_batches"]
    return collections.Counter({(what, tuple(shape)): count for what, shape, count in record["sent"]}), sizes
