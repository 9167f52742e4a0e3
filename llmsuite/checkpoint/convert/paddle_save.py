"""Writes files for `paddle.load`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_PROTOCOL = 4  # that of paddle.save


def write_pickle(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as `paddle.save` writes the state of a layer; bfloat16 is stored as its bits in uint16."""
    stored = {
        name: np.ascontiguousarray(value.view("uint16") if value.dtype.name == "bfloat16" else value)
        for name, value in values.items()
    }
    with open(path, "wb") as file:
        pickle.dump(stored, file, protocol=_PROTOCOL)
