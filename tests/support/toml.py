"""A parser of TOML for every Python."""

from __future__ import annotations

import sys

__all__ = ["tomllib"]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
