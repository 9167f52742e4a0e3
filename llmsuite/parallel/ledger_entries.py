"""The numbers that a step's loss ledger sums over ranks. Plain data, without Paddle.

The engines and the `Trainer` book these entries, `loss_ledger` sums them, and the planner counts them.
"""

from __future__ import annotations

COUNTS = {"tokens": "num_tokens", "supervised_tokens": "num_supervised"}
"""Counts of a step that are summed and never divided, and the entries of a batch that they come from."""
REQUESTS = ("stop", "save")
"""Actions that any rank can request at the end of a step; then all ranks do them."""


def num_for_loader_ranks(num_sums: int) -> int:
    """Length of the all-reduce over the ranks that load data: the sum and the weight of each of `num_sums` metrics, the
    loss included; then counts and requests."""
    return 2 * num_sums + len(COUNTS) + len(REQUESTS)


def num_for_all_ranks() -> int:
    """Length of the all-reduce over all ranks, where some load no data: weight and value of the loss, then requests."""
    return 2 + len(REQUESTS)
