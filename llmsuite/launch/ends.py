"""How the ranks of a machine, and with them a run, can end."""

from __future__ import annotations

import dataclasses

REFUSED = 2
"""Exit code of an error in the user's input, which has been explained."""
INTERRUPTED = 130
"""Exit code of a run that the user has stopped."""


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks of a machine ended."""

    code: int
    """Exit code of the run."""
    why: str
    """The reason in words; empty when all is well."""
    killed: bool = False
    """Whether a rank was killed or the machine is gone: then that is why the others fail."""
    of_machine: bool = False
    """Whether the machine is gone, as far as another one can tell."""


def end_from(said: object) -> End | None:
    """The end that another launcher tells of; None for anything else."""
    try:
        return End(int(said["code"]), str(said["why"]), bool(said["killed"]), bool(said["of_machine"]))  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        return None
