"""The page of what layouts are checked for has them all, and the bounds of the code."""

from __future__ import annotations

from tests.tools.lies.__main__ import LAYOUTS
from tests.tools.lies.page import CHECKS, PAGE, with_table


def test_the_table_has_every_layout_that_lies_are_told_in() -> None:
    assert list(CHECKS) == list(LAYOUTS)


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "python -m tests.tools.lies.page"
