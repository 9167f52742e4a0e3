"""The numbers that a step's loss ledger sums over ranks. Plain data, without Paddle.

The engines and the `Trainer` book these entries, `loss_ledger` sums them, and the planner counts them.
"""

from __future__ import annotations

from typing import NamedTuple

from llmsuite.parallel.mesh import RUN, Mesh

COUNTS = {"tokens": "num_tokens", "supervised_tokens": "num_supervised"}
"""Counts of a step that are summed and never divided, and the entries of a batch that they come from."""
REQUESTS = ("stop", "save")
"""Actions that any rank can request at the end of a step; then all ranks do them."""


class LedgerCall(NamedTuple):
    """An all-reduce of the ledger of a step."""

    group: str
    """Kind of the group of `mesh`."""
    num_numbers: int
    why: str


def ledger_calls(mesh: Mesh, num_sums: int) -> list[LedgerCall]:
    """The calls of a rank that `LossLedger.reduce` makes, in this order; `num_sums` metrics, the loss included."""
    calls = []
    if mesh.loads_data:
        calls.append(LedgerCall(mesh.loaders, num_for_loader_ranks(num_sums), "ledger of the loss"))
    if mesh.has_middle_stages:
        calls.append(LedgerCall(RUN, num_for_all_ranks(), "ledger of the loss, for ranks that load no data"))
    return calls


def num_for_loader_ranks(num_sums: int) -> int:
    """Length of the all-reduce over the ranks that load data: the sum and the weight of each of `num_sums` metrics, the
    loss included; then counts and requests."""
    return 2 * num_sums + len(COUNTS) + len(REQUESTS)


def num_for_all_ranks() -> int:
    """Length of the all-reduce over all ranks, where some load no data: weight and value of the loss, then requests."""
    return 2 + len(REQUESTS)
