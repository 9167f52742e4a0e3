"""The communication of a training step: every collective and message of a rank, on every axis of the mesh."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Sequence

from llmsuite.models.anatomy import Anatomy, MoE
from llmsuite.models.prefix_shapes import is_in_every_part
from llmsuite.models.shard_plan import BEHIND, BETWEEN, MIXER, SECOND_FACTOR, STRUCTURES
from llmsuite.parallel import edges, ledger_entries
from llmsuite.parallel.gather_units import GatherUnit, gather_units
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes
from llmsuite.planning.tp_traffic import TensorParallelTraffic
from llmsuite.recipe.resolve import RunPlan
from llmsuite.specs import PrePass

TENSOR, DATA, SHARDING, DP, PIPELINE, EXPERT, RUN = "tp", "data", "sharding", "dp", "pp", "ep", "run"
MODEL = "model"
READERS, TIED = "readers", "tied"
"""Ranks that read data; the two that hold a tied embedding, on the first and the last pipeline stage."""
GROUP_AXES = {
    TENSOR: ("tp",),
    DATA: ("dp", "sharding"),
    SHARDING: ("sharding",),
    DP: ("dp",),
    EXPERT: ("ep",),
    MODEL: ("pp", "tp"),
}
"""The axes of the mesh along which the ranks of each group differ."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A tensor that a rank passes to a collective, or sends."""

    axis: str
    operation: str
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of an element."""
    why: str
    of_experts: bool = False
    """Whether the group belongs to the mesh of experts."""
    is_exact: bool = True
    """False for tokens sent to experts: their number depends on their values."""

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * self.num_bytes


Counts = dict[Message, int]
"""How often each message is sent."""


_WHY_SENT: dict[edges.Content, str] = {
    "header": "the shapes and the dtype of what follows",
    "document_starts": "where documents begin",
    "activations": "activations to the next part",
    "gradients": "gradients to the part before",
}


class Traffic:
    """The messages of one rank in a training step, including pre-passes."""

    def __init__(
        self,
        layout: Layout,
        anatomy: Anatomy,
        mesh: Mesh,
        batches: Sequence[MicroBatch],
        own_reduce_scatter: bool,
        prepasses: Sequence[Sequence[MicroBatch]] | None = None,
    ):
        """
        Args:
            layout: of the run.
            anatomy: of its model.
            mesh: the rank's place.
            batches: its micro-batches.
            own_reduce_scatter: whether the collective library has one; over Gloo it is an all_reduce.
            prepasses: the micro-batches of each of `model_prepasses`; None for full ones.
        """
        self._layout, self._anatomy, self._mesh, self._batches = layout, anatomy, mesh, batches
        self._own, self._plan = own_reduce_scatter, layout.plan
        self._parameters = layout.parameters(mesh)
        self._width = element_bytes(self._plan)
        self._compiled = self._plan.recipe.engine.mode == "to_static"
        self._sequence_parallel = self._plan.recipe.parallel.sequence_parallel
        self.counts: Counts = {}
        self._times = 1
        stage, degrees = mesh.coordinate["pp"], mesh.degrees
        tensor = TensorParallelTraffic(layout, anatomy, mesh, own_reduce_scatter, functools.partial(self._add, TENSOR))
        for batch, self._times in collections.Counter(batches).items():
            for part in layout.parts_of(stage):
                if degrees.tp > 1:
                    tensor.forward(part, batch)
                    tensor.backward(part, batch)
                if degrees.ep > 1:
                    self._experts(part, batch, with_backward=True)
                if degrees.pp > 1:
                    self._edges(part, batch, with_backward=True)
        passes_of = full_prepasses(self._plan, batches) if prepasses is None else prepasses
        for prepass, passes in zip(model_prepasses(self._plan), passes_of, strict=True):
            for batch, self._times in collections.Counter(passes).items():
                for part in layout.parts_of(stage):
                    if degrees.tp > 1:
                        tensor.forward(part, batch, prepass.with_adapters)
                    if degrees.ep > 1:
                        self._experts(part, batch, with_backward=False)
                    if degrees.pp > 1:
                        self._edges(part, batch, with_backward=False)
        if layout.sharding == 3:
            self._times = len(batches)
            self._gathers(with_backward=True)
            self._times = sum(map(len, passes_of))
            self._gathers(with_backward=False)
        self._times = 1
        self._gradients()
        self._small()

    def _add(
        self,
        axis: str,
        operation: str,
        shape: Iterable[int],
        why: str,
        count: int = 1,
        width: int = 0,
        experts: bool = False,
    ) -> None:
        message = Message(axis, operation, tuple(shape), width or self._width, why, experts)
        if count:
            self.counts[message] = self.counts.get(message, 0) + count * self._times

    # experts

    def _experts(self, part: int, batch: MicroBatch, with_backward: bool) -> None:
        engine, mesh = self._plan.recipe.engine, self._mesh
        for number in self._layout.layers_of(part):
            what = self._anatomy.layers[number].mlp
            if not isinstance(what, MoE):
                continue
            again = with_backward and engine.computes_again(number)
            times = 2 if again else 1
            slots = what.experts // mesh.degrees.tp
            self._add(EXPERT, "all_gather", (slots,), "rows of each rank for each expert", times, 8, True)
            # dispatch and combine, forward and backward, with an even load
            ep, exchanges = mesh.degrees.ep, 2 * times + 2 * with_backward
            rows = round(batch.tokens * what.chosen / mesh.degrees.tp / ep)
            why = "tokens to the ranks of their experts, and back"
            if self._own:
                self._exchange("all_to_all", rows * ep, why, exchanges)
            else:
                self._exchange("send", rows, why, exchanges * (ep - 1))
            if with_backward and self._drops_rows(number):
                why = "keys of tokens, for dropout"
                if self._own:
                    self._exchange("all_to_all", rows * ep, why, times, (1, 4))
                else:
                    self._exchange("send", rows, why, times * (ep - 1), (1, 4))

    def _drops_rows(self, number: int) -> bool:
        """Whether adapters of the routed experts of a layer drop some of their inputs."""
        layout, inside = self._layout, f"{self._layout.shard_plan.layers}.{number}."
        adapted = (f"{module}.weight" for module in layout.adapted if module.startswith(inside))
        return self._plan.recipe.lora.dropout > 0 and any(layout.shard_plan.is_expert(name) for name in adapted)

    def _exchange(self, operation: str, rows: int, why: str, count: int, size: tuple[int, int] | None = None) -> None:
        """Add an exchange of rows. `size`: their elements, and bytes of each; by default those of hidden states."""
        width, num_bytes = size or (self._anatomy.hidden, self._width)
        message = Message(EXPERT, operation, (rows, width), num_bytes, why, True, False)
        self.counts[message] = self.counts.get(message, 0) + count * self._times

    # stage 3

    def _gathers(self, with_backward: bool) -> None:
        why, layout = "parameters are gathered, forward and backward", self._layout
        for part in layout.parts_of(self._mesh.coordinate["pp"]):
            inside = {parameter.name: parameter for parameter in self._parameters if parameter.part == part}
            for unit in gather_units(layout.shard_plan, list(inside), layout.tied):
                if not (times := self._runs(unit, part)):
                    continue
                for held in (inside[name] for name in unit.parameters if inside[name].is_stored_in_parts):
                    # no backward pass reaches a frozen module in front of the layers
                    is_passed_back = with_backward and (held.is_trained or unit.place != "front")
                    count = 2 * times if is_passed_back and held.name in unit.in_backward else times
                    self._add(SHARDING, "all_gather", (held.piece,), why, count, held.num_bytes, held.is_expert)

    def _runs(self, unit: GatherUnit, part: int) -> int:
        """How often a forward pass through a part runs the module of a unit."""
        last = len(self._layout.bounds) - 2
        is_lookup = unit.place == "front" and unit.module == self._layout.shard_plan.embedding
        further = self._layout.num_mtp_layers if is_lookup and part == last else 0
        return unit.runs_in(part, last + 1) + further

    # pipeline

    def _edges(self, part: int, batch: MicroBatch, with_backward: bool) -> None:
        """Activations to the next part, gradients to the one before."""
        num_parts = len(self._layout.bounds) - 1
        length = batch.length // (self._mesh.degrees.tp if self._sequence_parallel else 1)
        shape = (batch.rows, length, self._anatomy.hidden)
        documents_length = batch.length if batch.documents or batch.marked else 0
        for forward in (True, False) if with_backward else (True,):
            if edges.target(part, num_parts, forward) is None:
                continue
            for message in edges.messages(forward, shape, documents_length):
                width = 8 if message.is_int64 else self._width
                self._add(PIPELINE, "send", message.shape, _WHY_SENT[message.content], width=width)

    # once a step

    def _gradients(self) -> None:
        for parameter in self._parameters:
            if not parameter.is_trained:
                continue
            if parameter.has_gradient:
                self._gradient(parameter)
            if parameter.parts > 1 and not parameter.is_stored_in_parts:
                why = "updated parameters, from the ranks that own the pieces"
                self._add(SHARDING, "all_gather", (parameter.piece,), why, 1, parameter.num_bytes, parameter.is_expert)
        for bucket in self._layout.buckets(self._mesh):
            self._bucket(bucket)

    def _gradient(self, parameter: LocalParameter) -> None:
        """The reductions of one gradient on its own, outside of buckets."""
        width = 4 if parameter.reduce_in_backward else parameter.num_bytes
        degrees = self._mesh.degrees
        if degrees.tp > 1 and self._is_partial(parameter):
            why = "gradients of norms, from each rank's tokens or heads"
            inside = self._compiled and self._is_compiled(parameter)
            times = len(self._batches) if parameter.reduce_in_backward or inside else 1
            self._add(TENSOR, "all_reduce", parameter.local_shape, why, times, width)
        if parameter.is_tied:
            why = "gradient of the embedding, of first and last stage"
            self._add(TIED, "all_reduce", parameter.owned_shape, why, 1, width)
        if is_in_every_part(parameter.name) and parameter.num_owned and degrees.pp * degrees.tp > 1:
            why = "gradients of the prefix's network, of all layers and heads"
            self._add(MODEL, "all_reduce", parameter.owned_shape, why, 1, width)

    def _bucket(self, bucket: Sequence[LocalParameter]) -> None:
        """The reduction of a bucket of gradients over data ranks."""
        first, together = bucket[0], len(bucket) > 1
        width = 4 if first.reduce_in_backward else first.num_bytes
        whole = (sum(parameter.sum_size for parameter in bucket),)
        if not first.reduces_each_pass:
            shape = whole if together else first.local_shape
            self._add(DATA, "all_reduce", shape, "gradients", 1, width, first.is_expert)
            return
        operation = "reduce_scatter" if self._own else "all_reduce"
        why = "gradients, in each backward pass"
        self._add(SHARDING, operation, whole, why, len(self._batches), width, first.is_expert)
        if (self._mesh.of_experts if first.is_expert else self._mesh).degrees.dp > 1:
            pieces = (sum(parameter.piece for parameter in bucket),)
            self._add(DP, "all_reduce", pieces, "gradients", 1, width, first.is_expert)

    def _is_compiled(self, parameter: LocalParameter) -> bool:
        """Whether the module of a parameter is compiled."""
        return parameter.layer is not None and self._anatomy.layers[parameter.layer].compiles(parameter.name)

    def _is_partial(self, parameter: LocalParameter) -> bool:
        """Whether each rank has the gradient of its own tokens or heads only, which Paddle leaves to be reduced."""
        module = parameter.name.rpartition(".")[0]
        of_heads = module.endswith((".q_norm", ".k_norm"))
        between = (
            module.endswith(("input_layernorm", "post_attention_layernorm"))
            or self._layout.shard_plan.is_last_norm(module)
            or any(fnmatch.fnmatchcase(module, pattern) for pattern in self._layout.shard_plan.mtp_inputs)
        )
        if parameter.name.endswith(tuple(f".{kind}" for kind in STRUCTURES)):
            return self._layout.shard_plan.dim(f"{module}.weight") is not None or (self._sequence_parallel and between)
        second = parameter.name.endswith(tuple(f".{kind}" for kind in (SECOND_FACTOR, MIXER, BETWEEN, BEHIND)))
        second = second and self._layout.shard_plan.dim(f"{module}.weight") == 0
        second = second and self._layout.shard_plan.is_region(module.rpartition(".")[0])
        second = second or parameter.name == f"{self._layout.shard_plan.embedding}.{SECOND_FACTOR}"
        return of_heads or (self._sequence_parallel and (between or second))

    def _small(self) -> None:
        """Messages of a few numbers: the loss ledger, the norm of the gradients, loads of experts."""
        degrees, profile = self._mesh.degrees, self._plan.profile
        if degrees.num_ranks == 1:
            return
        sums = 1 + len(profile.sums)  # the loss, and the stage's metrics
        if self._mesh.reads_data:
            axis = READERS if self._mesh.has_middle else RUN
            self._add(axis, "all_reduce", (ledger_entries.num_of_readers(sums),), "ledger of the loss", width=8)
            if known := sum(len(prepass.sums) for prepass in profile.prepasses):
                self._add(axis, "all_reduce", (2 * known,), "sums of the pre-passes", width=8)
        if self._mesh.has_middle:
            numbers = (ledger_entries.num_of_run(),)
            self._add(RUN, "all_reduce", numbers, "ledger of the loss, for ranks without data", width=8)
        self._add(RUN, "all_reduce", (1,), "norm of the gradients", width=8)
        if self._layout.rounded and self._plan.recipe.qat.activation_bits is not None:
            self._add(RUN, "all_reduce", (len(self._layout.rounded),), "largest inputs of quantised layers", width=8)
        moe_layers = [layer.mlp for layer in self._anatomy.layers if isinstance(layer.mlp, MoE)]
        if not moe_layers:
            return
        if self._plan.recipe.train.expert_bias_rate:
            for held in self._parameters:
                if self._layout.shard_plan.is_gate_bias(held.name) and held.is_stored_in_parts:
                    why = "biases of experts, which are moved"
                    self._add(SHARDING, "all_gather", (held.piece,), why, 1, held.num_bytes, held.is_expert)
        parts = self._layout.parts_of(self._mesh.coordinate["pp"])
        here = sum(isinstance(self._anatomy.layers[i].mlp, MoE) for p in parts for i in self._layout.layers_of(p))
        if here and degrees.num_data_ranks > 1:
            self._add(DATA, "all_reduce", (here, moe_layers[0].experts), "loads of experts", width=4)
        self._add(RUN, "all_reduce", (3,), "loads of experts", width=8)
        if self._plan.recipe.train.expert_balance_loss:
            self._add(RUN, "all_reduce", (2,), "weight of the balance loss", width=8)


def model_prepasses(plan: RunPlan) -> list[PrePass]:
    """The pre-passes that run the model."""
    return [prepass for prepass in plan.profile.prepasses if prepass.kind != "batch"]


def full_prepasses(plan: RunPlan, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """The micro-batches of each pre-pass, with rows as long as those of the step. Their padding is not marked."""
    marked = plan.recipe.data.packing != "none"
    return [
        [
            dataclasses.replace(
                b, rows=prepass.rows * b.rows, supervised=prepass.rows * b.supervised, documents=marked, marked=False
            )
            for b in batches
        ]
        for prepass in model_prepasses(plan)
    ]
