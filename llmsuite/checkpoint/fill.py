"""From a model directory into a live model."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.errors import UserError


def fill_parameters(model: Any, source: ModelDirectory) -> None:
    """Set every parameter of a model, a tensor at a time.

    Raises:
        UserError: a tensor does not have the shape config.json gives it.
    """
    for name, parameter in model.named_parameters():
        value = source.read(name)
        if list(value.shape) != list(parameter.shape):
            raise UserError(
                f"{source.path}: {source.names[name]!r} is {list(value.shape)}, config.json makes it {parameter.shape}"
            )
        parameter.set_value(np.ascontiguousarray(value, dtype="float32").astype(_numpy_name(parameter)))


def _numpy_name(parameter: Any) -> str:
    return str(parameter.dtype).removeprefix("paddle.")
