"""Padding of a vocabulary that tensor parallel does not divide, such as the 50,257 tokens of GPT-2.

The embedding and the output projection are padded with zeros to the next multiple, as in Megatron-LM (Shoeybi et al.
2019, arXiv 1909.08053). The padding gets no probability and no gradient, and no user sees it: values are read and
saved, and logits returned, without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice, Tensor
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.ops import Ops
from llmsuite.models.protocols import HasVocabulary


def is_padded(config: Any, tp: int) -> bool:
    """True where the vocabulary of a model is padded for this tensor parallel degree."""
    return isinstance(config, HasVocabulary) and config.vocab_size % tp > 0


def network_of(family: ModelFamily) -> Any:
    """The class or function that builds a family's network from a config and its ops. Raises UserError if the family's
    factory returns something else."""
    found = family.factory()
    if not callable(found) or (isinstance(found, type) and not hasattr(found, "named_parameters")):
        raise UserError(
            f"model {family.name}: its factory returned {found!r}; it has to return a class derived from "
            "paddle.nn.Layer, or a function, which builds the network of a config and its ops"
        )
    return found


def build_padded(family: ModelFamily, config: Any, ops: Ops, tp: int) -> Any:
    """A model with a vocabulary that `tp` ranks divide; its `config` has the true size."""
    build = network_of(family)
    if not is_padded(config, tp):
        return build(config, ops)
    model = build(dataclasses.replace(config, vocab_size=config.vocab_size + -config.vocab_size % tp), ops)
    model.config = config
    return model


def pad_values(read: ReadSlice, shapes: Mapping[str, Sequence[int]]) -> ReadSlice:
    """Read function for padded parameters, from one for the true parameters, which have these `shapes`."""

    def padded(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        true = shapes.get(name, shape)
        return read_padded(lambda inside: read(name, true, inside), true, index)

    return padded


def read_padded(
    read: Callable[[Sequence[slice]], np.ndarray], shape: Sequence[int], index: Sequence[slice], padding: int = 0
) -> np.ndarray:
    """A slice that may reach beyond a tensor of this shape, with `padding` there; `read` gets a slice inside of it."""
    inside = [slice(min(part.start, size), min(part.stop, size)) for part, size in zip(index, shape)]
    if inside == list(index):
        return read(index)
    sizes = [part.stop - part.start for part in index]
    if any(part.start == part.stop for part in inside):
        return np.full(sizes, padding, "float32")
    values = read(inside)
    missing = [(0, size - found) for size, found in zip(sizes, values.shape)]
    return np.pad(values, missing, constant_values=padding)


def without_padding(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of a tensor, of this shape."""
    if list(tensor.shape) == list(shape):
        return tensor
    return tensor[tuple(slice(0, size) for size in shape)]
