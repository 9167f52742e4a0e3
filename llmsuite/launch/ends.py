"""Exit codes and exit reasons of the ranks of a machine, and with them of a run."""

from __future__ import annotations

import dataclasses

REFUSED = 2
"""Exit code of an error in the user's input, which has been explained."""
INTERRUPTED = 130
"""Exit code of a run that the user has stopped."""


@dataclasses.dataclass(frozen=True)
class End:
    """The end of the ranks of a machine. Its fields are the keys of a message between launchers."""

    code: int
    """Exit code of the run."""
    why: str
    """The reason in words; empty after success."""
    killed: bool = False
    """True where a rank was killed or the machine was lost: then that is why the others fail."""
    of_machine: bool = False
    """True where the machine was lost, as far as another one can see."""


def parse_end(message: object) -> End | None:
    """The end that another launcher has reported; None for anything else."""
    try:
        return End(
            int(message["code"]),  # type: ignore[index]
            str(message["why"]),  # type: ignore[index]
            bool(message["killed"]),  # type: ignore[index]
            bool(message["of_machine"]),  # type: ignore[index]
        )
    except (TypeError, KeyError, ValueError):
        return None
