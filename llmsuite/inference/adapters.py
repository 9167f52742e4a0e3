"""Multi-LoRA: several adapters over one model. Each row of a batch is computed with its own adapter, or with none.

The matrices of the model are in memory once; an adapter adds the product of its factors to the outputs of its rows (as
in Punica, Chen et al. 2023, arXiv 2310.18547, with one pair of matmuls for each adapter of the batch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.adapter_base import Base, check_base, stored_format
from llmsuite.checkpoint.convert.adapter import AdaptedTensors
from llmsuite.checkpoint.convert.side_adapters import open_any_side_adapter
from llmsuite.checkpoint.directory import find_adapter
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tokenizer_files import tokenizer_of_adapter
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.decoder import Cache, ChunkTokens, ModelDecoder
from llmsuite.models.linear import is_plain_linear

T = TypeVar("T")
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Factors [I, R] and [R, O] by the names of matrices."""


def read_adapters(paths: Mapping[str, Path], base: ModelDirectory, allow_pickle: bool = False) -> dict[str, Pairs]:
    """Read the factors of each adapter, by its name.

    Args:
        paths: directories of the adapters by their names.
        base: the model.
        allow_pickle: read pickles too.

    Raises:
        UserError: one is no adapter, is of another model, or has more than pairs of factors.
    """
    base_digest: Base | None = None
    found: dict[str, Pairs] = {}
    for name, path in paths.items():
        directory = find_adapter(path)
        if directory is None:
            raise UserError(f"--adapters {name}: {path} is no LoRA adapter")
        if stored_format(directory) is not None:
            raise UserError(f"{directory}: was trained on quantised matrices; merge it, and serve the merged model")
        if open_any_side_adapter(directory, base.family, base.config, allow_pickle) is not None:
            raise UserError(f"{directory}: has interventions or prefixes; serve it alone")
        base_digest = base_digest or Base(str(base.path), base.digest())
        check_base(directory, base_digest)
        found[name] = AdaptedTensors(base, directory, allow_pickle).pairs()
    return found


def adapter_tokenizers(paths: Mapping[str, Path], base: ModelDirectory, given: Path | None = None) -> dict[str, Path]:
    """Directory of the tokenizer of each adapter, by its name: `given`, or the one that `tokenizer_of_adapter` finds.
    Raises UserError as that does."""
    found: dict[str, Path] = {}
    for name, path in paths.items():
        directory = find_adapter(path)
        assert directory is not None, "`read_adapters` has read it"
        found[name] = given or tokenizer_of_adapter(directory, base.path)
    return found


class _RowAdapters:
    """The adapter of each row of the current pass."""

    def __init__(self) -> None:
        self.names: Sequence[str | None] = ()


class MultiLoRALinear(nn.Layer):
    """A linear layer with adapters: x W, and for the rows of each adapter x W + (x A) B."""

    def __init__(self, base: Any, rows: _RowAdapters):
        """
        Args:
            base: the layer with W [I, O].
            rows: adapters of the rows of the current pass.
        """
        super().__init__()
        self.base = base
        self._rows = rows
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., I] to [B, ..., O]."""
        y = self.base(x)
        rows = [name if name in self.factors else None for name in self._rows.names]
        present = dict.fromkeys(name for name in rows if name is not None)
        if len(present) == 1 and None not in rows:
            return y + self._update(x, next(iter(present)))
        for name in present:
            index = tensor_of(np.asarray([number for number, own in enumerate(rows) if own == name]))
            update = self._update(paddle.index_select(x, index, 0), name)
            y = paddle.index_add(y, index, 0, update)
        return y

    def _update(self, x: Tensor, name: str) -> Tensor:
        first, second = self.factors[name]
        return paddle.matmul(paddle.matmul(x, first), second)


class MultiLoRADecoder(ModelDecoder):
    """A decoder with adapters, of which each row of a pass may have one."""

    def __init__(self, model: Any, adapters: Mapping[str, Pairs]):
        """
        Args:
            model: in evaluation mode, on one device; its layers are replaced where an adapter has factors.
            adapters: factors by the names of the adapters.

        Raises:
            UserError: an adapter has factors for a matrix that is not a linear layer of this model.
        """
        super().__init__(model)
        self.adapters = tuple(adapters)
        self._active = _RowAdapters()
        layers: dict[str, MultiLoRALinear] = {}
        for name, pairs in adapters.items():
            for target, pair in pairs.items():
                layer = layers.get(target)
                if layer is None:
                    layer = layers[target] = _replace_layer(model, target, self._active, name)
                layer.factors[name] = tensor_of(pair[0]), tensor_of(pair[1])

    def forward(
        self,
        ids: np.ndarray,
        padding: np.ndarray,
        cache: Cache | None,
        adapters: Sequence[str | None] = (),
    ) -> tuple[np.ndarray, Cache]:
        """Make one pass, see `Decoder.forward`. adapters: name of each row's; empty for the base model."""
        with self._rows(adapters):
            return super().forward(ids, padding, cache)

    def prompt_logits(
        self, ids: Sequence[int], num_tokens: ChunkTokens = None, adapter: str | None = None
    ) -> Iterator[np.ndarray]:
        """Yield the logits of a text, see `ModelDecoder.prompt_logits`; adapter: None for the base model."""
        return self._with_adapters(super().prompt_logits(ids, num_tokens), [adapter])

    def embed(
        self, texts: Sequence[Sequence[int]], num_tokens: ChunkTokens = None, adapter: str | None = None
    ) -> Iterator[np.ndarray | None]:
        """Embed texts, see `ModelDecoder.embed`; adapter: None for the base model."""
        return self._with_adapters(super().embed(texts, num_tokens), [adapter] * len(texts))

    def _with_adapters(self, steps: Iterator[T], names: Sequence[str | None]) -> Iterator[T]:
        """Make the steps with the adapters of these rows; other passes between two steps have their own adapters."""
        while True:
            with self._rows(names):
                try:
                    result = next(steps)
                except StopIteration:
                    return
            yield result

    @contextlib.contextmanager
    def _rows(self, names: Sequence[str | None]) -> Iterator[None]:
        self._active.names = names
        try:
            yield
        finally:
            self._active.names = ()


def _replace_layer(model: Any, target: str, rows: _RowAdapters, adapter: str) -> MultiLoRALinear:
    """Replace the layer of a matrix by a `MultiLoRALinear`."""
    path = target.removesuffix(".weight")
    found = dict(model.named_sublayers()).get(path)
    if found is None or not is_plain_linear(found):
        raise UserError(
            f"--adapters {adapter}: {target} is not the matrix of a linear layer of this model; merge the adapter "
            "instead"
        )
    parent, _, last = path.rpartition(".")
    layer = MultiLoRALinear(found, rows)
    setattr(dict(model.named_sublayers(include_self=True))[parent], last, layer)
    return layer
