"""Scales of fake-quantised inputs: one per layer, the same on all ranks, updated once after each optimizer step.

A scale follows the largest input of the global batch, a maximum over micro-batches, ranks and tokens without padding:
it does not depend on how the batch and the layers are distributed. All passes of a step use the scales of the steps
before. In the first step there are none yet, and inputs are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmsuite.engine.rules import StepCallback
from llmsuite.models.int8_grid import input_scale
from llmsuite.models.qat import fake_quantized
from llmsuite.parallel import collective
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.tensor import local_value


class InputScales(StepCallback):
    """Input scales of all fake-quantised layers of the model; every rank keeps the scales of all of them."""

    def __init__(self, modules: Sequence[str], part: PipelineStage, moving_rate: float):
        """
        Args:
            modules: names of the layers of the full model, in the same order on every rank.
            part: this rank's part of the model, parallelized already. Its forward passes record the largest inputs.
            moving_rate: rate r of `after_update`.
        """
        self._rate = moving_rate
        self._local_modules = {name: module for chunk in part.chunks for name, module in fake_quantized(chunk)}
        part.observers = list(self._local_modules.values())
        self._observed = dict.fromkeys(modules, (0.0, 0.0))
        for module in self._local_modules.values():
            module.local_part = local_value

    def after_update(self) -> None:
        """Update the scales with the largest inputs of the step.

        The moving average of largest magnitudes m with rate r is a / n, where a becomes r a + m and n becomes r n + 1
        (`fake_quantize_moving_average_abs_max` of Paddle, fluid/operators/fake_quantize_op): the first one counts in
        full. The scale is the average / 127.
        """
        largest = [self._pop_largest(name) for name in self._observed]
        # over all ranks: they have seen other tokens, and other layers, and all keep the same scales
        for (name, (total, weight)), seen in zip(list(self._observed.items()), collective.max_over_run(largest)):
            self._observed[name] = self._rate * total + seen, self._rate * weight + 1.0
        self._write_back()

    def after_skip(self) -> None:
        """Drop the largest inputs of a skipped step."""
        for name in self._local_modules:
            self._pop_largest(name)

    def state(self) -> dict[str, list[float]]:
        """Return a and n of each layer, by its name, for a checkpoint; the same on every rank."""
        return {name: list(pair) for name, pair in self._observed.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state` returned."""
        assert state.keys() == self._observed.keys(), "the digest of the recipe differs for other layers"
        self._observed = {name: (state[name][0], state[name][1]) for name in self._observed}
        self._write_back()

    def _pop_largest(self, name: str) -> collective.Number:
        """Return the largest input of a layer on this rank, and reset it; 0, below any magnitude, where there is
        none."""
        module = self._local_modules.get(name)
        if module is None or module.largest is None:
            return 0.0
        largest = module.largest
        module.largest = None
        return largest

    def _write_back(self) -> None:
        for name, module in self._local_modules.items():
            module.input_scale = input_scale(self._observed[name])
