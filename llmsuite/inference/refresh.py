"""In-place weight updates of a rollout model, which generates while its weights are trained: nothing is rebuilt.

Kernels and fused layers (`llmsuite.inference.fused`) keep references to the tensors of the model, so these stay the
same objects. Between rollouts their memory may be released.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import PackedWeight
from llmsuite.devices.decoding_ops import joined_swiglu as plain_swiglu
from llmsuite.devices.ops import Ops
from llmsuite.inference.fused import JoinedSwiglu, RoundQkv, TransposedTiedHead, fuse
from llmsuite.inference.fusible import attentions, is_gated_mlp
from llmsuite.inference.packed_layers import PackedLinear, PackedTiedHead
from llmsuite.models.blocks import Attention, GatedMLP, TiedHead, halves_first
from llmsuite.models.exact import is_exactly
from llmsuite.models.latent_attention import LatentAttention
from llmsuite.models.linear_ops import LinearOps, use_linear_ops


@dataclasses.dataclass(frozen=True)
class _WeightSlot:
    """The part of a tensor of the fused model that has the values of a parameter."""

    target: Tensor | PackedWeight
    columns: slice | None = None
    """The part of the last dim, or of the outputs of a packed matrix; None for all of them."""
    order: Tensor | None = None
    """The columns of the parameter in the order of the tensor; None for the same order."""
    transposed: bool = False
    """True where the outputs of a packed matrix are the rows of the parameter."""

    @property
    def tensor(self) -> Tensor:
        """The tensor that has the values."""
        return self.target.bytes if isinstance(self.target, PackedWeight) else self.target


class RefreshableModel:
    """A fused model whose parameters get new values, by the names that they had before the model was fused."""

    def __init__(self, model: Any, live: Ops | None = None):
        """
        Args:
            model: in evaluation mode, not sharded over ranks. It is fused here, see `fused.fuse`.
            live: the device's operations. Where these round the inputs of matmuls, the model gets their matmuls, or
                matrices that are stored for them (`pack_model.pack_bf16`).
        """
        fusible = set(map(id, attentions(model)))
        joined: list[tuple[str, Any, str, Sequence[str]]]
        joined = [(n, m, "qkv_proj", _QKV) for n, m in model.named_sublayers() if id(m) in fusible]
        joined += [(n, m, "gate_up_proj", _GATE_UP) for n, m in model.named_sublayers() if is_gated_mlp(m)]
        widths = {prefix: list(_widths(module)) for prefix, module, *_ in joined}
        packed_ops = None if live is None else live.decoding.packed
        self._write = None if packed_ops is None else packed_ops.write_packed
        is_stored = any(isinstance(module, PackedLinear) for module in model.sublayers())
        uses_linear_ops = live is not None and live.matmuls.rounds_inputs and not is_stored
        # where training rounds the outputs of matmuls, it also rounds between them
        swiglu: JoinedSwiglu = plain_swiglu
        round_qkv: RoundQkv | None = None
        if live is not None and live.matmuls.rounds_outputs:
            swiglu = live.decoding.joined_swiglu
        if live is not None and live.matmuls.rounds_attention:
            round_qkv = live.matmuls.round_attention_input
        fuse(model, None if uses_linear_ops else live, joined_swiglu=swiglu, round_qkv=round_qkv)
        if uses_linear_ops:
            assert live is not None
            model.tied_head = TiedHead()  # `fuse` has set one with Paddle's matmul
            use_linear_ops(model, LinearOps(live))
            for module in model.sublayers():
                # not fused, as in a model with other attention in other layers
                if is_exactly(module, Attention) and module.q_proj is not None:
                    module.rounds_activations = live.matmuls.rounds_attention and module.q_norm is None
        self.model = model
        self._latent = [module for module in model.sublayers() if isinstance(module, LatentAttention)]
        self._slots: dict[str, list[_WeightSlot]] = {}
        for name, parameter in model.named_parameters():
            self._add(name, _WeightSlot(parameter))
        for prefix, module, name, parts in joined:
            self._add_joined(prefix, name, parts, widths[prefix], module)
        all_joined = {f"{prefix}.{name}" for prefix, _, name, _ in joined}
        for name, module in model.named_sublayers():
            if isinstance(module, PackedLinear) and name not in all_joined:
                self._add(f"{name}.weight", _WeightSlot(module.matrix))
        if isinstance(model.tied_head, PackedTiedHead):
            self._add("model.embed_tokens.weight", _WeightSlot(model.tied_head.layer.matrix, transposed=True))

    def _add(self, name: str, slot: _WeightSlot) -> None:
        self._slots.setdefault(name, []).append(slot)

    def _add_joined(
        self,
        prefix: str,
        name: str,
        parts: Sequence[str],
        widths: Sequence[int],
        module: Attention | GatedMLP,
    ) -> None:
        """Add the slots of matrices that are concatenated now."""
        joined = getattr(module, name)
        weight = joined.matrix if isinstance(joined, PackedLinear) else joined.weight
        for kind in ("weight", "bias"):
            self._slots.pop(f"{prefix}.{name}.{kind}", None)
        begin = 0
        for part, width in zip(parts, widths, strict=True):
            order = None
            if isinstance(module, Attention) and module.interleaved and part != "v_proj":
                order = halves_first(width // module.head_size, 0, module.head_size)
            columns = slice(begin, begin + width)
            self._add(f"{prefix}.{part}.weight", _WeightSlot(weight, columns, order))
            if joined.bias is not None:
                self._add(f"{prefix}.{part}.bias", _WeightSlot(joined.bias, columns, order))
            begin += width

    @paddle.no_grad()
    def release(self) -> None:
        """Free the memory of all parameters; the model cannot compute until the next `refresh`."""
        for slots in self._slots.values():
            for slot in slots:
                slot.tensor.get_tensor()._clear()
        self._drop_derived()

    @property
    def names(self) -> set[str]:
        """Names of the parameters that `refresh` takes."""
        return set(self._slots)

    @paddle.no_grad()
    def refresh(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write new values of every parameter. `values`: name and full, unsharded tensor of each."""
        missing = set(self._slots)
        for name, value in values:
            for slot in self._slots[name]:
                self._refresh(slot, value)
            missing.discard(name)
        assert not missing, f"no new values of {sorted(missing)}"
        self._drop_derived()
        for module in self._latent:
            module.keep_up_matrices()

    def _drop_derived(self) -> None:
        if isinstance(self.model.tied_head, TransposedTiedHead):
            self.model.tied_head.clear_transposed()
        for module in self._latent:
            module.drop_up_matrices()

    def _refresh(self, slot: _WeightSlot, value: Tensor) -> None:
        target = slot.target
        columns = slot.columns
        tensor = slot.tensor
        if not tensor._is_initialized():
            # its memory was freed while the model trained; layers keep the tensor itself
            fresh = paddle.empty(tensor.shape, tensor.dtype)
            tensor.get_tensor()._share_data_with(fresh.get_tensor())
        value = value.astype("float32" if isinstance(target, PackedWeight) else target.dtype)
        if slot.order is not None:
            value = value.index_select(slot.order, value.ndim - 1)
        if isinstance(target, PackedWeight):
            assert self._write is not None, "the device has packed matrices"
            self._write(value, target, 0 if columns is None else columns.start, slot.transposed)
        elif columns is None:
            target.copy_(value, True)
        else:
            target[..., columns] = value


_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def _widths(module: Attention | GatedMLP) -> Iterator[int]:
    """Number of outputs of each matrix of a module that is concatenated, or will be."""
    parts = [getattr(module, part) for part in (_QKV if isinstance(module, Attention) else _GATE_UP)]
    if all(part is None for part in parts):  # packed: concatenated already
        if isinstance(module, Attention):
            num_queries, num_keys = module.num_heads
            yield from (count * module.head_size for count in (num_queries, num_keys, num_keys))
        else:
            yield from [module.gate_up_proj.matrix.num_outputs // 2] * 2
        return
    yield from (int(part.weight.shape[1]) for part in parts)
