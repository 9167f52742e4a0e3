"""Initial values of a model, from model files, the seed, or both; and their digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.adapters.initial_values import with_adapter_values, with_intervention_values, with_prefix_values
from llmsuite.adapters.parameters import is_factor
from llmsuite.base.files import check_intact
from llmsuite.base.hub.names import hub_name
from llmsuite.base.progress import report
from llmsuite.base.safe_files import real_path
from llmsuite.base.typing import ReadSlice
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import SavedAdapters
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.prefix_dir import PrefixTensors
from llmsuite.checkpoint.shapes import skipped_tensors
from llmsuite.checkpoint.tensors import TensorSource
from llmsuite.contract.registry import Registry
from llmsuite.devices.tensors import array_of
from llmsuite.models.block_quant import ABSMAX, CODES, BlockFormat, is_quantised_part
from llmsuite.models.head import EMBEDDING, OUTPUT, SCORE
from llmsuite.models.initial_values import initial_values
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.targets import quantised_modules
from llmsuite.parallel import collective
from llmsuite.recipe.plans import ModelPlan

_ROWS_AT_A_TIME = 8192


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Values that a run starts from."""

    read: ReadSlice
    base: Base
    """Base model without adapters."""
    digest: str
    """Digest of everything that decides the values; adapters do not count, as they start at zero."""
    source: ModelDirectory | None = None
    """Model directory that they are from; None where they are random."""


def initial_weights(
    model_plan: ModelPlan,
    precision: str,
    registry: Registry,
    chunks: Sequence[Any],
    shapes: Mapping[str, Sequence[int]],
) -> InitialWeights:
    """Prepare reading the initial weights of a run.

    Args:
        model_plan: plan of the model.
        precision: precision of the run, which is part of the digest.
        registry: model families that a model directory may belong to.
        chunks: this rank's chunks of the model, lazily built.
        shapes: shape of every parameter of the full model, adapters included.
    """
    digest = hashlib.sha256(json.dumps([precision, model_plan.config.to_hf()]).encode())
    if model_plan.weights is None:
        digest.update(f"seed {model_plan.seed}".encode())
        read = random_values(chunks, model_plan.seed, model_plan.config.initializer_range)
        source = None
        base = Base(None, digest.hexdigest())
    else:
        source = open_model(
            model_plan.weights, registry.models, load=model_plan.section.load, mtp=num_mtp_layers(model_plan.config) > 0
        )
        read, base, decided_by = _from_files(model_plan, source, chunks, shapes)
        for text in decided_by:
            digest.update(text.encode())
    base_format = model_plan.lora.base_format
    if base_format is not None:
        read = QuantisedReads(read, shapes, base_format)
        base = dataclasses.replace(base, format=base_format)
        digest.update(json.dumps(base_format.to_json()).encode())
    if model_plan.lora.rank is not None:
        shard_plan = model_plan.shard_plan
        quantised = () if base_format is None else frozenset(quantised_modules(shapes, shard_plan))
        read = with_adapter_values(
            read,
            model_plan.seed,
            shapes,
            model_plan.lora.adapter_config,
            shard_plan,
            base_format,
            quantised,
        )
    if model_plan.reft.rank is not None:
        read = with_intervention_values(read, model_plan.seed)
    if model_plan.prefix.tokens is not None:
        read = with_prefix_values(read, model_plan.seed, shapes)
    return InitialWeights(read, base, digest.hexdigest(), source)


def _from_files(
    model_plan: ModelPlan, source: ModelDirectory, chunks: Sequence[Any], shapes: Mapping[str, Sequence[int]]
) -> tuple[ReadSlice, Base, list[str]]:
    """Return the values of `model.weights`, random ones for tensors that its files lack; the base model; and the texts
    that go into the digest."""
    assert model_plan.weights is not None
    if collective.rank() == 0:  # one rank hashes the files: each byte is read once
        check_intact(model_plan.weights)
    seed = model_plan.seed
    std = model_plan.config.initializer_range
    load = model_plan.section.load
    report(f"loading {model_plan.weights} ({source.description})")
    # a name on a hub means the same on another machine, a path in its cache does not
    named = str(model_plan.section.weights)
    if hub_name(named) is None:
        named = str(real_path(model_plan.weights))
    base = Base(named, source.digest())
    read = read_from(source)
    decided_by = [base.digest]
    is_new = {name for name in shapes if is_factor(name) or (name == SCORE and SCORE not in source.names)}
    stored = {name: tuple(shape) for name, shape in shapes.items() if name not in is_new}
    if model_plan.section.vocab_size is not None:
        read = with_more_rows(read, source, shapes)
        stored |= {name: source.spec(name).shape for name in (EMBEDDING, OUTPUT) if name in stored}
        decided_by.append(f"vocabulary of {model_plan.section.vocab_size}")
    if skipped := skipped_tensors(source, stored, load, report):
        read = _either(skipped, random_values(chunks, seed, std), read)
        decided_by.append(json.dumps(["random", seed, sorted(skipped)]))
    if SCORE in is_new:
        report(f"{SCORE} is new, initialized from seed {seed}: {model_plan.weights} is a language model")
        read = _either({SCORE}, _normal(seed, std), read)
        decided_by.append(f"score of seed {seed}")
    return read, base, decided_by


