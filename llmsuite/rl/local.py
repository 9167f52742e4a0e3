"""The rollout engine of the run itself: a decoder beside the model that is trained, with the same weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.load import AS_TRAINED, build_model
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.recipe.resolve import RunPlan
from llmsuite.rl.drawing import Drawing, Drawn, Request, draw_groups, fill_groups
from llmsuite.rl.engine import EngineContext, Pending
from llmsuite.typing import Tensor


class LocalModel:
    """A whole model in this process, in the form for generation. It has no memory and no values until `refresh`."""

    def __init__(self, plan: RunPlan, backend: DeviceBackend):
        precision = plan.recipe.engine.precision
        model = build_model(
            plan.family,
            plan.model_config,
            backend,
            precision,
            None,
            lambda model: lambda name, shape, index: np.zeros([part.stop - part.start for part in index], "float32"),
            stored=AS_TRAINED,
        )
        self._model = RefreshableModel(model, backend.ops(precision))
        self.decoder = ModelDecoder(model)
        self.release()

    def release(self) -> None:
        """Free the weights until the next `refresh`: training has their memory meanwhile."""
        self._model.release()

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """New values: every parameter by its name, whole, adapters merged."""
        self._model.refresh(weights)


class LocalEngine:
    """Draws with a model beside the one that is trained."""

    def __init__(self, context: EngineContext):
        self._model = LocalModel(context.plan, context.backend)
        self._decoder = self._model.decoder

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine`."""
        self._model.refresh(weights)

    def begin(self, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]) -> Pending:
        """See `Engine`; it draws when the result is asked for."""
        return lambda: draw_groups(self._decoder, requests, drawing, stop_ids)

    def fill(
        self,
        requests: Sequence[Request],
        groups: Sequence[Sequence[Drawn]],
        drawing: Drawing,
        stop_ids: Collection[int],
    ) -> None:
        """See `llmsuite.rl.rollouts.Filling`."""
        fill_groups(self._decoder, requests, groups, drawing, stop_ids)

    def release(self) -> None:
        """See `llmsuite.rl.engine.Releasing`."""
        self._model.release()

    def close(self) -> None:
        """See `Engine`."""
