"""The scales of fake-quantised inputs: one a layer, the same on all ranks, moved once after each optimizer step.

What moves a scale is the largest input of the whole global batch, a maximum over micro-batches, ranks and tokens that
are no padding: it does not depend on how the batch and the layers are spread. All passes of a step see the scales of
the steps before. In the first step there are none yet, and inputs are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmsuite.models.int8_grid import input_scale
from llmsuite.models.qat import fake_quantized
from llmsuite.parallel import collective
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.tensor import local_value
from llmsuite.train.parts import StepPart


class InputScales(StepPart):
    """Input scales of all fake-quantised layers of the model; every rank keeps the scales of all of them."""

    def __init__(self, modules: Sequence[str], part: PipelineStage, moving_rate: float):
        """
        Args:
            modules: names of the layers, of the whole model, in an order that is the same on every rank.
            part: this rank's part of the model, parallel already. It sees to it that its forward passes are observed.
            moving_rate: see `update`.
        """
        self._rate = moving_rate
        self._here = {name: module for chunk in part.chunks for name, module in fake_quantized(chunk)}
        part.observers = list(self._here.values())
        self._observed = dict.fromkeys(modules, (0.0, 0.0))
        for module in self._here.values():
            module.local_part = local_value

    def update(self) -> None:
        """Take over what the step has seen.

        The moving average of largest magnitudes m with rate r is a / n, where a becomes r a + m and n becomes r n + 1
        (`fake_quantize_moving_average_abs_max` of Paddle, fluid/operators/fake_quantize_op): the first one counts in
        full. The scale is that / 127.
        """
        largest = [self._take(name) for name in self._observed]
        for (name, (total, weight)), seen in zip(list(self._observed.items()), collective.max_over_run(largest)):
            self._observed[name] = self._rate * total + seen, self._rate * weight + 1.0
        self._write_back()

    def forget(self) -> None:
        """Drop what was seen: a step that is skipped counts for nothing."""
        for name in self._here:
            self._take(name)

    def state(self) -> dict[str, list[float]]:
        """a and n of each layer, by its name, for a checkpoint; the same on every rank."""
        return {name: list(pair) for name, pair in self._observed.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take over what `state` gave."""
        assert state.keys() == self._observed.keys(), "the digest of the recipe has to tell other layers apart"
        self._observed = {name: (state[name][0], state[name][1]) for name in self._observed}
        self._write_back()

    def _take(self, name: str) -> collective.Number:
        """What was seen of a layer here, for the last time; nothing is below any magnitude."""
        module = self._here.get(name)
        if module is None or module.largest is None:
            return 0.0
        largest, module.largest = module.largest, None
        return largest

    def _write_back(self) -> None:
        for name, module in self._here.items():
            module.input_scale = input_scale(self._observed[name])
