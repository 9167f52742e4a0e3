"""What docs/notes/upstream.md says of Paddle: each of its programs shows the fault, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.conftest import Runner
from tests.multi.paddle_faults import programs


@pytest.mark.parametrize("heading", programs())
def test_paddle_still_does_what_the_page_says(runner: Runner, tmp_path: Path, heading: str) -> None:
    """If not, Paddle has mended it: take the entry away, and what works around it."""
    code, output = runner.launch(2, "tests.multi.paddle_faults", heading, str(tmp_path))
    assert code == 0, output
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text("utf-8").startswith("wrong: "), output
