"""The check of `llmsuite doctor` that distributed tensors get every placement: tensor parallelism needs it."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.base.errors import line_of
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.parallel import collective


def find_wrong_reshard(num_ranks: int) -> str | None:
    """The first wrong placement or gradient, in one line; None if there is none. All ranks call it."""
    mesh = dist.ProcessMesh(list(range(num_ranks)), ["tp"])
    values = np.arange(4 * num_ranks * num_ranks, dtype="float32").reshape(2 * num_ranks, 2 * num_ranks)
    wrong = None
    try:
        wrong = _wrong_placement(mesh, values) or _wrong_gradient(mesh, values)
    except Exception as error:  # Paddle's errors have many types
        wrong = f"{type(error).__name__}: {line_of(error)}"
    is_wrong = collective.sum_over_run([0.0 if wrong is None else 1.0])[0]
    return wrong or ("another rank has a wrong placement" if is_wrong else None)


def _wrong_placement(mesh: dist.ProcessMesh, values: np.ndarray) -> str | None:
    places = [dist.Replicate(), dist.Shard(0), dist.Shard(1)]
    for first in places:
        for second in places:
            x = dist.reshard(dist.shard_tensor(tensor_of(values), mesh, [first]), mesh, [second])
            if not np.array_equal(array_of(x._local_value()), _part(mesh, values, second)):
                return f"a tensor that goes from {first} to {second} has wrong values"
    return None


def _part(mesh: dist.ProcessMesh, values: np.ndarray, place: dist.Placement) -> np.ndarray:
    if not place.is_shard():
        return values
    return np.array_split(values, mesh.shape[0], axis=place.get_dim())[collective.rank()]


def _wrong_gradient(mesh: dist.ProcessMesh, values: np.ndarray) -> str | None:
    weight = dist.shard_tensor(tensor_of(values), mesh, [dist.Shard(1)], stop_gradient=False)
    x = dist.shard_tensor(paddle.ones([1, values.shape[0]]), mesh, [dist.Replicate()])
    for _ in range(2):
        paddle.matmul(x, weight).sum().backward()
    found = array_of(weight.grad._local_value())
    return None if (found == 2.0).all() else "the sum of two gradients of a distributed tensor is wrong"
