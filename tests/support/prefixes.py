"""Prefixes with values, and the families that can have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.adapters.parameters import is_factor
from llmsuite.models.initial_values import initial_values
from tests.support.families import FAMILIES, LINEAR

WITH_HEADS = [family for family in FAMILIES if family not in ("deepseek", *LINEAR)]
FULL_ATTENTION = {
    "cohere": {"sliding_window": None, "sliding_window_pattern": 1},
    "gemma": {"sliding_window": None, "sliding_window_pattern": 1},
    "gpt_oss": {"sliding_window": None, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}
"""Changes of the smoke shape of families whose layers have windows, which refuse prefixes."""
TOKENS = 3
LIMIT = 1e-5
"""Tolerance relative to the largest number: float32, and both libraries sum in different orders."""


def fill(model: Any, std: float = 0.5) -> None:
    for name, parameter in model.named_parameters():
        if not parameter._is_initialized():
            parameter.initialize()
        if is_factor(name):
            parameter.set_value(initial_values(3, name, parameter.shape, std))
        else:
            parameter.set_value(initial_values(3, name, parameter.shape, 0.2) + name.endswith("norm.weight"))


def near(found: Any, wanted: np.ndarray, limit: float = LIMIT) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=limit * np.abs(wanted).max())
