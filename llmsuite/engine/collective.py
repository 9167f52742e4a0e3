"""The ranks of this run, and the few things they tell each other outside the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

Tensor = Any


def rank() -> int:
    """This process, from 0."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def local_rank() -> int:
    """This process among those of its machine, from 0."""
    return int(os.environ.get("PADDLE_LOCAL_RANK", "0"))


def num_ranks() -> int:
    """Processes of the run."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def start() -> None:
    """Meet the other ranks; nothing to do when alone."""
    if num_ranks() > 1:
        with contextlib.redirect_stdout(None):  # Paddle 3.3.1 lists flags here that nobody has set
            dist.init_parallel_env()


def barrier() -> None:
    """Wait until every rank is here."""
    if num_ranks() > 1:
        dist.barrier()


def sum_floats(values: Sequence[float]) -> list[float]:
    """Add up numbers over all ranks, in float64."""
    if num_ranks() == 1:
        return list(values)
    tensor = paddle.to_tensor(list(values), dtype="float64")
    dist.all_reduce(tensor)
    return [float(v) for v in tensor.numpy()]


def sum_in_place(tensors: Iterable[Tensor]) -> None:
    """Add up tensors over all ranks."""
    if num_ranks() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
