"""The teacher of a run: its memory and its messages. Each rank of the last pipeline stage has its part of the
teacher, which is split over tensor parallel, and runs it forward once for each micro-batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.contract.schema.prefix import PrefixSection
from llmsuite.contract.schema.recipe import QatSection
from llmsuite.contract.schema.reft import ReftSection
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.layout import Layout, element_bytes
from llmsuite.planning.tp_traffic import Send, TensorParallelTraffic
from llmsuite.recipe.plans import TrainPlan


class Teacher:
    """The teacher of a run, as one more model with a strategy of its own: tensor parallel and nothing else."""

    def __init__(self, layout: Layout, train_plan: TrainPlan):
        """
        Args:
            layout: of the run.
            train_plan: of the run, with a teacher.

        Raises:
            UserError: the family of the teacher has no shape spec.
        """
        plan = train_plan.teacher
        assert plan is not None
        model_plan = dataclasses.replace(
            layout.model_plan,
            section=dataclasses.replace(layout.model_plan.section, weights=None),
            family=plan.family,
            config=plan.config,
            weights=plan.weights,
            lora=LoraSection(),
            reft=ReftSection(),
            prefix=PrefixSection(),
            qat=QatSection(),
        )
        parallel = layout.parallel_plan
        tp = parallel.degrees.tp
        own = dataclasses.replace(
            parallel,
            section=dataclasses.replace(
                parallel.section,
                pipeline_parallel_degree=1,
                sequence_parallel=False,
                sharding="none",
                expert_parallel_degree=1,
            ),
            engine=dataclasses.replace(
                parallel.engine, precision=plan.precision, mode="dynamic", recompute="none", loss_chunk_tokens=None
            ),
            degrees=Degrees(pp=1, dp=1, sharding=1, tp=tp),
            num_chunks=1,
        )
        self.layout = Layout(model_plan, own)
        self._mesh = Mesh(own.degrees, 0)
        if plan.family.shape_spec is None:
            raise UserError(
                f"{plan.key}: {plan.family.name} has no `shape_spec`, without which nothing can be planned; see "
                "docs/reference/plugins.md"
            )
        self.shape_spec = plan.family.shape_spec(plan.config)
        self._train_plan = train_plan

    @functools.cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on a rank."""
        return float(sum(held.size * held.num_bytes for held in self.layout.parameters(self._mesh)))

    def send(self, batch: MicroBatch, own_reduce_scatter: bool, send: Send) -> None:
        """Record the messages of a pass over a micro-batch, with `send`; `own_reduce_scatter` as in
        `communication.Traffic`."""
        of_activations = element_bytes(self.layout.parallel_plan)

        def renamed(operation: str, shape: Sequence[int], why: str, count: int = 1, width: int = 0) -> None:
            send(operation, shape, f"teacher: {why}", count, width or of_activations)

        traffic = TensorParallelTraffic(
            self.layout, self._train_plan, self.shape_spec, self._mesh, own_reduce_scatter, renamed
        )
        traffic.forward(0, batch, with_losses=False)


def teacher_bytes(layout: Layout, train_plan: TrainPlan, mesh: Mesh) -> float:
    """Bytes of the weights of the teacher on a rank; 0 without one, and before the last pipeline stage."""
    if train_plan.teacher is None or mesh.coordinate["pp"] < mesh.degrees.pp - 1:
        return 0.0
    return Teacher(layout, train_plan).weight_bytes
