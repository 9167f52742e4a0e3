"""Several LoRA adapters over one model: each row of a batch is computed with its own, or with none.

The matrices of the model are there once; an adapter adds its factors' product to the outputs of its rows (as in
Punica, Chen et al. 2023, arXiv 2310.18547, by one pair of products for each adapter of the batch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import nn

from llmsuite.checkpoint.adapter_base import Base, check_base, stored_format
from llmsuite.checkpoint.directory import find_adapter
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tokenizer_files import tokenizer_of_adapter
from llmsuite.convert.adapter import Adapted
from llmsuite.convert.beside import open_any_beside
from llmsuite.errors import UserError
from llmsuite.inference.decoder import Cache, ModelDecoder
from llmsuite.models.adapter import is_plain_linear
from llmsuite.typing import Tensor

T = TypeVar("T")
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Factors [I, R] and [R, O] by the names of matrices."""


def read_adapters(places: Mapping[str, Path], base: ModelDirectory, allow_pickle: bool = False) -> dict[str, Pairs]:
    """The factors of each adapter by its name.

    Raises:
        UserError: one is no adapter, is of another model, or is more than pairs of factors.
    """
    known: Base | None = None
    found: dict[str, Pairs] = {}
    for name, place in places.items():
        directory = find_adapter(place)
        if directory is None:
            raise UserError(f"--adapters {name}: {place} is no LoRA adapter")
        if stored_format(directory) is not None:
            raise UserError(f"{directory}: was trained on quantised matrices; merge it and serve that by itself")
        if open_any_beside(directory, base.family, base.config, allow_pickle) is not None:
            raise UserError(f"{directory}: has interventions or prefixes; serve it by itself")
        known = known or Base(str(base.path), base.digest())
        check_base(directory, known)
        found[name] = Adapted(base, directory, allow_pickle).pairs()
    return found


def tokenizers_of(places: Mapping[str, Path], base: ModelDirectory, given: Path | None = None) -> dict[str, Path]:
    """The directory of the tokenizer of each adapter by its name: `given`, or what `tokenizer_of_adapter` finds, and
    raises."""
    found: dict[str, Path] = {}
    for name, place in places.items():
        directory = find_adapter(place)
        assert directory is not None, "`read_adapters` has read it"
        found[name] = given or tokenizer_of_adapter(directory, base.path)
    return found


class _Rows:
    """Which adapter each row of a pass has."""

    def __init__(self) -> None:
        self.names: Sequence[str | None] = ()


class AdaptedLinear(nn.Layer):
    """x W, and for the rows of each adapter x W + (x A) B."""

    def __init__(self, base: Any, rows: _Rows):
        """
        Args:
            base: the layer with W [I, O].
            rows: of the pass that is being made.
        """
        super().__init__()
        self.base, self._rows = base, rows
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., I] to [B, ..., O]."""
        y = self.base(x)
        rows = [name if name in self.factors else None for name in self._rows.names]
        present = dict.fromkeys(name for name in rows if name is not None)
        if len(present) == 1 and None not in rows:
            return y + self._update(x, next(iter(present)))
        for name in present:
            index = paddle.to_tensor([number for number, own in enumerate(rows) if own == name])
            update = self._update(paddle.index_select(x, index, 0), name)
            y = paddle.index_add(y, index, 0, update)
        return y

    def _update(self, x: Tensor, name: str) -> Tensor:
        first, second = self.factors[name]
        return paddle.matmul(paddle.matmul(x, first), second)


class AdaptedDecoder(ModelDecoder):
    """A model with adapters, of which each row of a pass may have one."""

    def __init__(self, model: Any, adapters: Mapping[str, Pairs]):
        """
        Args:
            model: in evaluation mode, on one device; its layers are replaced where an adapter has factors.
            adapters: by their names.

        Raises:
            UserError: an adapter is of a matrix that is not one of its own here.
        """
        super().__init__(model)
        self.adapters = tuple(adapters)
        self._active = _Rows()
        layers: dict[str, AdaptedLinear] = {}
        for name, pairs in adapters.items():
            for target, pair in pairs.items():
                layer = layers.get(target)
                if layer is None:
                    layer = layers[target] = _replaced(model, target, self._active, name)
                layer.factors[name] = paddle.to_tensor(pair[0]), paddle.to_tensor(pair[1])

    def forward(
        self,
        ids: np.ndarray,
        padding: np.ndarray,
        cache: Cache | None,
        adapters: Sequence[str | None] = (),
    ) -> tuple[np.ndarray, Cache]:
        """See `Decoder`. adapters: that of each row; none for the model as it is."""
        with self._rows(adapters):
            return super().forward(ids, padding, cache)

    def prompt_logits(
        self, ids: Sequence[int], num_tokens: int | None = None, adapter: str | None = None
    ) -> Iterator[np.ndarray]:
        """See `ModelDecoder.prompt_logits`; with an adapter, or None for the model as it is."""
        return self._in_steps(super().prompt_logits(ids, num_tokens), [adapter])

    def embed(
        self, texts: Sequence[Sequence[int]], num_tokens: int | None = None, adapter: str | None = None
    ) -> Iterator[np.ndarray | None]:
        """See `ModelDecoder.embed`; with an adapter, or None for the model as it is."""
        return self._in_steps(super().embed(texts, num_tokens), [adapter] * len(texts))

    def _in_steps(self, steps: Iterator[T], names: Sequence[str | None]) -> Iterator[T]:
        """The same, whose passes are made with the adapters of these rows; between two steps others have theirs."""
        while True:
            with self._rows(names):
                try:
                    made = next(steps)
                except StopIteration:
                    return
            yield made

    @contextlib.contextmanager
    def _rows(self, names: Sequence[str | None]) -> Iterator[None]:
        self._active.names = names
        try:
            yield
        finally:
            self._active.names = ()


def _replaced(model: Any, target: str, rows: _Rows, adapter: str) -> AdaptedLinear:
    """Put an `AdaptedLinear` in place of the layer that has a matrix."""
    path = target.removesuffix(".weight")
    found = dict(model.named_sublayers()).get(path)
    if found is None or not is_plain_linear(found):
        raise UserError(
            f"--adapters {adapter}: {target} is no matrix of its own in this model; merge the adapter instead"
        )
    parent, _, last = path.rpartition(".")
    layer = AdaptedLinear(found, rows)
    setattr(dict(model.named_sublayers(include_self=True))[parent], last, layer)
    return layer
