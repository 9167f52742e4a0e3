"""Splits PaddleNLP's fused matrices (`fuse_attention_qkv`, `fuse_attention_ffn`) into their parts, and fuses them.

`qkv_proj` holds, for each key-value head, the columns of its query heads, of the key head and of the value head;
`gate_up_fused_proj` holds all of gate, then all of up (paddlenlp/transformers/conversion_utils.py, `fuse_param_func`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec
from llmsuite.models.protocols import HasGroupedHeads, HasHeads

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_fused_proj": ("gate_proj", "up_proj")}
FLAGS = {"qkv_proj": "fuse_attention_qkv", "gate_up_fused_proj": "fuse_attention_ffn"}
_FUSED = re.compile(rf"(.*\.)({'|'.join(PARTS)})(\.(?:weight|bias))")
# PaddleNLP fuses these, among the families we have
_OWNER = {part: fused for fused, parts in PARTS.items() for part in parts}
_SINGLE = re.compile(rf"((?:llama|qwen2)\..*\.)({'|'.join(_OWNER)})(\.(?:weight|bias))")


@dataclasses.dataclass(frozen=True)
class Heads:
    """Numbers of heads in a qkv_proj, of the full model or of one tensor-parallel rank."""

    query: int
    key_value: int

    @classmethod
    def of(cls, config: object, num_ranks: int = 1) -> Heads | None:
        """Return the heads of a model, or of one of `num_ranks` ranks; None where attention has another form."""
        if not isinstance(config, HasHeads) or config.num_attention_heads is None:
            return None
        query = config.num_attention_heads
        key_value = query
        if isinstance(config, HasGroupedHeads):
            key_value = config.num_key_value_heads or query
        return cls(query // num_ranks, key_value // num_ranks)


def is_fused(name: str) -> bool:
    return _FUSED.fullmatch(name) is not None


def part_columns(fused: str, width: int, part: str, heads: Heads | None) -> np.ndarray:
    """Return the columns of a fused matrix of `width` columns that make up one of its parts, in order."""
    if fused != "qkv_proj":
        number = PARTS[fused].index(part)
        return np.arange(number * width // 2, (number + 1) * width // 2)
    assert heads is not None, "a qkv_proj has heads"
    group = heads.query // heads.key_value
    # [key-value head, head of its group: queries, key, value; column of the head]
    columns = np.arange(width).reshape(heads.key_value, group + 2, -1)
    own = {"q_proj": columns[:, :group], "k_proj": columns[:, group], "v_proj": columns[:, group + 1]}
    return own[part].reshape(-1)


class UnfusedTensors:
    """A source of tensors in which fused matrices are replaced by their parts. Matrices are [inputs, outputs]."""

    def __init__(self, source: TensorSource, heads: Heads | None):
        """Raises UserError when the heads do not fit a matrix."""
        self._source = source
        self._heads = heads
        self._fused: dict[str, tuple[str, np.ndarray]] = {}
        self._names: list[str] = []
        for name in source.names:
            match = _FUSED.fullmatch(name)
            if match is None:
                self._names.append(name)
                continue
            shape = source.spec(name).shape
            width = shape[-1] if shape else 0
            unit = 2
            if match[2] == "qkv_proj":
                unit = heads.query + 2 * heads.key_value if heads else 0
            if not unit or not width or width % unit:
                raise UserError(
                    f"{source.paths[0]}: {name!r} has {width} columns, which is no multiple of {unit} heads"
                )
            for part in PARTS[match[2]]:
                self._names.append(f"{match[1]}{part}{match[3]}")
                self._fused[self._names[-1]] = name, part_columns(match[2], width, part, heads)

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def paths(self) -> list[Path]:
        return self._source.paths

    def spec(self, name: str) -> TensorSpec:
        if name not in self._fused:
            return self._source.spec(name)
        fused, own = self._fused[name]
        spec = self._source.spec(fused)
        return TensorSpec(name, (*spec.shape[:-1], len(own)), spec.dtype)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self._fused:
            return self._source.read(name, index)
        fused, own = self._fused[name]
        if index is None:
            return np.ascontiguousarray(self._source.read(fused)[..., own])
        own = own[index[-1]]
        first = int(own.min())
        last = int(own.max())
        part = self._source.read(fused, [*index[:-1], slice(first, last + 1)])
        return np.ascontiguousarray(part[..., own - first])


def fuse_specs(specs: Sequence[TensorSpec]) -> tuple[list[TensorSpec], dict[str, list[str]]]:
    """Return the specs after fusing, and the parts of each fused matrix by name. Matrices are [inputs, outputs]."""
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        match = _SINGLE.fullmatch(spec.name)
        name = f"{match[1]}{_OWNER[match[2]]}{match[3]}" if match else spec.name
        parts.setdefault(name, []).append(spec)
    fused: list[TensorSpec] = []
    part_names: dict[str, list[str]] = {}
    for name, group in parts.items():
        first = group[0]
        if not is_fused(name):
            fused.append(first)
            continue
        width = sum(spec.shape[-1] for spec in group)
        fused.append(TensorSpec(name, (*first.shape[:-1], width), first.dtype))
        part_names[name] = [spec.name for spec in group]
    return fused, part_names


def fuse(name: str, parts: Sequence[np.ndarray], heads: Heads | None) -> np.ndarray:
    """Fuse the parts, or the same rows of them, of the matrix of this name."""
    match = _FUSED.fullmatch(name)
    assert match is not None, "the caller has checked the name"
    width = sum(part.shape[-1] for part in parts)
    result = np.empty((*parts[0].shape[:-1], width), parts[0].dtype)
    for kind, part in zip(PARTS[match[2]], parts):
        result[..., part_columns(match[2], width, kind, heads)] = part
    return result
