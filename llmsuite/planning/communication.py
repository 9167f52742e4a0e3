"""What a rank sends in a training step: every collective of every axis, as the engine does them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from llmsuite.models.anatomy import Anatomy, MoE
from llmsuite.models.shard_plan import SECOND_FACTOR
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import Pass
from llmsuite.planning.layout import BYTES, Held, Layout
from llmsuite.planning.tp_traffic import AlongTensor
from llmsuite.recipe.resolve import RunPlan
from llmsuite.specs import PrePass

TENSOR, DATA, SHARDING, DP, PIPELINE, EXPERT, RUN = "tp", "data", "sharding", "dp", "pp", "ep", "run"
AXES = {TENSOR: ("tp",), DATA: ("dp", "sharding"), SHARDING: ("sharding",), DP: ("dp",), EXPERT: ("ep",)}
"""Of the mesh, for each axis that has groups of its own."""


@dataclasses.dataclass(frozen=True)
class Message:
    """What a rank gives to a collective, or sends."""

    axis: str
    operation: str
    shape: tuple[int, ...]
    num_bytes: int
    """Of an element."""
    why: str
    of_experts: bool = False
    """Whether the group is one of the mesh of experts."""
    is_exact: bool = True
    """False for rows on their way to experts: how many there are depends on their values."""

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * self.num_bytes


Counts = dict[Message, int]
"""How often each."""


class Traffic:
    """What one rank sends in a step."""

    def __init__(
        self,
        layout: Layout,
        anatomy: Anatomy,
        mesh: Mesh,
        batches: Sequence[Pass],
        own_reduce_scatter: bool,
        prepasses: Sequence[Sequence[Pass]] | None = None,
    ):
        """
        Args:
            layout: of the run.
            anatomy: of its model.
            mesh: the rank's place.
            batches: its micro-batches.
            own_reduce_scatter: whether the library has one; over Gloo it is made of an all_reduce.
            prepasses: the micro-batches of each of `model_prepasses`; None for full ones.
        """
        self._layout, self._anatomy, self._mesh, self._batches = layout, anatomy, mesh, batches
        self._own, self._plan = own_reduce_scatter, layout.plan
        self._held = layout.held(mesh)
        self._width = BYTES[self._plan.recipe.engine.precision]
        self._compiled = self._plan.recipe.engine.mode == "to_static"
        self._cut = self._plan.recipe.parallel.sequence_parallel
        self.counts: Counts = {}
        self._times = 1
        stage, degrees = mesh.coordinate["pp"], mesh.degrees
        tensor = AlongTensor(layout, anatomy, mesh, own_reduce_scatter, functools.partial(self._add, TENSOR))
        for batch, self._times in collections.Counter(batches).items():
            for part in layout.parts_of(stage):
                if degrees.tp > 1:
                    tensor.forward(part, batch)
                    tensor.backward(part, batch)
                if degrees.ep > 1:
                    self._experts(part, batch, is_supervised=True)
                if degrees.pp > 1:
                    self._edges(part, batch, is_supervised=True)
        passes_of = full_prepasses(self._plan, batches) if prepasses is None else prepasses
        for prepass, passes in zip(model_prepasses(self._plan), passes_of, strict=True):
            for batch, self._times in collections.Counter(passes).items():
                for part in layout.parts_of(stage):
                    if degrees.tp > 1:
                        tensor.forward(part, batch, prepass.with_adapters)
                    if degrees.ep > 1:
                        self._experts(part, batch, is_supervised=False)
                    if degrees.pp > 1:
                        self._edges(part, batch, is_supervised=False)
        if layout.sharding == 3:
            self._times = len(batches)
            self._gathers(is_supervised=True)
            self._times = sum(map(len, passes_of))
            self._gathers(is_supervised=False)
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

    def _experts(self, part: int, batch: Pass, is_supervised: bool) -> None:
        engine, mesh = self._plan.recipe.engine, self._mesh
        for number in self._layout.layers_of(part):
            what = self._anatomy.layers[number].mlp
            if not isinstance(what, MoE):
                continue
            again = is_supervised and engine.computes_again(number)
            times = 2 if again else 1
            slots = what.experts // mesh.degrees.tp
            self._add(EXPERT, "all_gather", (slots,), "rows of each rank for each expert", times, 8, True)
            # there and back, forward and backward, evenly dealt
            ep, exchanges = mesh.degrees.ep, 2 * times + 2 * is_supervised
            rows = round(batch.tokens * what.chosen / mesh.degrees.tp / ep)
            why = "tokens to the ranks that have their experts, and back"
            if self._own:
                self._exchange("all_to_all", rows * ep, why, exchanges)
            else:
                self._exchange("send", rows, why, exchanges * (ep - 1))

    def _exchange(self, operation: str, rows: int, why: str, count: int) -> None:
        message = Message(EXPERT, operation, (rows, self._anatomy.hidden), self._width, why, True, False)
        self.counts[message] = self.counts.get(message, 0) + count * self._times

    # stage 3

    def _gathers(self, is_supervised: bool) -> None:
        why = "parameters are brought together, forward and backward"
        first = self._layout.bounds[min(self._layout.parts_of(self._mesh.coordinate["pp"]))]
        for held in self._held:
            if held.is_stored_in_parts:
                # what is frozen has no gradient to be freed with: of the first layer it stays whole till the next pass,
                # and in front of it nothing is brought together for a backward pass
                stays = not held.is_trained and (held.layer == first or self._is_in_front(held))
                count = 1 if stays or not is_supervised else 2
                if self._layout.tied and self._mesh.degrees.pp == 1 and self._is_embedding(held):
                    count += 2 if is_supervised else 1  # by the head
                self._add(SHARDING, "all_gather", (held.piece,), why, count, held.num_bytes, held.is_expert)

    def _is_embedding(self, held: Held) -> bool:
        return held.name == f"{self._layout.cuts.embedding}.weight"

    def _is_in_front(self, held: Held) -> bool:
        return held.layer is None and any(held.name.startswith(f"{module}.") for module in self._layout.cuts.first)

    # pipeline

    def _edges(self, part: int, batch: Pass, is_supervised: bool) -> None:
        """Activations on, gradients back."""
        last = len(self._layout.bounds) - 2
        length = batch.length // (self._mesh.degrees.tp if self._cut else 1)
        shape = (batch.rows, length, self._anatomy.hidden)
        if part != last:
            self._add(PIPELINE, "send", (4,), "the size of what follows", width=8)
            if batch.documents or batch.marked:
                self._add(PIPELINE, "send", (batch.rows, batch.length), "where documents begin", width=8)
            self._add(PIPELINE, "send", shape, "activations to the next part")
        if part != 0 and is_supervised:
            self._add(PIPELINE, "send", shape, "gradients to the part before")

    # once a step

    def _gradients(self) -> None:
        for held in self._held:
            if not held.is_trained:
                continue
            if held.has_gradient:
                self._gradient(held)
            if held.parts > 1 and not held.is_stored_in_parts:
                why = "updated parameters, from the ranks that own the pieces"
                self._add(SHARDING, "all_gather", (held.piece,), why, 1, held.num_bytes, held.is_expert)
        for bucket in self._layout.buckets(self._mesh):
            self._sums(bucket)

    def _gradient(self, held: Held) -> None:
        """What a gradient needs by itself."""
        width = 4 if held.reduce_in_backward else held.num_bytes
        if self._mesh.degrees.tp > 1 and self._is_partial(held):
            why = "gradients of norms, of which each rank has seen its tokens or heads"
            inside = self._compiled and self._is_compiled(held)
            times = len(self._batches) if held.reduce_in_backward or inside else 1
            self._add(TENSOR, "all_reduce", held.local_shape, why, times, width)
        if held.is_tied:
            own = (held.owned,) if held.parts > 1 else held.local_shape
            self._add("tied", "all_reduce", own, "gradient of the embedding, of first and last stage", 1, width)

    def _sums(self, bucket: Sequence[Held]) -> None:
        """Over data ranks."""
        first, together = bucket[0], len(bucket) > 1
        width = 4 if first.reduce_in_backward else first.num_bytes
        whole = (sum(held.sum_size for held in bucket),)
        if not first.adds_up_early:
            shape = whole if together else first.local_shape
            self._add(DATA, "all_reduce", shape, "gradients", 1, width, first.is_expert)
            return
        operation = "reduce_scatter" if self._own else "all_reduce"
        why = "gradients, as a backward pass has made them"
        self._add(SHARDING, operation, whole, why, len(self._batches), width, first.is_expert)
        if (self._mesh.of_experts if first.is_expert else self._mesh).degrees.dp > 1:
            pieces = (sum(held.piece for held in bucket),)
            self._add(DP, "all_reduce", pieces, "gradients", 1, width, first.is_expert)

    def _is_compiled(self, held: Held) -> bool:
        """Whether a norm is part of a program; behind the attention of a layer with experts it is not."""
        if held.layer is None:
            return False
        return not isinstance(self._anatomy.layers[held.layer].mlp, MoE) or "post_attention" not in held.name

    def _is_partial(self, held: Held) -> bool:
        """Whether Paddle leaves the gradient of each rank's tokens or heads to be added up."""
        module = held.name.rpartition(".")[0]
        of_heads = module.endswith((".q_norm", ".k_norm"))
        between = (
            module.endswith(("input_layernorm", "post_attention_layernorm")) or module == self._layout.cuts.last_norm
        )
        second = held.name.endswith(f".{SECOND_FACTOR}") and self._layout.cuts.dim(f"{module}.weight") == 0
        second = second and self._layout.cuts.is_region(module.rpartition(".")[0])
        return of_heads or (self._cut and (between or second))

    def _small(self) -> None:
        """Numbers: the ledger of the loss, the norm of the gradients, loads of experts."""
        degrees, profile = self._mesh.degrees, self._plan.profile
        if degrees.num_ranks == 1:
            return
        sums = 1 + len(profile.sums)  # the loss, and the stage's metrics
        if self._mesh.reads_data:
            axis = "readers" if self._mesh.has_middle else RUN
            self._add(axis, "all_reduce", (2 * sums + 4,), "ledger of the loss", width=8)
            if known := sum(len(prepass.sums) for prepass in profile.prepasses):
                self._add(axis, "all_reduce", (2 * known,), "sums of the pre-passes", width=8)
        if self._mesh.has_middle:
            self._add(RUN, "all_reduce", (4,), "ledger of the loss, for ranks that read nothing", width=8)
        self._add(RUN, "all_reduce", (1,), "norm of the gradients", width=8)
        if self._layout.rounded and self._plan.recipe.qat.activation_bits is not None:
            self._add(RUN, "all_reduce", (len(self._layout.rounded),), "largest inputs of rounded layers", width=8)
        mixtures = [layer.mlp for layer in self._anatomy.layers if isinstance(layer.mlp, MoE)]
        if not mixtures:
            return
        parts = self._layout.parts_of(self._mesh.coordinate["pp"])
        here = sum(isinstance(self._anatomy.layers[i].mlp, MoE) for p in parts for i in self._layout.layers_of(p))
        if here and degrees.num_data_ranks > 1:
            self._add(DATA, "all_reduce", (here, mixtures[0].experts), "loads of experts", width=4)
        self._add(RUN, "all_reduce", (3,), "loads of experts", width=8)
        if self._plan.recipe.train.expert_balance_loss:
            self._add(RUN, "all_reduce", (2,), "weight of the balance loss", width=8)


def model_prepasses(plan: RunPlan) -> list[PrePass]:
    """The pre-passes that run the model."""
    return [prepass for prepass in plan.profile.prepasses if prepass.runs_model]


def full_prepasses(plan: RunPlan, batches: Sequence[Pass]) -> list[list[Pass]]:
    """The passes of each pre-pass, with rows as long as those of the training passes. No padding is marked in them."""
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
