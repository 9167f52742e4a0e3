"""The operations of `llmsuite.devices.ops` by the kernels of this directory; equal to the plain forms up to rounding.

Each rank computes its local part of distributed tensors. What a kernel cannot take goes to the plain form: numbers that
are not float32, and distributed tensors inside a static program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.devices import ops
from llmsuite.devices.cpu.kernels.source import build_kernels
from llmsuite.typing import Tensor


@functools.cache  # Paddle loads a library only once
def load() -> bool:
    """Build the kernels, if need be, and register them with Paddle; False when they cannot be built."""
    library = build_kernels()
    if library is not None:
        paddle.utils.cpp_extension.load_op_meta_info_and_register_op(str(library))
    return library is not None


def no_mask(num_queries: int, num_keys: int, dtype: Any) -> None:
    """`causal_mask` of an attention that is causal by itself."""


def spans(document_starts: Tensor, dtype: Any) -> Tensor:
    """`document_mask` as `attention` takes it: `ops.document_spans`, [B, 3, L]."""
    return ops.document_spans(document_starts)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention that computes no score of a key which a token does not see. A mask is in the form of `spans`, or
    is added to the scores, as in generation."""
    if mask is not None and mask.dtype != paddle.int64:
        return ops.attention(q, k, v, mask)
    parts = _parts(q, k, v)
    if parts is None or not parts.are_alike:
        plain = ops.causal_mask(q.shape[1], k.shape[1], q.dtype) if mask is None else ops.span_mask(mask, q.dtype)
        return ops.attention(q, k, v, plain)
    return parts.whole(_run("attention", *parts.local, None if mask is None else _local(mask))[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm` in one pass."""
    parts = _parts(x, weight)
    if parts is None or not parts.are_alike:  # under sequence parallel the gradient of the weight is partial
        return ops.rms_norm(x, weight, eps)
    return parts.whole(_run("rms_norm", *parts.local, eps)[0])


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rotary` in one pass."""
    parts = _parts(x)
    if parts is None:
        return ops.rotary(x, cos, sin)
    return parts.whole(_run("rotary", *parts.local, _local(cos), _local(sin))[0])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu` in one pass."""
    parts = _parts(gate, up)
    if parts is None or not parts.are_alike:
        return ops.swiglu(gate, up)
    return parts.whole(_run("swiglu", *parts.local)[0])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """`ops.cross_entropy` of logits that nothing else needs: their gradient takes their memory."""
    parts = _parts(logits)
    if parts is None or logits.is_dist():
        return ops.cross_entropy(logits, targets)
    return _run("cross_entropy", logits, targets)[0]


def next_logits(
    weights: ops.DecoderWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    padding: Tensor,
    cache: Sequence[Tensor],
    filled: int,
) -> Tensor:
    """One new token of each row through a whole decoder, in one operation; see `ops.Ops`."""
    inputs = (x, cos, sin, padding, weights.layers, weights.norm, weights.head, list(cache), weights.eps)
    kind = (weights.num_queries, weights.has_bias, weights.has_head_norms, weights.is_tied, filled)
    return paddle._C_ops._run_custom_op("llmsuite_next_logits", *inputs, *kind)[0]


class _Parts:
    """The local parts of some tensors."""

    def __init__(self, tensors: tuple[Tensor, ...]):
        self._mesh, self._placements = None, None
        self.are_alike = True
        self.local = list(tensors)
        if tensors[0].is_dist():
            self._mesh, self._placements = tensors[0].process_mesh, tensors[0].placements
            self.are_alike = all(t.is_dist() and t.placements == self._placements for t in tensors)
            if self.are_alike:
                self.local = [dtensor_to_local(t, self._mesh, self._placements) for t in tensors]

    def whole(self, local: Tensor) -> Tensor:
        return local if self._mesh is None else dtensor_from_local(local, self._mesh, self._placements)


def _parts(*tensors: Tensor) -> _Parts | None:
    """None when the kernels cannot take them."""
    if any(t.dtype != paddle.float32 or 0 in t.shape for t in tensors):
        return None
    if tensors[0].is_dist() and (not paddle.in_dynamic_mode() or tensors[0].placements[0].is_partial()):
        return None
    return _Parts(tensors)


def _local(tensor: Tensor) -> Tensor:
    """The local part of a tensor that every rank has whole: `recompute` (Paddle 3.3.1) makes it a distributed one."""
    return tensor._local_value() if tensor.is_dist() else tensor


def _run(name: str, *inputs: Any) -> list[Tensor]:
    if paddle.in_dynamic_mode():
        inputs = tuple(x.contiguous() if isinstance(x, paddle.Tensor) else x for x in inputs)
    found: list[Tensor] = paddle._C_ops._run_custom_op(f"llmsuite_{name}", *inputs)
    return found
