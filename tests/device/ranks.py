"""Checks of the engine's messages on two ranks of the device `sim`, with each of their waits, and without one.

    python -m tests.device.launched 2 LOGS FILE tests.device.ranks

leaves what came of each check, and of each removal of `REMOVALS`, in FILE.RANK, as JSON; see `tests.standin.removals`.
With SIM_ORDER=2 an access without an order does not raise, so all ranks get on to the next check together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from tests.standin.removals import Removal
from tests.standin.table import OF_RANKS

NUM_RANKS = 2
ENVIRONMENT = {"SIM_ORDER": "2", "SIM_PATIENCE": "60", "LLMSUITE_TEST_DEVICE": "sim"}


def main(file: str) -> int:
    """What each rank does."""
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective
    from tests.device import SimBackend
    from tests.standin.ranks import on_any_rank
    from tests.standin.removals import tell

    SimBackend().activate(collective.local_rank())
    collective.start(Degrees(1, 2, 1, 1))
    checks = {name: functools.partial(_in_order, check) for name, check in CHECKS.items()}
    tell(Path(f"{file}.{collective.rank()}"), checks, REMOVALS, (), on_any_rank)
    return 0


def _in_order(check: Callable[[], None]) -> None:
    """Run a check; an access without an order counts for more than the numbers that come of it."""
    import paddle

    from tests.device.library import figures, last_unordered

    before = figures()["unordered"]
    error = None
    try:
        check()
    except AssertionError as found:
        error = found
    paddle.device.synchronize()
    if figures()["unordered"] > before:
        raise AssertionError(last_unordered()) from error
    if error is not None:
        raise error


def messages() -> None:
    """Numbers come as they were sent."""
    from tests.standin.ranks import exchanged, open_channels

    channels = open_channels()
    came = {value: exchanged(channels, value) for value in (1.0, 2.0)}
    # after the last message: a rank that stops earlier would leave the other one waiting
    for value, found in came.items():
        assert bool((found == value).all()), found


def _of_standin(name: str) -> Callable[[], None]:
    """A check of `tests.standin.ranks`, which imports Paddle."""

    def check() -> None:
        from tests.standin import ranks

        ranks.CHECKS[name]()

    return check


_ALSO = (
    *("sums", "scattered_sums", "gathered", "channels", "transposed", "tensor_parallel"),
    *("documents", "sequence_parallel", "adapters", "experts"),
)
CHECKS: dict[str, Callable[[], None]] = {"messages": messages, **{name: _of_standin(name) for name in _ALSO}}

_NOT_FOUND = (
    # one rank is refused, or both wait for each other: the end of the process, where the stand-in goes on
    "self._open(edges.channels(own, ring))",
    "if value is None else value.contiguous()",
    "                task.wait()",  # frees a record that a group of Gloo keeps
    "def settle(read: Tensor = flat)",  # keeps memory, which is found where it is used again, and here it is not
)
REMOVALS: tuple[Removal, ...] = tuple(
    removal
    for removal in OF_RANKS
    if removal.check in CHECKS and removal.file != "parallel/sharding.py" and removal.text not in _NOT_FOUND
)
