"""New values for a model that generates while its weights are being trained: written in place, nothing is built again.

Kernels and forms of `llmsuite.inference.fused` hold on to the tensors of the model, so these stay the same. Between
rollouts they may have no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import paddle

from llmsuite.devices.decoder_weights import StoredMatrix
from llmsuite.devices.ops import Ops, operand
from llmsuite.inference.fused import TiedLogits, fuse
from llmsuite.inference.fusible import attentions, is_gated_mlp
from llmsuite.inference.stored_layers import StoredLinear
from llmsuite.models.blocks import Attention, GatedMLP, halves_first
from llmsuite.models.deepseek.layers import Attention as LatentAttention
from llmsuite.models.products import Products, use_products
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the values of a parameter are in the fused model."""

    to: Tensor | StoredMatrix
    columns: slice | None = None
    """The part of the last dim, or the outputs of a stored matrix; None for all of them."""
    order: Tensor | None = None
    """The columns of the parameter in the order in which they are stored; None for its own."""
    turned: bool = False
    """Whether the outputs of a stored matrix are the rows of the parameter."""

    @property
    def tensor(self) -> Tensor:
        """What holds the values."""
        return self.to.bytes if isinstance(self.to, StoredMatrix) else self.to


class RefreshableModel:
    """A fused model whose parameters get new values by the names they had before."""

    def __init__(self, model: Any, live: Ops | None = None):
        """
        Args:
            model: in evaluation mode, not sharded over ranks. It is fused, see `fused.fuse`.
            live: the device's operations. Where these round what products take, the model has their products, or
                matrices that are stored for them (`stored.store_rounding`).
        """
        found = set(map(id, attentions(model)))
        joined: list[tuple[str, Any, str, Sequence[str]]]
        joined = [(n, m, "qkv_proj", _QKV) for n, m in model.named_sublayers() if id(m) in found]
        joined += [(n, m, "gate_up_proj", _GATE_UP) for n, m in model.named_sublayers() if is_gated_mlp(m)]
        widths = {prefix: list(_widths(module)) for prefix, module, *_ in joined}
        self._write = None if live is None else live.stored_write
        is_stored = any(isinstance(module, StoredLinear) for module in model.sublayers())
        own_products = live is not None and live.operand is not operand and not is_stored
        # as training has it between products
        swiglu = {} if live is None or live.operand_matmul is None else {"joined_swiglu": live.joined_swiglu}
        projected = live.attention_operand if live is not None and live.attends_operands else None
        fuse(model, None if own_products else live, projected=projected, **swiglu)
        if own_products:
            assert live is not None
            model.__dict__.pop("tied_logits", None)  # `fuse` has put Paddle's product there
            use_products(model, Products(live))
        self.model = model
        self._latent = [module for module in model.sublayers() if isinstance(module, LatentAttention)]
        self._places: dict[str, list[_Place]] = {}
        for name, parameter in model.named_parameters():
            self._add(name, _Place(parameter))
        for prefix, module, name, parts in joined:
            self._add_joined(prefix, name, parts, widths[prefix], module)
        every_joined = {f"{prefix}.{name}" for prefix, _, name, _ in joined}
        for name, module in model.named_sublayers():
            if isinstance(module, StoredLinear) and name not in every_joined:
                self._add(f"{name}.weight", _Place(module.matrix))
        if isinstance(tied := model.__dict__.get("tied_logits"), StoredLinear):
            self._add("model.embed_tokens.weight", _Place(tied.matrix, turned=True))

    def _add(self, name: str, place: _Place) -> None:
        self._places.setdefault(name, []).append(place)

    def _add_joined(
        self,
        prefix: str,
        name: str,
        parts: Sequence[str],
        widths: Sequence[int],
        module: Attention | GatedMLP,
    ) -> None:
        """Places of matrices that are one now."""
        joined = getattr(module, name)
        weight = joined.matrix if isinstance(joined, StoredLinear) else joined.weight
        for kind in ("weight", "bias"):
            self._places.pop(f"{prefix}.{name}.{kind}", None)
        begin = 0
        for part, width in zip(parts, widths, strict=True):
            order = None
            if isinstance(module, Attention) and module.interleaved and part != "v_proj":
                order = halves_first(width // module.head_size, 0, module.head_size)
            columns = slice(begin, begin + width)
            self._add(f"{prefix}.{part}.weight", _Place(weight, columns, order))
            if joined.bias is not None:
                self._add(f"{prefix}.{part}.bias", _Place(joined.bias, columns, order))
            begin += width

    @paddle.no_grad()
    def release(self) -> None:
        """Free the memory of all parameters; the model cannot compute until the next `refresh`."""
        for places in self._places.values():
            for place in places:
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
            for place in self._places[name]:
                self._refresh(place, value)
            missing.discard(name)
        assert not missing, f"no new values of {sorted(missing)}"
        self._forget_copies()
        for module in self._latent:
            module.keep_up_matrices()

    def _forget_copies(self) -> None:
        if isinstance(logits := self.model.__dict__.get("tied_logits"), TiedLogits):
            logits.forget()
        for module in self._latent:
            module.drop_up_matrices()

    def _refresh(self, place: _Place, value: Tensor) -> None:
        to, columns, tensor = place.to, place.columns, place.tensor
        if not tensor._is_initialized():
            fresh = paddle.empty(tensor.shape, tensor.dtype)
            tensor.get_tensor()._share_data_with(fresh.get_tensor())
        value = value.astype("float32" if isinstance(to, StoredMatrix) else to.dtype)
        if place.order is not None:
            value = value.index_select(place.order, value.ndim - 1)
        if isinstance(to, StoredMatrix):
            assert self._write is not None, "the device has stored matrices"
            self._write(value, to, 0 if columns is None else columns.start, place.turned)
        elif columns is None:
            to.copy_(value, True)
        else:
            to[..., columns] = value


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _widths(module: Attention | GatedMLP) -> Iterator[int]:
    """Outputs of the matrices of a module that are joined, or are to be."""
    parts = [getattr(module, part) for part in (_QKV if isinstance(module, Attention) else _GATE_UP)]
    if all(part is None for part in parts):  # stored: joined already
        if isinstance(module, Attention):
            num_queries, num_keys = module.num_heads
            yield from (count * module.head_size for count in (num_queries, num_keys, num_keys))
        else:
            yield from [module.gate_up_proj.matrix.num_outputs // 2] * 2
        return
    yield from (int(part.weight.shape[1]) for part in parts)
