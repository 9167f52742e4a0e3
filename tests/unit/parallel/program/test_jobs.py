"""What a program costs beside its tensors: it is prepared for one micro-batch, and keeps no Python stacks."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from llmsuite.parallel.program.jobs import ordered, turns
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from llmsuite.parallel.schedule import Kind, order
from tests.unit import alone
from tests.unit.parallel.program.test_programs import SGD, Product, _batch, _programs


@pytest.mark.parametrize("parts", [2, 4])
def test_is_prepared_for_one_micro_batch(parts: int) -> None:
    """However many there are: each is a call of the same two jobs."""
    programs, _ = _programs(Product(), SGD)
    programs.run(1, _batch(1), parts)
    (program,) = programs._programs.values()
    assert program.jobs is not None
    assert (len(program.jobs), len(program.jobs.turns)) == (2, 2 * parts)


@pytest.mark.parametrize(("schedule", "held"), [("1F1B", [3, 2, 1]), ("FThenB", [8, 8, 8])])
def test_a_pipeline_is_prepared_for_what_it_holds(schedule: Kind, held: list[int]) -> None:
    kinds = ["recv_forward", "forward", "backward", "send_backward"]
    jobs = [(kind, micro_batch) for kind in kinds for micro_batch in range(8)]
    for stage, expected in enumerate(held):
        found = turns(ordered(jobs, order(schedule, stage, 3, 8)))
        assert sorted((turn.job, turn.micro_batch) for turn in found) == sorted(jobs)
        assert {turn.place for turn in found} == set(range(expected))
        for micro_batch in range(8):
            own = [turn for turn in found if turn.micro_batch == micro_batch]
            assert [turn.job for turn in own] == kinds
            assert len({turn.place for turn in own}) == 1


def test_places_are_taken_again_when_all_is_done() -> None:
    """Whatever the order is: one of Paddle's own."""
    given = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("send", 0), ("backward", 1)]
    given += [("send", 1), ("backward", 2), ("send", 2)]
    assert [turn.place for turn in turns(ordered(given, None))] == [0, 1, 0, 2, 0, 1, 1, 2, 2]


def test_jobs_that_no_pass_runs_are_refused() -> None:
    """Such as another Paddle may have: without them a step would be another one."""
    with pytest.raises(AssertionError, match="other jobs"):
        list(ordered([("forward", 0), ("send_forward", 0), ("backward", 0)], order("1F1B", 0, 1, 1)))


def test_inputs_may_have_fewer_rows() -> None:
    """As those of pairs: of each input a micro-batch gets its own part."""

    def loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        scores = model(inputs["x"]).sum(-1).reshape([-1, 2])
        return {"loss": ((scores[:, 0] - scores[:, 1]).square() * inputs["weights"]).sum()}

    told, batch = [], {"x": _batch(1)["x"], "weights": np.array([0.25, 0.75], "float32")}
    for parts in (1, 2):
        model = Product()
        optimizer = ProgramOptimizer(alone.shards({"vector": model.vector}), SGD, 4)
        told.append(StepPrograms(model, optimizer, loss).run(1, batch, parts))
    assert told[0]["loss"] > 0
    assert told[1] == pytest.approx(told[0], rel=1e-6)


def test_operations_keep_no_stacks() -> None:
    """By itself Paddle would keep one of each operation that a program is made of."""
    extract_stack = traceback.extract_stack

    def num_frames() -> int:
        gc.collect()
        return sum(isinstance(found, traceback.FrameSummary) for found in gc.get_objects())

    before = num_frames()
    programs, _ = _programs(Product(), SGD)
    programs.run(1, _batch(1), 2)
    # what fetches the loss is made beside the program; a stack has more than one frame
    assert num_frames() - before < sum(programs.operations().values())
    assert traceback.extract_stack is extract_stack
