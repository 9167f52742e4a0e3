"""Rows of public data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import REAL


def real(name: str) -> Path:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; set LLMSUITE_TEST_DATA")
    return path
