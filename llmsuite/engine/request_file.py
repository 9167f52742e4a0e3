"""Files that a user creates in the directory of a run to request something of it: `save-now` and `stop-now`."""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists
from llmsuite.parallel import collective


class RequestFile:
    """A request by creating a file. Rank 0 looks for it."""

    def __init__(self, path: Path):
        self._path = path

    def requested(self) -> bool:
        """Return True if the user has created the file; remove it. Raises UserError where it cannot be removed."""
        if collective.rank() != 0 or not exists(self._path):
            return False
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # a file that stays would be a request after every step
            raise UserError(f"{self._path}: cannot be removed: {error.strerror}") from error
        return True
