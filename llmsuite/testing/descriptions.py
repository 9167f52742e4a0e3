"""Descriptions of the keys that a plugin adds to recipes, as an assertion."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmsuite.contract.schema.keys import field_docs


def assert_described(section: Any) -> None:
    """Raise AssertionError with the fields of a section's dataclass that have no docstring."""
    docs = field_docs(section)
    silent = [field.name for field in dataclasses.fields(section) if not docs.get(field.name, "").strip()]
    assert not silent, f"{section.__name__}: write a docstring under {', '.join(silent)}"
