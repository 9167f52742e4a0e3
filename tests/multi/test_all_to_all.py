"""Rows that ranks exchange arrive, also where some ranks have nothing for others."""

from __future__ import annotations

import os

import numpy as np

from tests.multi.conftest import Runner

NUM_RANKS = 4


def main() -> int:
    """What each rank does."""
    import paddle
    import paddle.distributed as dist

    from llmsuite.parallel import collective

    dist.init_parallel_env()
    group, rank = dist.new_group(list(range(NUM_RANKS))), int(os.environ["PADDLE_TRAINER_ID"])
    random = np.random.default_rng(0)  # the same on all
    for _ in range(20):
        counts = random.integers(0, 3, [NUM_RANKS, NUM_RANKS]) * random.integers(1, 50)
        rows = [np.full([counts[rank, to], 3], 10 * rank + to, "float32") for to in range(NUM_RANKS)]
        found = collective.all_to_all(
            paddle.to_tensor(np.concatenate(rows)), counts[rank].tolist(), counts[:, rank].tolist(), group
        )
        expected = [np.full([counts[origin, rank], 3], 10 * origin + rank, "float32") for origin in range(NUM_RANKS)]
        assert np.array_equal(found.numpy(), np.concatenate(expected))
    return 0


def test_rows_arrive(runner: Runner) -> None:
    code, output = runner.launch(NUM_RANKS, "tests.multi.test_all_to_all")
    assert code == 0, output
