"""Sides of a comparison: a small model of two layers, and what was changed in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from llmsuite.observe.activations.merge import Side, TokenVectors
from llmsuite.observe.activations.samples import sample_of

NAMES = np.arange(1, 7, dtype="uint64")
MODULES = ("embed", "layers.0.up", "layers.0", "layers.1.up", "layers.1", "norm")


def side(**changes: Any) -> Side:
    """A side with two layers; the same values each time."""
    random = np.random.default_rng(0)
    outputs, gradients = (
        {name: TokenVectors(NAMES, random.normal(size=[6, 3]).astype("float32")) for name in MODULES} for _ in range(2)
    )
    parameters, of_parameters = (
        {f"{name}.weight": sample_of(random.normal(size=[3, 4]).astype("float32")) for name in (*MODULES, "head")}
        for _ in range(2)
    )
    made = Side(MODULES, outputs, gradients, parameters, of_parameters, {"loss": 2.0}, NAMES, True, "fp32")
    return dataclasses.replace(made, **changes)


def changed(kind: str, name: str, factor: float = 1.01) -> Side:
    """A side with one thing scaled."""
    values = dict(getattr(side(), kind))
    found = values[name]
    scaled = {"values": found.values * np.float32(factor)}
    if hasattr(found, "norm"):
        scaled["norm"] = found.norm * factor
    return side(**{kind: {**values, name: dataclasses.replace(found, **scaled)}})
