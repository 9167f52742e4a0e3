"""Memory of a program in addition to its tensors: it is prepared for one micro-batch, and keeps no Python stacks."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from llmsuite.parallel.program.jobs import assign_slots, order_jobs
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from llmsuite.parallel.schedule import Kind, order
from tests.support import alone
from tests.support.step_programs import SGD, Product, make_batch, make_programs


@pytest.mark.parametrize("parts", [2, 4])
def test_a_program_is_prepared_for_one_micro_batch(parts: int) -> None:
    """However many there are: each is a run of the same two jobs."""
    programs, _ = make_programs(Product(), SGD)
    programs.run(1, make_batch(1), parts)
    (program,) = programs._programs.values()
    assert program.jobs is not None
    assert (len(program.jobs), len(program.jobs.runs)) == (2, 2 * parts)


@pytest.mark.parametrize(("schedule", "held"), [("1F1B", [3, 2, 1]), ("FThenB", [8, 8, 8])])
def test_a_pipeline_is_prepared_for_the_micro_batches_in_flight(schedule: Kind, held: list[int]) -> None:
    kinds = ["recv_forward", "forward", "backward", "send_backward"]
    jobs = [(kind, micro_batch) for kind in kinds for micro_batch in range(8)]
    for stage, expected in enumerate(held):
        found = assign_slots(order_jobs(jobs, order(schedule, stage, 3, 8)))
        assert sorted((run.job, run.micro_batch) for run in found) == sorted(jobs)
        assert {run.slot for run in found} == set(range(expected))
        for micro_batch in range(8):
            own = [run for run in found if run.micro_batch == micro_batch]
            assert [run.job for run in own] == kinds
            assert len({run.slot for run in own}) == 1


def test_slots_are_reused_when_all_jobs_of_a_micro_batch_are_done() -> None:
    """In any order: this is one of Paddle's own."""
    given = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("send", 0), ("backward", 1)]
    given += [("send", 1), ("backward", 2), ("send", 2)]
    assert [run.slot for run in assign_slots(order_jobs(given, None))] == [0, 1, 0, 2, 0, 1, 1, 2, 2]


def test_jobs_that_no_pass_runs_are_rejected() -> None:
    """Another version of Paddle may have such jobs: without them the step would be wrong."""
    with pytest.raises(AssertionError, match="other jobs"):
        list(order_jobs([("forward", 0), ("send_forward", 0), ("backward", 0)], order("1F1B", 0, 1, 1)))


def test_inputs_may_have_fewer_rows() -> None:
    """Such as those of pairs: a micro-batch gets its own part of each input."""

    def loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        scores = model(inputs["x"]).sum(-1).reshape([-1, 2])
        return {"loss": ((scores[:, 0] - scores[:, 1]).square() * inputs["weights"]).sum()}

    outputs = []
    batch = {"x": make_batch(1)["x"], "weights": np.array([0.25, 0.75], "float32")}
    for parts in (1, 2):
        model = Product()
        optimizer = ProgramOptimizer(alone.shards({"vector": model.vector}), SGD, 4)
        outputs.append(StepPrograms(MeshLayout(model), optimizer, loss).run(1, batch, parts))
    assert outputs[0]["loss"] > 0
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-6)


@pytest.mark.further
def test_operations_keep_no_stacks() -> None:
    """By itself Paddle would keep one of each operation that a program is made of."""
    extract_stack = traceback.extract_stack

    def num_frames() -> int:
        gc.collect()
        return sum(isinstance(found, traceback.FrameSummary) for found in gc.get_objects())

    before = num_frames()
    programs, _ = make_programs(Product(), SGD)
    programs.run(1, make_batch(1), 2)
    # the operation that fetches the loss is not made with the program; a stack has more than one frame
    assert num_frames() - before < sum(programs.operations().values())
    assert traceback.extract_stack is extract_stack
