"""The rollout engine `local`: a second copy of the trained model, in the same processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.group_sampling import (
    SampledCompletion,
    SampleRequest,
    SamplingParams,
    fill_completions,
    sample_groups,
)
from llmsuite.inference.load import AS_TRAINED, build_model
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.recipe.plans import ModelPlan
from llmsuite.rl.engine import EngineContext, PendingRollout


class LocalModel:
    """A full model in this process, in the form for generation. It has no memory and no values until `refresh`."""

    def __init__(self, model_plan: ModelPlan, backend: DeviceBackend, precision: str):
        model = build_model(
            model_plan.family,
            model_plan.config,
            backend,
            precision,
            None,
            lambda model: lambda name, shape, index: np.zeros([part.stop - part.start for part in index], "float32"),
            packed=AS_TRAINED,
        )
        self._model = RefreshableModel(model, backend.ops(precision))
        self.decoder = ModelDecoder(model)
        self.release()

    def release(self) -> None:
        """Free the weights until the next `refresh`, so that training can use their memory."""
        self._model.release()

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set new values: name and full value of every parameter, adapters merged."""
        self._model.refresh(weights)


class LocalEngine:
    """Samples with a `LocalModel`, which is kept next to the trained one."""

    def __init__(self, context: EngineContext):
        self._model = LocalModel(context.model, context.backend, context.precision)
        self._decoder = self._model.decoder

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the model."""
        self._model.refresh(weights)

    def begin(
        self, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> PendingRollout:
        """Sample when the returned function is called."""
        return lambda: sample_groups(self._decoder, requests, sampling_params, stop_ids)

    def fill_completions(
        self,
        requests: Sequence[SampleRequest],
        groups: Sequence[Sequence[SampledCompletion]],
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ) -> None:
        """Sample the turns of episodes, as `llmsuite.rl.rollouts.EpisodeEngine` requires."""
        fill_completions(self._decoder, requests, groups, sampling_params, stop_ids)

    def release(self) -> None:
        """Free the weights; `llmsuite.rl.engine.ReleasableEngine` requires it."""
        self._model.release()

    def close(self) -> None:
        """Nothing: the engine has no resources but the memory of the process."""
