"""Environment variables by which a launcher or a scheduler describes a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmsuite.base.errors import UserError

RANK = "PADDLE_TRAINER_ID"
NUM_RANKS = "PADDLE_TRAINERS_NUM"
LOCAL_RANK = "PADDLE_LOCAL_RANK"
OWN_ADDRESS = "PADDLE_CURRENT_ENDPOINT"
ADDRESSES = "PADDLE_TRAINER_ENDPOINTS"


def number_in(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in a variable; `default` if it is not set.

    Raises:
        UserError: it is not a number, or it is not set and there is no default.
    """
    given = variables.get(name)
    if given is None and default is not None:
        return default
    if given is None or not (given.isascii() and given.isdecimal() and len(given) < 10):
        what = "is not set" if given is None else f"is {given!r} in the environment"
        raise UserError(f"{name}: {what}; a launcher sets it to a number, else unset it")
    return int(given)


def check_rank() -> None:
    """Raise UserError if the variables of a rank are invalid: Paddle reads them when it is imported, and would fail."""
    rank, num_ranks, _ = (number_in(os.environ, *of) for of in ((RANK, 0), (NUM_RANKS, 1), (LOCAL_RANK, 0)))
    if rank >= num_ranks:
        raise UserError(
            f"{RANK}: is {rank} in the environment, and {NUM_RANKS} is {num_ranks}; ranks are counted from 0: unset "
            "both if no launcher started this process"
        )


def check_addresses() -> str:
    """Address of the rendezvous of the ranks; raises UserError if the environment does not have it."""
    for name in (OWN_ADDRESS, ADDRESSES):
        if not os.environ.get(name):
            raise UserError(
                f"{name}: is not set in the environment, and {NUM_RANKS} is {os.environ.get(NUM_RANKS)}; a launcher "
                f"sets both. Unset {RANK} and {NUM_RANKS} if no launcher started this process"
            )
    return os.environ.get("PADDLE_MASTER") or os.environ[ADDRESSES].split(",")[0]
