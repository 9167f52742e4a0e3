"""The lattice uses the runner of the multi-process tests."""

import pytest

from tests.multi.conftest import runner

__all__ = ["runner"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-parity-table", action="store_true", help="write the results into docs/notes/parity.md")
