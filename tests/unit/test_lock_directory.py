"""One run a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.errors import UserError
from llmsuite.files import lock_directory


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"
    first = lock_directory(directory)
    with pytest.raises(UserError, match="another run is writing there"):
        lock_directory(directory)
    first.close()
    lock_directory(directory).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run: cannot be written to: Not a directory; choose another output_dir"):
        lock_directory(tmp_path / "file" / "run")