class QuantisedReads:
    """Reads slices of parameters; matrices that are stored quantised are quantised when they are read."""

    def __init__(self, read: ReadSlice, shapes: Mapping[str, Sequence[int]], format: BlockFormat):
        """
        Args:
            read: reads slices of the matrices.
            shapes: shapes of the full matrices, by parameter name.
            format: storage format of quantised matrices.
        """
        self._read = read
        self._shapes = shapes
        self._format = format
        self._last: object = None
        self._parts: dict[str, np.ndarray] = {}
        """Parts of the slice that was read last, without those that were returned already; of full matrices if the
        format is of them."""

    def __call__(self, name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if not is_quantised_part(name):
            return self._read(name, shape, index)
        matrix, _, part = name.rpartition(".")
        if self._format.is_of_full:
            return self._part_of_full(matrix, part, index)
        matrix_index = self._format.in_matrix(part, index)
        if self._last != (matrix, matrix_index) or part not in self._parts:
            self._parts.clear()
            codes, absmax = self._quantised(matrix, matrix_index)
            self._last = (matrix, matrix_index)
            self._parts = {CODES: codes, ABSMAX: absmax}
        return self._parts.pop(part)

    def _quantised(self, matrix: str, index: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        full_shape = self._shapes[matrix]
        if len(full_shape) == 2:
            return self._format.quantise(self._read(matrix, full_shape, index))
        quantised = []  # a stack is quantised one matrix after the other, to save memory
        for number in range(index[0].start, index[0].stop):
            (values,) = self._read(matrix, full_shape, [slice(number, number + 1), *index[1:]])
            quantised.append(self._format.quantise(values))
        codes, absmax = zip(*quantised)
        return np.stack(codes), np.stack(absmax)

    def _part_of_full(self, matrix: str, part: str, index: Sequence[slice]) -> np.ndarray:
        """A slice of a part, from the quantised full matrix or the full matrices of a slice of a stack."""
        shape = self._shapes[matrix]
        is_stack = len(shape) == 3
        numbers = index[0] if is_stack else None
        if self._last != (matrix, numbers) or part not in self._parts:
            self._parts.clear()
            self._last = (matrix, numbers)
            full = [slice(0, size) for size in shape[-2:]]
            if not is_stack:
                self._parts = self._format.parts(self._read(matrix, shape, full))
            else:
                of_each = []
                for number in range(index[0].start, index[0].stop):
                    (values,) = self._read(matrix, shape, [slice(number, number + 1), *full])
                    of_each.append(self._format.parts(values))
                for name in of_each[0]:
                    self._parts[name] = np.stack([parts[name] for parts in of_each])
        if is_stack:  # these matrices of the stack are all that was read
            index = [slice(None), *index[1:]]
        return self._parts.pop(part)[tuple(index)]


def with_more_rows(read: ReadSlice, source: ModelDirectory, shapes: Mapping[str, Sequence[int]]) -> ReadSlice:
    """Extend the embedding [V, D] and the head [D, V] of a model to these shapes: each added row of the embedding, and
    column of the head, is the mean of all stored ones, in float32.

    transformers adds noise with a billionth of their covariance, which is random; or none, where the covariance has no
    inverse in float32.
    """
    means: dict[str, np.ndarray] = {}

    def mean_of(name: str, dim: int) -> np.ndarray:
        if name not in means:
            total = np.zeros(1, "float64")
            size = source.spec(name).shape[dim]
            for start in range(0, size, _ROWS_AT_A_TIME):
                part = slice(start, min(start + _ROWS_AT_A_TIME, size))
                index = [part, slice(None)] if dim == 0 else [slice(None), part]
                total = total + source.read(name, index).astype("float64").sum(axis=dim, keepdims=True)
            means[name] = (total / size).astype("float32")
        return means[name]

    def extended(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name not in (EMBEDDING, OUTPUT) or name not in source.names:
            return read(name, shape, index)
        dim = 0 if name == EMBEDDING else 1
        size = source.spec(name).shape[dim]
        wanted = index[dim]
        inside = list(index)
        inside[dim] = slice(min(wanted.start, size), min(wanted.stop, size))
        parts = []
        if inside[dim].start < inside[dim].stop:
            parts.append(read(name, source.spec(name).shape, inside))
        count = wanted.stop - max(wanted.start, size)
        if count > 0:
            mean = mean_of(name, dim)
            mean = mean[:, index[1]] if dim == 0 else mean[index[0]]
            parts.append(np.repeat(mean, count, axis=dim))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, dim)

    return extended


def read_from(source: ModelDirectory | SavedAdapters | TensorSource | PrefixTensors) -> ReadSlice:
    """Return a function that reads slices from files."""
    return lambda name, shape, index: source.read(name, index)


def random_values(chunks: Sequence[Any], seed: int, std: float) -> ReadSlice:
    """Return the random initial values of a seed: matrices are normal, gains and biases have the constants of their
    layers.

    Args:
        chunks: chunks of the model, lazily built; gains and biases are materialized here.
        seed: seed of the recipe.
        std: standard deviation of the matrices.
    """
    constants: dict[str, np.ndarray] = {}
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        # a bias may be stored as one row, and those of experts are a stack; what is stored of a quantised matrix comes
        # from the matrix
        is_vector = parameter.ndim == 1 or parameter.shape[0] == 1 or name.endswith(".bias")
        if is_vector and not is_quantised_part(name):
            parameter.initialize()
            constants[name] = array_of(parameter)
    return _either(constants, lambda name, shape, index: constants[name][tuple(index)], _normal(seed, std))


def _normal(seed: int, std: float) -> ReadSlice:
    return lambda name, shape, index: initial_values(seed, name, shape, std, index)


def _either(names: Collection[str], some: ReadSlice, others: ReadSlice) -> ReadSlice:
    """Read the values of these names from one source, all others from another."""
    return lambda name, shape, index: (some if name in names else others)(name, shape, index)
