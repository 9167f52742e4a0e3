"""From a model directory into a live model."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import ModelDirectory


def fill_parameters(model: Any, source: ModelDirectory) -> None:
    """Set every parameter of a model, a tensor at a time.

    Raises:
        UserError: a tensor does not have the shape config.json gives it.
    """
    for name, parameter in model.named_parameters():
        value = source.read(name)
        found = list(value.shape)
        wanted = list(parameter.shape)
        if found != wanted:
            raise UserError(
                f"{source.path}: {source.tensors[name].names[0]!r} is {found}, config.json makes it {wanted}"
            )
        dtype = str(parameter.dtype).removeprefix("paddle.")
        value = np.ascontiguousarray(value, dtype="float32").astype(dtype, copy=False)
        parameter.set_value(value.view("uint16") if dtype == "bfloat16" else value)  # Paddle wants the bits of bfloat16
