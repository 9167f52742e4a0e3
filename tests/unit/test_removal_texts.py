"""The texts that `tests.standin.table` takes away are in the package, so that code which has moved is noticed."""

from __future__ import annotations

import pytest

from tests.standin.removals import Removal
from tests.standin.table import ALONE, OF_RANKS
from tests.support.paths import ROOT


@pytest.mark.parametrize("removal", [*ALONE, *OF_RANKS], ids=str)
def test_its_text_is_there_once(removal: Removal) -> None:
    assert (ROOT / "llmsuite" / removal.file).read_text("utf-8").count(removal.text) == 1
