"""The teacher in a plan: its memory is on the last pipeline stage, split over tensor parallel; and its messages."""

from __future__ import annotations

import math

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.communication import Traffic
from llmsuite.planning.cost import part_costs
from llmsuite.planning.estimate import shape_spec_of
from llmsuite.planning.layout import Layout
from llmsuite.planning.report import show_plan
from llmsuite.planning.teacher import Teacher
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated

BATCH = MicroBatch(1, 16, 12)


def planned(registry: Registry, *words: str, recipe: str = "gkd") -> RunPlan:
    return plan_run(ROOT / f"recipes/llama/{recipe}.json", words, registry)


def test_its_weights_are_on_the_last_pipeline_stage(registry: Registry) -> None:
    plan = planned(registry)
    teacher = plan.train.teacher
    assert teacher is not None
    shapes = teacher.family.names().parameter_shapes(teacher.config)
    first, last = estimated(plan).stages
    assert first.teacher == 0
    # norms are on both ranks of the tensor parallel group
    split = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    norms = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert last.teacher == 2 * (split / 2 + norms)
    kept = last.parameters + last.masters + last.moments + last.rotary_tables
    assert last.between_steps - last.teacher == kept
    whole = estimated(planned(registry, "--parallel.tensor_parallel_degree=1", "--parallel.sequence_parallel=false",
                              "--gkd.teacher_precision=fp32")).stages[1]  # fmt: skip
    assert whole.teacher == 4 * (split + norms)
    text = "\n".join(show_plan(estimated(plan), None, None))
    assert "of it for the teacher, on the last pipeline stage:" in text


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_its_messages_are_those_of_a_forward_pass_without_a_loss(registry: Registry, beta: float) -> None:
    plan = planned(registry, f"--gkd.beta={beta}")
    layout = Layout(plan.model, plan.parallel)
    assert plan.train.teacher is not None
    found = {}
    for rank in (0, plan.parallel.degrees.num_ranks - 1):
        mesh = Mesh(plan.parallel.degrees, rank)
        counts = Traffic(layout, plan.train, shape_spec_of(plan.model), mesh, [BATCH], [], True).counts
        found[rank] = {
            (m.operation, m.shape, m.why): n for m, n in counts.items() if m.why.startswith(("teacher", "d"))
        }
    first, last = found.values()
    assert not [why for _, _, why in first if why.startswith(("teacher", "divergence"))]
    size = (1, 16, 5120)
    assert last["all_reduce", size, "teacher: embedding: its rows are on different ranks"] == 1
    # attention and MLP of 40 layers
    assert last["all_reduce", size, "teacher: forward: sums after attention and MLP"] == 80
    numbers = {shape: n for (_, shape, why), n in last.items() if why.startswith("divergence")}
    assert numbers == ({(2, 12): 3} if beta else {(2, 12): 2, (12,): 1})


def test_its_passes_count_with_the_last_part(registry: Registry) -> None:
    plan = planned(registry)
    layout = Layout(plan.model, plan.parallel)
    shape_spec = shape_spec_of(plan.model)
    costs = part_costs(layout, plan.train, shape_spec, BATCH)
    alone = part_costs(layout, planned(registry, recipe="sft").train, shape_spec, BATCH)
    assert costs[0] == alone[0]
    values = sum(math.prod(shape) for name, shape in Teacher(layout, plan.train).layout.shapes.items())
    # two for each weight a token is multiplied with, but for the embedding, and at supervised positions for the head
    assert costs[1].forward - alone[1].forward == pytest.approx(2 * values * 16, rel=0.03)
    assert costs[1].backward == alone[1].backward
