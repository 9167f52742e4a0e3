"""Tensor and sequence parallel: where activations change their placements over tp.

Parameters are distributed tensors already (see `fill`), so Paddle's SPMD rules compute with them. What is added here:
hooks at the regions of the family's shard plan that bring activations into the right placements, and our own embedding
lookup and cross-entropy, which do without bringing the vocabulary together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.devices.ops import entropy_of_sums
from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.models.adapter import Adapter
from llmsuite.models.dropout import Select, TokenDropout
from llmsuite.models.exact import named_kind
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.structured import Part, StructuredLinear
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program import vocabulary as program
from llmsuite.typing import Tensor


def apply_tensor_parallel(model: Any, plan: ShardPlan, mesh: Mesh, sequence_parallel: bool) -> None:
    """Let a model whose parameters are cut over tp compute with them; nothing changes where tp is 1.

    Args:
        model: filled.
        plan: the family's shard plan.
        mesh: this rank's place.
        sequence_parallel: cut activations along the sequence between the regions of the plan.
    """
    if mesh.tensor is None:
        return
    outside, whole = between_layers(sequence_parallel), [dist.Replicate()]
    modules = dict(model.named_sublayers())
    if plan.embedding in modules:  # not on every pipeline stage
        embedding = modules[plan.embedding]
        look_up = VocabularyParallelLookup(mesh, outside, embedding.weight.shape[0]).look_up
        if isinstance(embedding, Adapter):
            embedding.look_up = look_up
        else:
            check_embedding(plan.embedding, embedding, "parallel.tensor_parallel_degree")
            embedding.forward = lambda input_ids: look_up(input_ids, embedding.weight)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    model.cross_entropy = _vocabulary_parallel_cross_entropy(mesh, vocabulary)
    model.nll_and_entropy = _vocabulary_parallel_nll_and_entropy(mesh, vocabulary)
    model.is_first_choice = _vocabulary_parallel_first_choice(mesh, vocabulary)
    complete_sum, complete_columns = _to(mesh, outside), _to(mesh, whole)  # one for all: compiled layers are alike
    select = _part_of_mask(mesh)
    for name, module in model.named_sublayers():
        if _is_last_of_region(name, module, plan):
            # else its adapter would have the whole sum made before it is cut again
            module.complete_sum = complete_sum
        if isinstance(module, Adapter) and plan.dim(f"{name}.weight") == 0:
            module.complete_columns = complete_columns
        if isinstance(module, StructuredLinear):
            module.part = RankPart(mesh, plan.dim(f"{name}.weight"), module.weight.shape)
        if isinstance(module, TokenDropout):
            module.select = select
        if plan.is_region(name):
            if sequence_parallel:
                module.register_forward_pre_hook(_on_input(mesh, whole))
            module.register_forward_post_hook(_on_output(mesh, outside))
        elif plan.is_last_norm(name) and sequence_parallel:
            module.register_forward_post_hook(_on_output(mesh, whole))


def check_embedding(name: str, embedding: Any, key: str) -> None:
    """Raise UserError for an embedding whose lookup is not Paddle's: each rank looks up its part of the vocabulary in a
    way of its own. `key` is what asks for several ranks."""
    if type(embedding) is not nn.Embedding or "forward" in vars(embedding):
        raise UserError(
            f"{key}: {named_kind(name, embedding)} has a forward pass of its own, and ranks that share out the "
            "vocabulary look words up in theirs. Do what it adds in the model's `embed` and `embed_at`, or use 1"
        )


def _is_last_of_region(name: str, module: Any, plan: ShardPlan) -> bool:
    """Whether a module is the row-parallel matrix at the end of a region, with an adapter."""
    if not isinstance(module, Adapter):
        return False
    return plan.dim(f"{name}.weight") == 0 and plan.is_region(name.rpartition(".")[0])


def between_layers(sequence_parallel: bool) -> list[Any]:
    """Placements over tp of the activations [B, L, D] between layers."""
    return [dist.Shard(1)] if sequence_parallel else [dist.Replicate()]


# placements


def local_value(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank; shares its memory."""
    return tensor._local_value() if tensor.is_dist() else tensor


def reshard(tensor: Tensor, mesh: Mesh, placements: list[Any]) -> Tensor:
    """A distributed tensor with other placements over tp; itself when it has them."""
    if not paddle.in_dynamic_mode():  # a program is being made: nothing is sent; tp is the last axis of its mesh
        wanted = [*tensor.placements[:-1], *placements]
        return tensor if tensor.placements == wanted else dist.reshard(tensor, tensor.process_mesh, wanted)
    if tensor.placements == placements:
        return tensor
    with calls.made("reshard", tensor, mesh.tensor, mesh.tensor.process_ids):
        return dist.reshard(tensor, mesh.tensor, placements)


