"""LoRA-GA (Wang et al. 2024, arXiv 2407.05000): adapters initialized with singular vectors of the gradient of W.

The gradient is that of the first global batches, computed on the mesh of the run by steps that update nothing. All
factors are zero in these steps, so they run the model without adapters. Afterwards A B is subtracted from W, so the
adapted model still equals the model without adapters.

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.lora import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.adapters.pissa import START_FIRST, START_SECOND, singular_vectors
from llmsuite.base.errors import UserError
from llmsuite.base.progress import report
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.data import TrainingData
from llmsuite.engine.data_loader import StepDataLoader
from llmsuite.engine.eager_engine import EagerEngine, train_step
from llmsuite.engine.guard import StepDecision
from llmsuite.engine.rules import StepRules
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.materialize import read_local_values
from llmsuite.parallel.vocabulary import pad_values, without_padding
from llmsuite.parallel.weight_gradients import CapturedWeightGradient

SMALLEST = 1e-6
"""Relative threshold: singular values below this fraction of the largest one are rounding errors of float32 sums."""


@dataclasses.dataclass(frozen=True)
class GradientInit:
    """Keys of the section `lora` for this initialization."""

    rank: int
    batches: int
    passes: int
    gamma: float

    @classmethod
    def from_section(cls, lora: LoraSection) -> GradientInit | None:
        """Read the keys of the recipe; None for adapters with another initialization."""
        if lora.rank is None or not lora.adapter_method.needs_gradients:
            return None
        return cls(lora.rank, lora.init_batches, lora.init_passes, lora.init_gamma)


def init_from_gradients(
    init: GradientInit,
    shard_plan: ShardPlan,
    num_workers: int,
    built: BuiltModel,
    data: TrainingData,
    engine: EagerEngine,
) -> None:
    """Initialize the adapters of a new run from gradients. A collective call: every rank makes it before the first
    step.

    Args:
        init: keys of the initialization.
        shard_plan: partition of the parameters.
        num_workers: threads that prepare batches.
        built: the model.
        data: data of the run.
        engine: engine of the run, whose optimizer has the adapters.

    Raises:
        UserError: a gradient has too few singular vectors for the rank, or is not finite.
    """
    shapes = built.every_shape
    mesh = collective.mesh()
    shards = {shard.name: shard for shard in built.every_shard}
    layers = {
        name: layer
        for chunk in built.part.chunks
        for name, layer in chunk.named_sublayers()
        if isinstance(layer, Adapter)
    }
    _check_ranks(init.rank, {name: shapes[f"{name}.weight"] for name in layers})
    count = "the first global batch" if init.batches == 1 else f"the first {init.batches} global batches"
    repeated = f", {init.passes} times" if init.passes > 1 else ""
    report(f"lora.init: taking gradients of {count}{repeated}")
    values: dict[str, np.ndarray] = {}
    for group in np.array_split(list(layers), init.passes):
        watched = {}
        for name in map(str, group):
            first, second = (shards[f"{name}.{factor}"] for factor in (FIRST_FACTOR, SECOND_FACTOR))
            shape = [first.shape[0], second.shape[1]]
            local = [first.local_shape[0], second.local_shape[1]]
            watched[name] = CapturedWeightGradient(layers[name], shape, local, shard_plan.dim(f"{name}.weight"), mesh)
        _run_gradient_steps(init.batches, data, num_workers, engine)
        values |= _factors(watched, {name: shapes[f"{name}.weight"] for name in watched}, init)
    read = pad_values(lambda name, shape, index: values[name][tuple(index)], shapes)
    for shard in built.every_shard:
        if shard.name in values:
            shard.load(read_local_values(shard.name, shard.shape, shard_plan, mesh, read))
    for shard in engine.optimizer.shards:
        engine.optimizer.to_host(shard)


def _check_ranks(rank: int, shapes: Mapping[str, Sequence[int]]) -> None:
    for name, (num_inputs, num_outputs) in shapes.items():
        if 2 * rank > min(num_inputs, num_outputs):
            raise UserError(
                f"lora.rank: is {rank}, and lora.init lora_ga takes twice as many singular vectors, but {name} is "
                f"{num_inputs} x {num_outputs} and has no more than {min(num_inputs, num_outputs)}; lower it, or set "
                "lora.init to default"
            )


# passes


class _GradientOnlyRules(StepRules):
    """Rules of steps that only compute gradients: none updates anything."""

    def decide(self, step: int, weight: float, metrics: dict[str, float]) -> StepDecision:
        if weight == 0:
            raise UserError("lora.init: nothing in the first global batches is supervised; look at the rows")
        if not math.isfinite(metrics["loss"]):
            raise UserError(
                f"lora.init: the loss of the first global batches is {metrics['loss']}; look at the weights and the "
                "rows, or set lora.init to default"
            )
        return "skip"


def _run_gradient_steps(count: int, data: TrainingData, num_workers: int, engine: EagerEngine) -> None:
    """Run the passes of the first steps, which leave gradients. The run trains on the same samples afterwards."""
    rules = engine.rules
    gradient_only = engine.with_rules(_GradientOnlyRules(loss_scale=rules.loss_scale, callbacks=rules.callbacks))
    loader = StepDataLoader(data, collective.mesh().data_rank, 0, count, num_workers)
    with contextlib.closing(loader):
        for number in range(1, count + 1):
            batches = loader.next_step(number).batches
            metrics = train_step(gradient_only, 1, batches, requests={}, is_logged=False)
            loader.finish_step(metrics)


# factors


def _factors(
    watched: Mapping[str, CapturedWeightGradient], shapes: Mapping[str, Sequence[int]], init: GradientInit
) -> dict[str, np.ndarray]:
    """Compute the factors of the matrices, by name, on each rank that holds a shard of them. Each matrix is decomposed
    on one of these ranks and then sent to the others, so that all have the same numbers."""
    mesh = collective.mesh()
    rank = init.rank
    own = mesh.data_rank * mesh.degrees.tp + mesh.coordinate["tp"]
    count = mesh.degrees.num_data_ranks * mesh.degrees.tp
    full_gradients = {}
    for number, (name, gradient) in enumerate(watched.items()):
        full_gradient = without_padding(gradient.finish(), shapes[name])  # a collective call
        if number % count == own:
            full_gradients[name] = array_of(full_gradient)
    pairs = {name: gradient_factors(name, full_gradients.pop(name), init) for name in list(full_gradients)}
    factors = {}
    for name, (num_inputs, num_outputs) in shapes.items():
        flat = np.zeros([(num_inputs + num_outputs) * rank], "float32")
        if name in pairs:
            flat = np.concatenate([factor.ravel() for factor in pairs[name]])
        tensor = tensor_of(flat)
        # one rank has the factors, the others zeros: the sum over both groups broadcasts them
        for ranks in (mesh.data_group, mesh.tensor_group):
            collective.sum_in_group(tensor, ranks)
        first, second = np.split(array_of(tensor), [num_inputs * rank])
        for kinds, factor in (
            ((FIRST_FACTOR, START_FIRST), first.reshape([num_inputs, rank])),
            ((SECOND_FACTOR, START_SECOND), second.reshape([rank, num_outputs])),
        ):
            factors.update({f"{name}.{kind}": factor for kind in kinds})
    return factors


def gradient_factors(name: str, gradient: np.ndarray, init: GradientInit) -> tuple[np.ndarray, np.ndarray]:
    """Compute A [I, R] and B [R, O], float32, from the gradient U S V of a matrix [I, O]: A has the first R columns of
    U, B the next R rows of V, both times O^(1/4) / sqrt(gamma) (Wang et al. 2024, algorithm 1, whose matrices are
    transposed).

    Args:
        name: name of the matrix, for messages.
        gradient: gradient of the matrix [I, O].
        init: rank and gamma.

    Raises:
        UserError: the gradient is not finite, or has fewer than 2 R singular values.
    """
    rank = init.rank
    num_outputs = gradient.shape[1]
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
            f"lora.init: the gradient of {name} in {init.batches} global batches has "
            f"{int((s >= SMALLEST * s[0]).sum())} singular values above rounding, and lora_ga takes {2 * rank}, twice "
            "lora.rank; raise lora.init_batches, or lower lora.rank"
        )
    scale = num_outputs**0.25 / math.sqrt(init.gamma)
    return (u[:, :rank] * scale).astype("float32"), (v[rank:] * scale).astype("float32")
