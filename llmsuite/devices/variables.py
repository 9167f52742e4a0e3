"""Numbers that a launcher or a scheduler gives to a process in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmsuite.errors import UserError

RANK, NUM_RANKS, LOCAL_RANK = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_RANK"
OWN_ADDRESS, ADDRESSES = "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS"


def number_in(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in a variable; `default` where it is not set.

    Raises:
        UserError: it is none, or is not set and there is no default.
    """
    given = variables.get(name)
    if given is None and default is not None:
        return default
    if given is None or not (given.isascii() and given.isdecimal() and len(given) < 10):
        what = "is not set" if given is None else f"is {given!r} in the environment"
        raise UserError(f"{name}: {what}; a launcher sets it to a number, else unset it")
    return int(given)


def check_rank() -> None:
    """Raises UserError where the variables of a rank cannot be: Paddle reads them when it is imported, and fails."""
    rank, num_ranks, _ = (number_in(os.environ, *of) for of in ((RANK, 0), (NUM_RANKS, 1), (LOCAL_RANK, 0)))
    if rank >= num_ranks:
        raise UserError(
            f"{RANK}: is {rank} in the environment, and {NUM_RANKS} is {num_ranks}; ranks are counted from 0: unset "
            "both if nobody started this process so"
        )


def check_addresses() -> str:
    """Where a rank finds the others; raises UserError where nobody has told it."""
    for name in (OWN_ADDRESS, ADDRESSES):
        if not os.environ.get(name):
            raise UserError(
                f"{name}: is not set in the environment, and {NUM_RANKS} is {os.environ.get(NUM_RANKS)}; a launcher "
                f"sets both. Unset {RANK} and {NUM_RANKS} if nobody started this process as one of several"
            )
    return os.environ.get("PADDLE_MASTER") or os.environ[ADDRESSES].split(",")[0]
