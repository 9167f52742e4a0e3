"""The initial values of a model, from model files, the seed, or both; and their digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import SavedAdapters
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.prefix_dir import PrefixTensors
from llmsuite.checkpoint.shapes import skipped_tensors
from llmsuite.checkpoint.tensors import TensorSource
from llmsuite.files import check_whole
from llmsuite.hub.names import hub_name
from llmsuite.models.block_quant import ABSMAX, CODES, BlockFormat, is_quantised_part
from llmsuite.models.head import SCORE
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shard_plan import WHOLE
from llmsuite.models.targets import is_factor, quantised_modules
from llmsuite.parallel import collective
from llmsuite.parallel.fill import ReadSlice
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.adapters import with_factors
from llmsuite.train.initial_values import initial_values
from llmsuite.train.interventions import with_rotations
from llmsuite.train.prefixes import with_prefix_values


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """The values a run starts from."""

    read: ReadSlice
    base: Base
    """The model without adapters."""
    digest: str
    """Changes with anything that decides the values; adapters change none, as they begin at zero."""
    source: ModelDirectory | None = None
    """The files they are from."""


def initial_weights(
    plan: RunPlan, registry: Registry, chunks: Sequence[Any], shapes: Mapping[str, Sequence[int]]
) -> InitialWeights:
    """The initial weights of a run.

    Args:
        plan: of the run.
        registry: of the families a model directory may be of.
        chunks: this rank's chunks of the model, lazily built.
        shapes: of every parameter of the whole model, adapters included.
    """
    digest = hashlib.sha256(json.dumps([plan.recipe.engine.precision, plan.model_config.to_hf()]).encode())
    if plan.weights is None:
        digest.update(f"seed {plan.recipe.seed}".encode())
        read = draw(chunks, plan.recipe.seed, plan.model_config.initializer_range)
        source, base = None, Base(None, digest.hexdigest())
    else:
        source = open_model(
            plan.weights, registry.models, load=plan.recipe.model.load, mtp=num_mtp_layers(plan.model_config) > 0
        )
        read, base, decided_by = _from_files(plan, source, chunks, shapes)
        for text in decided_by:
            digest.update(text.encode())
    base_format = plan.recipe.lora.base_format
    if base_format is not None:
        read, base = QuantisedReads(read, shapes, base_format), dataclasses.replace(base, format=base_format)
        digest.update(json.dumps(dataclasses.asdict(base_format)).encode())
    if plan.recipe.lora.rank is not None:
        shard_plan = plan.family.shard_plan or WHOLE
        stored = () if base_format is None else frozenset(quantised_modules(shapes, shard_plan))
        read = with_factors(read, plan.recipe.seed, shapes, shard_plan.embedding, plan.recipe.lora, stored)
    if plan.recipe.reft.rank is not None:
        read = with_rotations(read, plan.recipe.seed)
    if plan.recipe.prefix.tokens is not None:
        read = with_prefix_values(read, plan.recipe.seed, shapes)
    return InitialWeights(read, base, digest.hexdigest(), source)


def _from_files(
    plan: RunPlan, source: ModelDirectory, chunks: Sequence[Any], shapes: Mapping[str, Sequence[int]]
) -> tuple[ReadSlice, Base, list[str]]:
    """Values from `model.weights`, from the seed where its files have none; with the texts that decide the digest."""
    assert plan.weights is not None
    if collective.rank() == 0:  # every byte once
        check_whole(plan.weights)
    seed, std, load = plan.recipe.seed, plan.model_config.initializer_range, plan.recipe.model.load
    report(f"loading {plan.weights} ({source.description})")
    named = str(
        plan.recipe.model.weights
    )  # a name on a hub means the same on another machine, a path of its cache does not
    base = Base(named if hub_name(named) is not None else str(plan.weights.resolve()), source.digest())
    read, decided_by = read_from(source), [base.digest]
    is_new = {name for name in shapes if is_factor(name) or (name == SCORE and SCORE not in source.names)}
    stored = {name: tuple(shape) for name, shape in shapes.items() if name not in is_new}
    if skipped := skipped_tensors(source, stored, load, report):
        read = _either(skipped, draw(chunks, seed, std), read)
        decided_by.append(json.dumps(["drawn", seed, sorted(skipped)]))
    if SCORE in is_new:
        report(f"{SCORE} is new, drawn from seed {seed}: {plan.weights} is a language model")
        read = _either({SCORE}, _normal(seed, std), read)
        decided_by.append(f"score of seed {seed}")
    return read, base, decided_by


class QuantisedReads:
    """Reads slices of parameters, and of matrices that are stored quantised: each is quantised when it is read."""

    def __init__(self, read: ReadSlice, shapes: Mapping[str, Sequence[int]], format: BlockFormat):
        """
        Args:
            read: reads slices of the matrices.
            shapes: of the whole matrices, by their parameters' names.
            format: how they are stored.
        """
        self._read, self._shapes, self._format = read, shapes, format
        self._place: object = None
        self._parts: dict[str, np.ndarray] = {}
        """Codes and scales of the slice that was read last, but for what was asked for already."""

    def __call__(self, name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if not is_quantised_part(name):
            return self._read(name, shape, index)
        matrix, _, part = name.rpartition(".")
        place = self._format.in_matrix(part, index)
        if self._place != (matrix, place) or part not in self._parts:
            self._parts.clear()
            codes, absmax = self._quantised(matrix, place)
            self._place, self._parts = (matrix, place), {CODES: codes, ABSMAX: absmax}
        return self._parts.pop(part)

    def _quantised(self, matrix: str, place: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        whole = self._shapes[matrix]
        if len(whole) == 2:
            return self._format.quantise(self._read(matrix, whole, place))
        stored = []  # of a stack, one matrix after the other
        for number in range(place[0].start, place[0].stop):
            (values,) = self._read(matrix, whole, [slice(number, number + 1), *place[1:]])
            stored.append(self._format.quantise(values))
        codes, absmax = zip(*stored)
        return np.stack(codes), np.stack(absmax)


def read_from(source: ModelDirectory | SavedAdapters | TensorSource | PrefixTensors) -> ReadSlice:
    """Read slices from files."""
    return lambda name, shape, index: source.read(name, index)


def draw(chunks: Sequence[Any], seed: int, std: float) -> ReadSlice:
    """The initial values that a seed stands for: matrices are normal, gains and biases start as their layers say.

    Args:
        chunks: chunks of the model, lazily built; gains and biases get their memory here.
        seed: of the recipe.
        std: standard deviation of the matrices.
    """
    constants: dict[str, np.ndarray] = {}
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if parameter.ndim == 1 or parameter.shape[0] == 1:  # a bias may be stored as one row
            parameter.initialize()
            constants[name] = parameter.numpy()
    return _either(constants, lambda name, shape, index: constants[name][tuple(index)], _normal(seed, std))


def _normal(seed: int, std: float) -> ReadSlice:
    return lambda name, shape, index: initial_values(seed, name, shape, std, index)


def _either(names: Collection[str], some: ReadSlice, others: ReadSlice) -> ReadSlice:
    """Values of these names from one source, all others from another."""
    return lambda name, shape, index: (some if name in names else others)(name, shape, index)