def _replicated(tensor: Tensor, mesh: Mesh) -> Tensor:
    """A distributed tensor that is the same on every rank of the tensor parallel group."""
    return tensor if tensor.is_dist() else dtensor_from_local(tensor, mesh.tensor, [dist.Replicate()])


def _to(mesh: Mesh, placements: list[Any]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: reshard(tensor, mesh, placements)


def _part_of_mask(mesh: Mesh) -> Callable[[Select, Tensor], Tensor]:
    """`TokenDropout.select`: each rank makes the part of a mask [B, L, I] that fits its part of the activations."""

    def select(mask: Select, x: Tensor) -> Tensor:
        (placement,), index = x.placements, [slice(None)] * 3
        assert not placement.is_partial(), "dropout of a sum that is not complete"
        if placement.is_shard():
            size, at = x.shape[placement.get_dim()] // mesh.degrees.tp, mesh.coordinate["tp"]
            index[placement.get_dim()] = slice(at * size, (at + 1) * size)
        return dtensor_from_local(mask(index), mesh.tensor, x.placements)

    return select


def _on_input(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (reshard(inputs[0], mesh, placements), *inputs[1:])

    return hook


def _on_output(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its cache too
            return (reshard(output[0], mesh, placements), *output[1:])
        return reshard(output, mesh, placements)

    return hook


class RankPart(Part):
    """The part of a rank of the tensor parallel group.

    With a matrix that is cut along its outputs it makes its part of them, and has a part of the sum that the gradient
    of the input is; with one cut along its inputs the other way round. Of a gradient of the adapter's parameters, which
    all ranks have whole, it has a part of the sum: what comes from its inputs, outputs or tokens.
    """

    def __init__(self, mesh: Mesh, dim: int | None, shape: Sequence[int]):
        """
        Args:
            mesh: the rank's place.
            dim: the dim of the matrix that is cut; None if none is.
            shape: of the whole matrix, [inputs, outputs].
        """
        self._mesh, self._dim = mesh, dim
        if dim is not None:
            size, at = shape[dim] // mesh.degrees.tp, mesh.coordinate["tp"]
            part = slice(at * size, (at + 1) * size)
            self.inputs, self.outputs = (part, None) if dim == 0 else (None, part)

    def _placements(self, x: Tensor) -> tuple[list[Any], list[Any]]:
        """Those of the input and of the output."""
        if self._dim is None:
            return x.placements, x.placements
        last = [dist.Shard(x.ndim - 1)]
        return (last, [dist.Partial()]) if self._dim == 0 else ([dist.Replicate()], last)

    def local(self, tensor: Tensor) -> Tensor:
        return local_value(tensor)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        placements, of_output = self._placements(x)
        assert x.placements == placements, "an input that is cut in another way"
        return dtensor_from_local(y, self._mesh.tensor, of_output)

    def output_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        _, (placement,) = self._placements(x)
        wanted = dist.Replicate() if placement.is_partial() else placement
        return local_value(reshard(gradient, self._mesh, [wanted]))

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        if self._dim != 1:
            return dtensor_from_local(gradient, self._mesh.tensor, x.placements)
        return reshard(self._sum(gradient), self._mesh, x.placements)

    def parameter_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        if self._dim is None and x.placements[0].is_replicated():
            return dtensor_from_local(gradient, self._mesh.tensor, x.placements)
        return self._sum(gradient)

    def _sum(self, gradient: Tensor) -> Tensor:
        return dtensor_from_local(gradient, self._mesh.tensor, [dist.Partial()])


# vocabulary


class VocabularyParallelLookup(dist.LocalLayer):
    """Embedding lookup with the rows of the table cut over tp: each rank looks up the ids it has, zeros elsewhere.

    `F.embedding` on a table cut along the vocabulary would gather the table (Paddle 3.3.1).
    """

    def __init__(self, mesh: Mesh, placements: list[Any], num_rows: int):
        stacked = [(mesh.tensor, [dist.Shard(0)])]
        gradients = [(mesh.tensor, [dist.Replicate()]), (mesh.tensor, [dist.Shard(0)])]
        super().__init__(stacked, gradients)
        self._mesh, self._placements = mesh, placements
        self._first = mesh.coordinate["tp"] * (num_rows // mesh.degrees.tp)

    def look_up(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Ids [B, L] to the rows [B, L, D] of a table."""
        if not paddle.in_dynamic_mode():
            found = program.ProgramLookup(input_ids, self._first).look_up(input_ids, table)
            return reshard(found, self._mesh, self._placements)
        parts = self(_replicated(input_ids, self._mesh), table)  # [tp, B, L, D], one part a rank
        return reshard(parts.sum(0), self._mesh, self._placements)

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Look up in the local rows; the leading dim of 1 becomes tp in the stacked output."""
        ids = input_ids - self._first
        mine = paddle.logical_and(ids >= 0, ids < rows.shape[0])
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), rows)
        return _Masked.apply(found, (mine.astype(found.dtype).unsqueeze(-1),)).unsqueeze(0)


class _Masked(PyLayer):
    """Product with a mask, which comes in a tuple: a plain product would keep the other factor for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: tuple[Tensor]) -> Tensor:
        (ctx.mask,) = masks
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


def _vocabulary_parallel_cross_entropy(mesh: Mesh, vocabulary: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy` of logits that are cut along the vocabulary: only maxima, sums and picked logits are exchanged.

    `F.cross_entropy` would gather the logits, and logsumexp over a dim that is cut is wrong (Paddle 3.3.1). Logits
    behind the vocabulary are padding and get a probability of 0.
    """

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        if not paddle.in_dynamic_mode():
            return program.cross_entropy(logits, targets, vocabulary)
        shifted, ids, targets = _shifted(mesh, vocabulary, logits, targets)
        is_target = (ids == targets).astype(shifted.dtype)
        nll = shifted.exp().sum(-1, keepdim=True).log() - (shifted * is_target).sum(-1, keepdim=True)
        # from here on every rank has the same plain numbers
        whole = [dist.Replicate()]
        return dtensor_to_local(reshard(nll.squeeze(-1), mesh, whole), mesh.tensor, whole)

    return cross_entropy


def _vocabulary_parallel_nll_and_entropy(
    mesh: Mesh, vocabulary: int | None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`devices.ops.nll_and_entropy` of logits that are cut along the vocabulary, in the same way."""

    def nll_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        shifted, ids, targets = _shifted(mesh, vocabulary, logits, targets)
        is_target = (ids == targets).astype(shifted.dtype)
        exponentials, whole = shifted.exp(), [dist.Replicate()]
        sums = [part.sum(-1) for part in (exponentials, exponentials * shifted, shifted * is_target)]
        total, weighted, picked = (dtensor_to_local(reshard(part, mesh, whole), mesh.tensor, whole) for part in sums)
        return total.log() - picked, entropy_of_sums(total, weighted)

    return nll_and_entropy


def _vocabulary_parallel_first_choice(mesh: Mesh, vocabulary: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """`devices.ops.is_first_choice` of logits that are cut along the vocabulary: one sum for each row is exchanged."""

    def is_first_choice(logits: Tensor, targets: Tensor) -> Tensor:
        shifted, ids, targets = _shifted(mesh, vocabulary, logits, targets)
        # below zero where the target is not as large as the largest, or one before it is
        earlier = paddle.logical_and(shifted >= 0, ids < targets).astype(shifted.dtype)
        short = (shifted * (ids == targets).astype(shifted.dtype) - earlier).sum(-1)
        whole = [dist.Replicate()]
        short = dtensor_to_local(reshard(short, mesh, whole), mesh.tensor, whole)
        return (short >= 0).astype("float32")

    return is_first_choice


def _shifted(mesh: Mesh, vocabulary: int | None, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less the largest of their row, [N, V], and the ids that they are of, [V], both cut along the vocabulary;
    and the targets as [N, 1]."""
    targets = _replicated(targets, mesh)
    here = logits.shape[-1] // mesh.degrees.tp
    first = mesh.coordinate["tp"] * here
    # cut as the logits: else each rank would keep a tensor as long as the whole vocabulary
    ids = paddle.arange(first, first + here, dtype=targets.dtype)
    if vocabulary is not None and logits.shape[-1] > vocabulary:
        lowest = (ids >= vocabulary).astype(logits.dtype) * -1e30
        logits = logits + dtensor_from_local(lowest, mesh.tensor, [dist.Shard(0)])
    ids = dtensor_from_local(ids, mesh.tensor, [dist.Shard(0)])
    shifted = logits - logits.detach().max(-1, keepdim=True)
    return shifted, ids, targets.unsqueeze(-1)
