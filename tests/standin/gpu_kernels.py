"""Functions in place of the GPU's fused kernels: they check what those check, and compute in float32.

The checks are those of Paddle 3.3.1's kernels and of FlashAttention 2, which they call: flash_attn_kernel.cu,
rms_norm_kernel.cu, fused_rope_kernel.cu, swiglu_kernel.cu.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices import masks, ops

_SHORT = (paddle.bfloat16, paddle.float16)


def install() -> None:
    """Put them where the GPU's are."""
    F.flash_attention.flash_attention = _flash_attention
    F.flashmask_attention = _flashmask_attention
    F.rms_norm = _rms_norm
    F.swiglu = _swiglu
    paddle.incubate.nn.functional.fused_rotary_position_embedding = _rotary


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the GPU's kernel refuses this: {what}")


def _plain(*tensors: Tensor, has_rule: bool = False) -> None:
    """`has_rule`: programs know how to split the kernel over ranks."""
    for tensor in tensors:
        in_program = isinstance(tensor, paddle.pir.Value)
        _require(
            not tensor.is_dist() or (in_program and has_rule), "a distributed tensor, for which Paddle has no rule"
        )
        # a tensor of a program has no strides while that is made
        _require(in_program or tensor.is_contiguous(), f"the strides of a tensor of shape {tensor.shape}")


def _heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    _plain(q, k, v, has_rule=True)
    for x in (q, k, v):
        _require(x.dtype in _SHORT and x.dtype == q.dtype, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
        _require(x.ndim == 4, f"{x.ndim} dims")
    _require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"heads of {q.shape[-1]}")
    _require(k.shape == v.shape and q.shape[0] == k.shape[0], f"shapes {q.shape}, {k.shape}, {v.shape}")
    _require(q.shape[2] % k.shape[2] == 0, f"{q.shape[2]} heads of queries, {k.shape[2]} of keys")


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return ops.attention(*(x.astype("float32") for x in (q, k, v)), mask).astype(q.dtype)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> Any:
    _heads(q, k, v)
    _require(not dropout, "dropout, which the stand-in lacks")
    mask = masks.causal_mask(q.shape[1], k.shape[1], paddle.float32) if causal else None
    return _attend(q, k, v, mask), None


def _flashmask_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, causal: bool) -> Tensor:
    _heads(q, k, v)
    _plain(ends, has_rule=True)
    length = k.shape[1]
    _require(causal and ends.dtype == paddle.int32, f"a mask of {ends.dtype}")
    _require(ends.ndim == 4 and ends.shape[0] == q.shape[0], f"a mask of {ends.shape} for {q.shape}")
    _require(ends.shape[1] in (1, k.shape[2]) and ends.shape[2:] == [length, 1], str(ends.shape))
    rows = paddle.arange(q.shape[1], dtype="int32").reshape([1, 1, -1, 1])
    seen = paddle.logical_and(rows < ends.transpose([0, 1, 3, 2]), rows >= paddle.arange(length, dtype="int32"))
    return _attend(q, k, v, (seen.astype("float32") - 1) * 1e9)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, None]:
    _plain(x, weight)
    _require(shape == [x.shape[-1]] == weight.shape, f"norm of {shape} with a weight of {weight.shape}")
    _require(x.dtype == weight.dtype, f"{x.dtype} with a weight in {weight.dtype}")
    return ops.rms_norm(x.astype("float32"), weight.astype("float32"), eps).astype(x.dtype), None


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:  # both in one
        gate, up = gate.chunk(2, axis=-1)
    _require(gate.dtype == up.dtype and gate.shape == up.shape, f"{gate.dtype} {gate.shape}, {up.dtype} {up.shape}")
    return ops.swiglu(gate.astype("float32"), up.astype("float32")).astype(gate.dtype)


def _rotary(q: Tensor, k: None, v: None, *, sin: Tensor, cos: Tensor, use_neox_rotary_style: bool) -> Any:
    _require(q.ndim == 4 and q.shape[-1] % 2 == 0, f"shape {q.shape}")
    _require(q.dtype == sin.dtype == cos.dtype, f"{q.dtype} with sin in {sin.dtype}, cos in {cos.dtype}")
    _require(sin.shape == cos.shape == [1, q.shape[1], 1, q.shape[-1]], f"sin of {sin.shape} for {q.shape}")
    _require(not use_neox_rotary_style, "pairs of neighbours")
    half = q.shape[-1] // 2
    turned = (t.astype("float32") for t in (q, cos[..., :half], sin[..., :half]))
    return ops.rotary(*turned).astype(q.dtype), None, None
