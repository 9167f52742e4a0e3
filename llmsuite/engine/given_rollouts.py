"""Rollouts whose completions are given instead of sampled, where no model has values: for `llmsuite rehearse`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.full_weights import full_weights
from llmsuite.engine.rollouts import RolloutEngine
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.plans import ModelPlan, TrainPlan
from llmsuite.rl.completion import Completion
from llmsuite.rl.engine import PendingRollout
from llmsuite.rl.rollouts import InFlightRollout, Play, RolloutPrompt, Rollouts, Score, Scored

_LOGPROB = -1.0


class NoEngine:
    """A `llmsuite.rl.engine.Engine` that samples nothing."""

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take part in gathering the weights."""
        for _ in weights:
            pass

    def begin(
        self, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> PendingRollout:
        """No completions."""
        return list

    def close(self) -> None:
        """Do nothing."""


class GivenRollouts(Rollouts):
    """Completions of the greatest length, all of one token, with rewards 0 and 1 in turn: so each group has a signal.
    No reward is asked, and no episode is played."""

    def __init__(self, stop_ids: Collection[int]):
        """`stop_ids`: tokens that end a completion."""
        super().__init__(NoEngine(), stop_ids, _no_text, seed=0, vocab_size=0)
        self._token = next(number for number in range(len(stop_ids) + 1) if number not in stop_ids)

    def begin(self, prompts: Sequence[RolloutPrompt], step: int, sampling_params: SamplingParams) -> None:
        self._in_flight[step] = InFlightRollout(self.version, list)

    def sample(
        self,
        prompts: Sequence[RolloutPrompt],
        step: int,
        sampling_params: SamplingParams,
        score: Score,
        num_scores: int,
        before: Sequence[RolloutPrompt] = (),
        play: Play | None = None,
    ) -> Scored:
        count = sampling_params.num_generations
        groups = []
        for number, prompt in enumerate(prompts, len(before)):
            groups.append([self._completion_of(prompt, number, i, sampling_params) for i in range(count)])
        rewards = np.arange(count, dtype="float64") % 2
        scores = np.broadcast_to(rewards[None, :, None], [len(prompts), count, num_scores])
        rollout = self._in_flight.pop(step, None)
        return Scored(groups, scores.copy(), self.version if rollout is None else rollout.version)

    def _completion_of(
        self, prompt: RolloutPrompt, group: int, number: int, sampling_params: SamplingParams
    ) -> Completion:
        length = sampling_params.max_completion_length
        return Completion(
            prompt_ids=prompt.ids,
            ids=[self._token] * length,
            logprobs=[_LOGPROB] * length,
            finish_reason="length",
            text="",
            columns=prompt.columns,
            group=group,
            number=number,
            prompt=prompt.text,
        )


def given_rollout_engine(
    model_plan: ModelPlan,
    train_plan: TrainPlan,
    precision: str,
    backend: DeviceBackend,
    mesh: Mesh,
    stop_ids: Collection[int] | None,
    built: BuiltModel,
) -> RolloutEngine:
    """Build the rollout engine of a run without values. It gathers the weights, as another one does, and samples
    nothing.

    Args:
        model_plan: plan of the model.
        train_plan: plan of the training.
        precision: of the run.
        backend: backend of the device.
        mesh: coordinates of this rank.
        stop_ids: tokens that end a completion; None on ranks that load no data.
        built: the model.
    """
    weights = functools.partial(full_weights, model_plan, built, backend.parameter_dtype(precision), mesh)
    assert train_plan.rollout_engine is not None, "recipes of such a stage have the section"
    rollouts = None if stop_ids is None else GivenRollouts(stop_ids)
    return RolloutEngine(NoEngine(), rollouts, weights, train_plan.rollout_engine.remote)


def _no_text(ids: Sequence[int]) -> str:
    return ""
