"""Kernels of distributed tensors: each rank computes its part, and no tensor is brought together for it.

The kernels of GPUs are not part of a Paddle for the CPU. What stands in for them does to distributed tensors what
Paddle 3.3.1 does for an operation that it knows no rule of: it makes them whole, on every rank.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.multi.conftest import Runner

NUM_RANKS = 2
EPS = 1e-5


def main() -> int:
    """What each rank does."""
    import paddle.distributed as dist
    import paddle.nn.functional as F

    from llmsuite.devices import masks, ops, paddle_kernels
    from llmsuite.plugins.cpu_kernels import kernels as cpu

    dist.init_parallel_env()
    mesh = dist.ProcessMesh(list(range(NUM_RANKS)), dim_names=["tp"])

    def whole(x: Any) -> Any:
        return dist.reshard(x, mesh, [dist.Replicate()]) if x.is_dist() else x

    def norm(x: Any, shape: list[int], weight: Any, eps: float) -> tuple[Any, None]:
        return ops.rms_norm(whole(x), whole(weight), eps), None

    def flash(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, None]:
        q, k, v = (whole(x) * 1.0 for x in (q, k, v))  # whose gradient is contiguous, as that of a kernel
        return ops.attention(q, k, v, masks.causal_mask(q.shape[1], k.shape[1], q.dtype)), None

    F.rms_norm = norm
    F.flash_attention.flash_attention = flash
    cpu.load()
    random = np.random.default_rng(0)  # the same on all
    hidden = random.standard_normal([2, 6, 8])
    gain = random.standard_normal([8])
    heads = [random.standard_normal([2, 6, 4, 8]) for _ in range(3)]
    forms: dict[str, tuple[Any, Any]] = {
        "gpu": (paddle_kernels.fused_rms_norm, paddle_kernels.flash_attention),
        "cpu": (cpu.rms_norm, cpu.attention),
    }
    for name, (rms_norm, attention) in forms.items():
        # sequence parallel; heads of queries that have a norm; all ranks alike
        for x, place in ((hidden, dist.Shard(1)), (heads[0], dist.Shard(2)), (hidden, dist.Replicate())):
            form = functools.partial(rms_norm, eps=EPS)
            _check(f"{name} norm {place}", form, mesh, [x, gain], [place, dist.Replicate()])
        _check(f"{name} attention", functools.partial(attention, mask=None), mesh, heads, [dist.Shard(2)] * 3)
    return 0


def _check(name: str, form: Any, mesh: Any, values: list[np.ndarray], places: list[Any]) -> None:
    """Placements of an output, and its values and gradients beside those of plain tensors."""
    import paddle
    import paddle.distributed as dist

    plain = [paddle.to_tensor(value.astype("float32"), stop_gradient=False) for value in values]
    split = [dist.shard_tensor(x.detach(), mesh, [place]).detach() for x, place in zip(plain, places)]
    found = []
    for tensors in (plain, split):
        for x in tensors:
            x.stop_gradient = False
        y = form(*tensors)
        (y * y).sum().backward()
        found.append([y, *(x.grad for x in tensors)])
    assert found[1][0].placements == [places[0]], f"{name}: {found[1][0].placements}"
    for expected, got in zip(*found):
        got = dist.reshard(got, mesh, [dist.Replicate()])._local_value()
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


def test_each_rank_computes_its_part(runner: Runner) -> None:
    code, output = runner.launch(NUM_RANKS, "tests.multi.test_split_kernels", fresh=True)
    assert code == 0, output
