"""The rollout engine of the run itself: a decoder beside the model that is trained, with the same weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.load import build_model
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.recipe.resolve import RunPlan
from llmsuite.typing import Tensor


class LocalEngine:
    """A whole model in this process, in the form for generation. It has no values until `refresh`."""

    def __init__(self, plan: RunPlan, backend: DeviceBackend):
        precision = plan.recipe.engine.precision
        model = build_model(
            plan.family,
            plan.model_config,
            backend,
            precision,
            None,
            lambda model: lambda name, shape, index: np.zeros([part.stop - part.start for part in index], "float32"),
        )
        self._model = RefreshableModel(model, backend.ops(precision))
        self.decoder = ModelDecoder(model, lambda: backend.autocast(precision))

    def refresh(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the values of all parameters, by name."""
        self._model.refresh(values)
