"""The numbers that a step's loss ledger sums over ranks. Plain data, without Paddle.

`train.step` and the `Trainer` book these entries, `loss_ledger` sums them, and the planner counts them.
"""

from __future__ import annotations

COUNTS = {"tokens": "num_tokens", "supervised_tokens": "num_supervised"}
"""Counts of a step that are summed and never divided, and the entries of a batch that they come from."""
VOTES = ("stop", "save")
"""What any rank may ask for at the end of a step, and all ranks then do."""


def num_of_readers(num_sums: int) -> int:
    """Numbers in the sum over the ranks that read data: of each of `num_sums` metrics, the loss included, the sum and
    its weight; then counts and votes."""
    return 2 * num_sums + len(COUNTS) + len(VOTES)


def num_of_run() -> int:
    """Numbers in the sum over all ranks, where some read no data: weight and value of the loss, then votes."""
    return 2 + len(VOTES)
