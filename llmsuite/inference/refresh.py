"""New values for a model that generates while its weights are being trained: written in place, nothing is built again.

Kernels and forms of `llmsuite.inference.fused` hold on to the tensors of the model, so these stay the same. Between
rollouts they may have no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.devices.ops import Ops
from llmsuite.inference.fused import TiedLogits, fuse
from llmsuite.models.blocks import Attention, GatedMLP, halves_first
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the values of a parameter are in the fused model."""

    tensor: Tensor
    columns: slice | None = None
    """The part of the last dim; None for all of it."""
    order: Tensor | None = None
    """The columns of the parameter in the order in which they are stored; None for its own."""


class RefreshableModel:
    """A fused model whose parameters get new values by the names they had before."""

    def __init__(self, model: Any, live: Ops | None = None):
        """
        Args:
            model: in evaluation mode, not sharded over ranks. It is fused, see `fused.fuse`.
            live: the device's operations.
        """
        attentions = [(n, m) for n, m in model.named_sublayers() if isinstance(m, Attention)]
        mlps = [(n, m) for n, m in model.named_sublayers() if isinstance(m, GatedMLP)]
        widths = {
            f"{prefix}.{part}": int(getattr(module, part).weight.shape[1])
            for prefix, module in [*attentions, *mlps]
            for part in (_QKV if isinstance(module, Attention) else _GATE_UP)
            if getattr(module, part, None) is not None
        }
        fuse(model, live)
        self.model = model
        self._places = {name: _Place(parameter) for name, parameter in model.named_parameters()}
        for prefix, module in attentions:
            self._add_joined(prefix, "qkv_proj", getattr(module, "qkv_proj", None), _QKV, widths, module)
        for prefix, module in mlps:
            self._add_joined(prefix, "gate_up_proj", getattr(module, "gate_up_proj", None), _GATE_UP, widths, None)

    def _add_joined(
        self,
        prefix: str,
        name: str,
        joined: nn.Linear | None,
        parts: Sequence[str],
        widths: dict[str, int],
        attention: Attention | None,
    ) -> None:
        """Places of matrices that are one now, where they are."""
        if joined is None:
            return
        begin = 0
        for part in parts:
            width = widths[f"{prefix}.{part}"]
            order = None
            if attention is not None and attention.interleaved and part != "v_proj":
                order = halves_first(width // attention.head_size, 0, attention.head_size)
            columns = slice(begin, begin + width)
            for kind in ("weight", "bias"):
                if (tensor := getattr(joined, kind)) is not None:
                    self._places[f"{prefix}.{part}.{kind}"] = _Place(tensor, columns, order)
            begin += width
        for kind in ("weight", "bias"):
            self._places.pop(f"{prefix}.{name}.{kind}", None)

    @paddle.no_grad()
    def release(self) -> None:
        """Free the memory of all parameters; the model cannot compute until the next `refresh`."""
        for place in self._places.values():
            place.tensor.get_tensor()._clear()
        self._forget_copies()

    @property
    def names(self) -> set[str]:
        """Names of the parameters that `refresh` takes."""
        return set(self._places)

    @paddle.no_grad()
    def refresh(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write new values of every parameter: name and whole tensor, one after the other."""
        missing = set(self._places)
        for name, value in values:
            place = self._places[name]
            if not place.tensor._is_initialized():
                fresh = paddle.empty(place.tensor.shape, place.tensor.dtype)
                place.tensor.get_tensor()._share_data_with(fresh.get_tensor())
            value = value.astype(place.tensor.dtype)
            if place.order is not None:
                value = value.index_select(place.order, value.ndim - 1)
            if place.columns is None:
                place.tensor.copy_(value, True)
            else:
                place.tensor[..., place.columns] = value
            missing.discard(name)
        assert not missing, f"no new values of {sorted(missing)}"
        self._forget_copies()

    def _forget_copies(self) -> None:
        if isinstance(logits := self.model.__dict__.get("logits"), TiedLogits):
            logits.forget()


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
