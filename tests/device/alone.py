"""The checks and removals of `tests.standin.alone` on the device `sim`: `python -m tests.device.launched 1 LOGS FILE
tests.device.alone`."""

from __future__ import annotations


# a kernel that refuses its inputs is an error at the call
ENVIRONMENT = {"SIM_SYNC": "1"}


def main(file: str) -> int:
    """What the process does."""
    from tests.standin import alone  # imports Paddle

    return alone.main(file)
