"""What a rank sends in a training step: every collective of every axis, as the engine does them.

Along tp, Paddle's rules decide what is sent; what they decide is written down here for the blocks of
`models.anatomy`, and tests hold it against what passes through the communication library, tensor for tensor.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from llmsuite.engine.mesh import Mesh
from llmsuite.models.anatomy import Anatomy, Latent, LayerAnatomy, Mixture, Plain
from llmsuite.models.shard_plan import SECOND_FACTOR
from llmsuite.planning.activations import Pass
from llmsuite.planning.layout import BYTES, Held, Layout

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


Counts = dict[Message, int]
"""How often each."""


class Traffic:
    """What one rank sends in a step."""

    def __init__(self, layout: Layout, anatomy: Anatomy, mesh: Mesh, batches: Sequence[Pass], own_reduce_scatter: bool):
        """
        Args:
            layout: of the run.
            anatomy: of its model.
            mesh: the rank's place.
            batches: its micro-batches.
            own_reduce_scatter: whether the library has one; over Gloo it is made of an all_reduce.
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
        self._is_first, self._is_last = stage == 0, stage == degrees.pp - 1
        for batch, self._times in collections.Counter(batches).items():
            for part in layout.parts_of(stage):
                if degrees.tp > 1:
                    self._tensor(part, batch)
                if degrees.ep > 1:
                    self._experts(part, batch)
                if degrees.pp > 1:
                    self._edges(part, batch)
        self._times = len(batches)
        if layout.sharding == 3:
            self._gathers()
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

    # along tp

    def _tensor(self, part: int, batch: Pass) -> None:
        """Of one micro-batch through a part."""
        tp, hidden = self._mesh.degrees.tp, self._anatomy.hidden
        whole = (batch.rows, batch.length, hidden)
        piece = (batch.rows, batch.length // tp, hidden)
        if part == 0:
            self._sum(whole, "embedding: its rows lie on different ranks", cut=self._cut)
            if self._cut and self._trains_embedding:
                self._add(TENSOR, "all_gather", piece, "embedding, backward")
                if self._anatomy.learned_positions:
                    self._add(TENSOR, "all_gather", (1, *piece[1:]), "positions, backward")
        for number in self._layout.layers_of(part):
            self._tensor_layer(number, batch, whole, piece)
        if part == len(self._layout.bounds) - 2:
            if self._cut:
                self._add(TENSOR, "all_gather", piece, "last norm: sequences are whole again")
            if self._plan.stage.head != "score":
                count = batch.supervised
                self._add(TENSOR, "all_reduce", (count, 1), "cross-entropy: a number a token", 4, width=4)
                self._add(TENSOR, "all_reduce", (count, hidden), "head, backward: gradient of its input")

    @property
    def _trains_embedding(self) -> bool:
        return self._plan.recipe.lora.rank is None

    def _sum(self, shape: Sequence[int], why: str, cut: bool, count: int = 1) -> None:
        """Partial sums added up, and cut along the sequence."""
        if not cut:
            self._add(TENSOR, "all_reduce", shape, why, count)
        elif self._own:
            self._add(TENSOR, "reduce_scatter", (shape[1], shape[0], *shape[2:]), why, count)
        else:
            self._add(TENSOR, "all_reduce", (shape[1], shape[0], *shape[2:]), why, count)

    def _tensor_layer(self, number: int, batch: Pass, whole: tuple[int, ...], piece: tuple[int, ...]) -> None:
        engine = self._plan.recipe.engine
        layer = self._anatomy.layers[number]
        times = 2 if engine.recompute == "full" and number % engine.recompute_every == 0 else 1
        biased, experts = isinstance(layer.mlp, Plain), isinstance(layer.mlp, Mixture)
        if self._cut:
            self._add(TENSOR, "all_gather", piece, "forward: sequences in front of attention and MLP", 2 * times)
            self._add(TENSOR, "all_gather", piece, "backward of what is cut behind them", 2)
        forward = "forward: sums behind attention and MLP"
        self._sum(whole, forward, self._cut)  # attention
        if experts:
            self._add(TENSOR, "all_reduce", whole, "forward: sums behind routed and shared experts", 2 * times)
        else:  # where a bias is added to the sum it is not cut at once
            self._sum(whole, forward, self._cut and not biased, times)
        if times == 2:
            self._sum(whole, forward, self._cut and not biased)
        # with adapters only, what goes into the first layer has no gradient, unless it is computed again
        if not (number == 0 and self._plan.recipe.lora.rank is not None and times == 1):
            self._attention_backward(layer, batch, whole)
        elif isinstance(layer.attention, Latent):
            self._latent_backward(layer.attention, batch, None)
        self._mlp_backward(layer, batch, whole)
        self._adapters(number, batch, times)

    def _attention_backward(self, layer: LayerAnatomy, batch: Pass, whole: tuple[int, ...]) -> None:
        why = "backward: gradients of the inputs of matrices that are cut"
        what = layer.attention
        if isinstance(what, Latent):
            self._latent_backward(what, batch, whole)
        elif not self._compiled:
            self._add(TENSOR, "all_reduce", whole, why, 3)
        else:  # added up before they travel
            self._sum(whole, why, self._cut and (isinstance(layer.mlp, Plain) or self._recomputes))

    def _latent_backward(self, what: Latent, batch: Pass, whole: tuple[int, ...] | None) -> None:
        """`whole`: the input, where it has a gradient."""
        why = "backward: gradients of what is compressed, of which each rank has its heads"
        if what.q_rank is not None:
            self._add(TENSOR, "all_reduce", (batch.rows, batch.length, what.q_rank), why)
        elif whole is not None:
            self._add(TENSOR, "all_reduce", whole, why)
        self._add(TENSOR, "all_reduce", (batch.rows, batch.length, what.kv_rank), why)
        shape = (batch.rows, what.heads // self._mesh.degrees.tp, batch.length, what.turned)
        self._add(TENSOR, "all_gather", shape, "backward: the rotated key that all heads share")

    def _mlp_backward(self, layer: LayerAnatomy, batch: Pass, whole: tuple[int, ...]) -> None:
        why, what = "backward: gradients of the inputs of matrices that are cut", layer.mlp
        if isinstance(what, Mixture):
            self._add(TENSOR, "all_reduce", whole, why, 3)
            weights = (batch.rows, batch.length, what.chosen)
            self._add(
                TENSOR, "all_reduce", weights, "backward: weights of experts, of which each rank has some", width=4
            )
            return
        if self._compiled:
            self._sum(whole, why, self._cut and (isinstance(layer.attention, Latent) or self._recomputes))
        else:
            self._add(TENSOR, "all_reduce", whole, why, 1 if isinstance(what, Plain) else 2)

    @property
    def _recomputes(self) -> bool:
        return self._plan.recipe.engine.recompute == "full"

    def _adapters(self, number: int, batch: Pass, times: int) -> None:
        """Of a layer's matrices that have one: products with the first factor, as narrow as the adapter."""
        rank, cuts, tp = self._plan.recipe.lora.rank, self._layout.cuts, self._mesh.degrees.tp
        if rank is None:
            return
        narrow, piece = (batch.rows, batch.length, rank), (batch.rows, batch.length // tp, rank)
        for module in self._layout.adapted:
            if not module.startswith(f"{cuts.layers}.{number}."):
                continue
            dim = cuts.dim(f"{module}.weight")
            if dim == 1:
                self._add(TENSOR, "all_reduce", narrow, "adapters, backward: of matrices cut by their outputs")
            elif dim == 0:
                self._sum(narrow, "adapters, forward: of matrices cut by their inputs", self._cut, times)
                if self._cut:
                    self._add(TENSOR, "all_gather", piece, "adapters, backward of what is cut behind them")

    # experts

    def _experts(self, part: int, batch: Pass) -> None:
        engine, mesh = self._plan.recipe.engine, self._mesh
        for number in self._layout.layers_of(part):
            what = self._anatomy.layers[number].mlp
            if not isinstance(what, Mixture):
                continue
            times = 2 if engine.recompute == "full" and number % engine.recompute_every == 0 else 1
            slots = what.experts // mesh.degrees.tp
            self._add(EXPERT, "all_gather", (slots,), "rows of each rank for each expert", times, 8, True)
            # there and back, forward and backward, evenly dealt
            ep, exchanges = mesh.degrees.ep, 2 * times + 2
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

    def _gathers(self) -> None:
        why = "parameters are brought together, forward and backward"
        first = self._layout.bounds[min(self._layout.parts_of(self._mesh.coordinate["pp"]))]
        for held in self._held:
            if held.is_stored_in_parts:
                # what is frozen has no gradient to be freed with: of the first layer it stays whole till the next pass,
                # and in front of it nothing is brought together for a backward pass
                stays = not held.is_trained and (held.layer == first or self._is_in_front(held))
                count = 1 if stays else 2
                if self._layout.tied and self._mesh.degrees.pp == 1 and self._is_embedding(held):
                    count += 2  # by the head
                self._add(SHARDING, "all_gather", (held.piece,), why, count, held.num_bytes, held.is_expert)

    def _is_embedding(self, held: Held) -> bool:
        return held.name == f"{self._layout.cuts.embedding}.weight"

    def _is_in_front(self, held: Held) -> bool:
        return held.layer is None and any(held.name.startswith(f"{module}.") for module in self._layout.cuts.first)

    # pipeline

    def _edges(self, part: int, batch: Pass) -> None:
        """Activations on, gradients back."""
        last = len(self._layout.bounds) - 2
        length = batch.length // (self._mesh.degrees.tp if self._cut else 1)
        shape = (batch.rows, length, self._anatomy.hidden)
        if part != last:
            self._add(PIPELINE, "send", (4,), "the size of what follows", width=8)
            if batch.documents:
                self._add(PIPELINE, "send", (batch.rows, batch.length), "where documents begin", width=8)
            self._add(PIPELINE, "send", shape, "activations to the next part")
        if part != 0:
            self._add(PIPELINE, "send", shape, "gradients to the part before")

    # once a step

    def _gradients(self) -> None:
        for held in self._held:
            if not held.is_trained:
                continue
            place = self._mesh.of_experts if held.is_expert else self._mesh
            degrees = place.degrees
            if held.has_gradient:
                self._gradient(held, degrees.dp, degrees.num_data_ranks)
            if held.parts > 1 and not held.is_stored_in_parts:
                why = "updated parameters, from the ranks that own the pieces"
                self._add(SHARDING, "all_gather", (held.piece,), why, 1, held.num_bytes, held.is_expert)

    def _gradient(self, held: Held, dp: int, num_data_ranks: int) -> None:
        width = 4 if held.collects_early else held.num_bytes
        passes = len(self._batches)
        if self._mesh.degrees.tp > 1 and self._is_partial(held):
            why = "gradients of norms, of which each rank has seen its tokens or heads"
            inside = self._compiled and self._is_compiled(held)
            self._add(
                TENSOR, "all_reduce", held.local_shape, why, passes if held.collects_early or inside else 1, width
            )
        own: tuple[int, ...]
        if held.stage >= 2 and held.parts > 1:
            flat = held.parts * held.piece
            operation = "reduce_scatter" if self._own else "all_reduce"
            why = "gradients, as a backward pass has made them"
            self._add(SHARDING, operation, (flat,), why, passes, width, held.is_expert)
            if dp > 1:
                self._add(DP, "all_reduce", (held.piece,), "gradients", 1, width, held.is_expert)
            own = (held.owned,)
        else:
            if num_data_ranks > 1:
                self._add(DATA, "all_reduce", held.local_shape, "gradients", 1, width, held.is_expert)
            own = (held.owned,) if held.parts > 1 else held.local_shape
        if held.is_tied:
            self._add("tied", "all_reduce", own, "gradient of the embedding, of first and last stage", 1, width)

    def _is_compiled(self, held: Held) -> bool:
        """Whether a norm is part of a program; behind the attention of a layer with experts it is not."""
        if held.layer is None:
            return False
        return not isinstance(self._anatomy.layers[held.layer].mlp, Mixture) or "post_attention" not in held.name

    def _is_partial(self, held: Held) -> bool:
        """Whether Paddle leaves the gradient of each rank's tokens or heads to be added up."""
        module = held.name.rpartition(".")[0]
        of_heads = module.endswith((".q_norm", ".k_norm"))
        between = (
            module.endswith(("input_layernorm", "post_attention_layernorm")) or module == self._layout.cuts.last_norm
        )
        second = held.name.endswith(f".{SECOND_FACTOR}") and self._layout.cuts.dim(f"{module}.weight") == 0
        return of_heads or (self._cut and (between or second))

    def _small(self) -> None:
        """Numbers: the ledger of the loss, the norm of the gradients, loads of experts."""
        degrees, stage = self._mesh.degrees, self._plan.stage
        if degrees.num_ranks == 1:
            return
        sums = 1 + stage.num_sums(getattr(self._plan.recipe, stage.section_name))
        if self._mesh.reads_data:
            axis = "readers" if self._mesh.has_middle else RUN
            self._add(axis, "all_reduce", (2 * sums + 4,), "ledger of the loss", width=8)
        if self._mesh.has_middle:
            self._add(RUN, "all_reduce", (4,), "ledger of the loss, for ranks that read nothing", width=8)
        self._add(RUN, "all_reduce", (1,), "norm of the gradients", width=8)
        mixtures = [layer.mlp for layer in self._anatomy.layers if isinstance(layer.mlp, Mixture)]
        if not mixtures:
            return
        parts = self._layout.parts_of(self._mesh.coordinate["pp"])
        here = sum(isinstance(self._anatomy.layers[i].mlp, Mixture) for p in parts for i in self._layout.layers_of(p))
        if here and degrees.num_data_ranks > 1:
            self._add(DATA, "all_reduce", (here, mixtures[0].experts), "loads of experts", width=4)
        self._add(RUN, "all_reduce", (3,), "loads of experts", width=8)
        if self._plan.recipe.train.expert_balance_loss:
            self._add(RUN, "all_reduce", (2,), "weight of the balance loss", width=8)
