"""Rows that ranks exchange arrive, also where some ranks have nothing for others."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.multi.conftest import Runner


def main() -> int:
    """What each rank does."""
    import paddle
    import paddle.distributed as dist

    from llmsuite.parallel import collective

    dist.init_parallel_env()
    rank, num_ranks = (int(os.environ[key]) for key in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
    group = dist.new_group(list(range(num_ranks)))
    random = np.random.default_rng(0)  # the same on all
    for _ in range(20):
        counts = random.integers(0, 3, [num_ranks, num_ranks]) * random.integers(1, 50)
        rows = [np.full([counts[rank, to], 3], 10 * rank + to, "float32") for to in range(num_ranks)]
        found = collective.all_to_all(
            paddle.to_tensor(np.concatenate(rows)), counts[rank].tolist(), counts[:, rank].tolist(), group
        )
        expected = [np.full([counts[origin, rank], 3], 10 * origin + rank, "float32") for origin in range(num_ranks)]
        assert np.array_equal(found.numpy(), np.concatenate(expected))
        told = [bytes([10 * rank + to]) * counts[rank, to] for to in range(num_ranks)]
        heard = collective.all_to_all_bytes(b"".join(told), counts[rank].tolist(), counts[:, rank].tolist(), group)
        assert heard == b"".join(bytes([10 * of + rank]) * counts[of, rank] for of in range(num_ranks))
    return 0


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_rows_arrive(runner: Runner, num_ranks: int) -> None:
    code, output = runner.launch(num_ranks, "tests.multi.test_all_to_all")
    assert code == 0, output
