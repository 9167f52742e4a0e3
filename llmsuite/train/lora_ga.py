"""LoRA-GA (Wang et al. 2024, arXiv 2407.05000): adapters that begin with singular vectors of the gradient of W.

The gradient is that of the first global batches, on the mesh of the run and with its own passes: steps that update
nothing. Until then all factors are zero, so these are passes of the model without adapters. Afterwards A, B and what is
taken off are alike, so it is still that model.

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import paddle

from llmsuite.errors import UserError
from llmsuite.models.adapter import Adapter
from llmsuite.models.shard_plan import FIRST_FACTOR, SECOND_FACTOR, START_FIRST, START_SECOND, WHOLE
from llmsuite.parallel import collective
from llmsuite.parallel.fill import read_local
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.vocabulary import pad_values, without_padding
from llmsuite.parallel.weight_gradients import WatchedGradient
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.schema.lora import LoraSection
from llmsuite.train.adapters import singular_vectors
from llmsuite.train.build import BuiltModel
from llmsuite.train.data import TrainingData
from llmsuite.train.guard import Verdict
from llmsuite.train.passes import Passes
from llmsuite.train.reader import StepReader
from llmsuite.train.step import StepRules, train_step

SMALLEST = 1e-6
"""A singular value below this part of the largest one is rounding: float32 sums have no more digits."""


@dataclasses.dataclass(frozen=True)
class GradientStart:
    """The keys of section `lora` about it."""

    rank: int
    batches: int
    passes: int
    gamma: float

    @classmethod
    def of(cls, lora: LoraSection) -> GradientStart | None:
        """None for adapters that begin otherwise. Every rank calls it while it is constructed: keys that nobody has
        read by then are refused."""
        if lora.rank is None or lora.init != "lora_ga":
            return None
        return cls(lora.rank, lora.init_batches, lora.init_passes, lora.init_gamma)


def begin_with_gradients(
    start: GradientStart,
    plan: RunPlan,
    built: BuiltModel,
    data: TrainingData,
    passes: Passes,
    optimizer: Optimizer,
    rules: StepRules,
) -> None:
    """Give the adapters of a run that begins their values. Every rank calls it, before the first step.

    Raises:
        UserError: a gradient has too few singular vectors for the rank, or is not finite.
    """
    shapes, mesh = built.every_shape, collective.mesh()
    shard_plan, shards = plan.family.shard_plan or WHOLE, {shard.name: shard for shard in built.every_shard}
    layers = {
        name: layer
        for chunk in built.part.chunks
        for name, layer in chunk.named_sublayers()
        if isinstance(layer, Adapter)
    }
    _check_ranks(start.rank, {name: shapes[f"{name}.weight"] for name in layers})
    count = "the first global batch" if start.batches == 1 else f"the first {start.batches} global batches"
    report(f"lora.init: taking gradients of {count}" + (f", {start.passes} times" if start.passes > 1 else ""))
    values: dict[str, np.ndarray] = {}
    for group in np.array_split(list(layers), start.passes):
        watched = {}
        for name in map(str, group):
            first, second = (shards[f"{name}.{factor}"] for factor in (FIRST_FACTOR, SECOND_FACTOR))
            shape, local = [first.shape[0], second.shape[1]], [first.local_shape[0], second.local_shape[1]]
            watched[name] = WatchedGradient(layers[name], shape, local, shard_plan.dim(f"{name}.weight"), mesh)
        _pass_batches(start.batches, data, plan.recipe.data.num_workers, passes, optimizer, rules)
        values |= _factors(watched, {name: shapes[f"{name}.weight"] for name in watched}, start)
    read = pad_values(lambda name, shape, index: values[name][tuple(index)], shapes)
    for shard in built.every_shard:
        if shard.name in values:
            shard.load(read_local(shard.name, shard.shape, shard_plan, mesh, read))
    for shard in optimizer.shards:
        optimizer.to_host(shard)


def _check_ranks(rank: int, shapes: Mapping[str, Sequence[int]]) -> None:
    for name, (num_inputs, num_outputs) in shapes.items():
        if 2 * rank > min(num_inputs, num_outputs):
            raise UserError(
                f"lora.rank: is {rank}, and lora.init lora_ga takes twice as many singular vectors, but {name} is "
                f"{num_inputs} x {num_outputs} and has no more than {min(num_inputs, num_outputs)}; lower it, or set "
                "lora.init to default"
            )


# passes


class _Unjudged(StepRules):
    """Rules of steps that only leave gradients: none updates anything."""

    def judge(self, step: int, weight: float, metrics: dict[str, float]) -> Verdict:
        if weight == 0:
            raise UserError("lora.init: nothing in the first global batches is supervised; look at the rows")
        if not math.isfinite(metrics["loss"]):
            raise UserError(
                f"lora.init: the loss of the first global batches is {metrics['loss']}; look at the weights and the "
                "rows, or set lora.init to default"
            )
        return "skip"


def _pass_batches(
    count: int, data: TrainingData, num_workers: int, passes: Passes, optimizer: Optimizer, rules: StepRules
) -> None:
    """The passes of the first steps, whose samples the run gets again."""
    unjudged = _Unjudged(loss_scale=rules.loss_scale, parts=rules.parts)
    with StepReader(data, collective.mesh().data_rank, 0, count, num_workers) as reader:
        passes = dataclasses.replace(passes, objective=reader.objective)
        for _ in range(count):
            train_step(1, next(reader), passes, optimizer, unjudged, votes={}, is_logged=False)


# factors


def _factors(
    watched: Mapping[str, WatchedGradient], shapes: Mapping[str, Sequence[int]], start: GradientStart
) -> dict[str, np.ndarray]:
    """The factors of matrices by their names, on each rank that has a part of them. These ranks share the work, so that
    all have the same numbers."""
    mesh, rank = collective.mesh(), start.rank
    own, count = mesh.data_rank * mesh.degrees.tp + mesh.coordinate["tp"], mesh.degrees.num_data_ranks * mesh.degrees.tp
    wholes = {}
    for number, (name, gradient) in enumerate(watched.items()):
        whole = without_padding(gradient.finish(), shapes[name])
        if number % count == own:
            wholes[name] = whole.numpy()
    pairs = {name: gradient_factors(name, wholes.pop(name), start) for name in list(wholes)}
    found = {}
    for name, (num_inputs, num_outputs) in shapes.items():
        flat = np.zeros([(num_inputs + num_outputs) * rank], "float32")
        if name in pairs:
            flat = np.concatenate([factor.ravel() for factor in pairs[name]])
        tensor = paddle.to_tensor(flat)
        for ranks in (mesh.data_group, mesh.tensor_group):  # one of them has it, the others zeros
            collective.sum_in_group(tensor, ranks)
        first, second = np.split(tensor.numpy(), [num_inputs * rank])
        for kinds, factor in (
            ((FIRST_FACTOR, START_FIRST), first.reshape([num_inputs, rank])),
            ((SECOND_FACTOR, START_SECOND), second.reshape([rank, num_outputs])),
        ):
            found.update({f"{name}.{kind}": factor for kind in kinds})
    return found


def gradient_factors(name: str, gradient: np.ndarray, start: GradientStart) -> tuple[np.ndarray, np.ndarray]:
    """A [I, R] and B [R, O], float32: of the gradient U S V of a matrix [I, O], A has the first R columns of U, B the
    next R rows of V, both times O^(1/4) / sqrt(gamma) (Wang et al. 2024, algorithm 1, whose matrices are transposed).

    Args:
        name: of the matrix, for messages.
        gradient: G.
        start: rank and gamma.

    Raises:
        UserError: the gradient is not finite, or has fewer than 2 R singular values.
    """
    rank, num_outputs = start.rank, gradient.shape[1]
    if not np.isfinite(gradient).all():
        raise UserError(
            f"lora.init: the gradient of {name} in the first global batches is not finite; look at the weights and the "
            "rows, or set lora.init to default"
        )
    if not gradient.any():
        raise UserError(
            f"lora.init: the gradient of {name} in the first global batches is zero; leave it out of "
            "lora.target_modules, or set lora.init to default"
        )
    u, s, v = singular_vectors(gradient, 2 * rank)
    if s[-1] < SMALLEST * s[0]:
        raise UserError(
            f"lora.init: the gradient of {name} in {start.batches} global batches has "
            f"{int((s >= SMALLEST * s[0]).sum())} singular values above rounding, and lora_ga takes {2 * rank}, twice "
            "lora.rank; raise lora.init_batches, or lower lora.rank"
        )
    scale = num_outputs**0.25 / math.sqrt(start.gamma)
    return (u[:, :rank] * scale).astype("float32"), (v[rank:] * scale).astype("float32")
