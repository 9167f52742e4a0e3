"""A rank that runs cases as `tests.parity.worker` does, but two steps of each are bad; for `test_program_guard`."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

from tests.parity import worker

NO_NUMBER = 2
SPIKE = 4
"""The step in which the weight of a single token is no number, and that in which all are far too large."""
LARGER = 1000.0


def main(file: str) -> int:
    """As there."""
    from llmsuite.launch import calls
    from llmsuite.parallel import collective
    from llmsuite.stages.sft import SftStage

    begin = calls.step
    collate = SftStage.collate
    current = [0, 0]

    def noted(step: int) -> None:
        current[:] = step, 0
        begin(step)

    def spoilt(self: Any, samples: Any) -> Any:
        batch = collate(self, samples)
        (step, number) = current
        current[1] += 1
        weights = batch["weights"].copy()
        if step == NO_NUMBER and number == 1 and collective.mesh().data_rank == 0:  # its second micro-batch
            weights[0] = math.nan
        return {**batch, "weights": weights * LARGER if step == SPIKE else weights}

    with (
        mock.patch.object(calls, "step", noted),
        mock.patch.object(SftStage, "collate", spoilt),
        mock.patch("llmsuite.engine.guard.LEAST", 2),
    ):
        return worker.main(file)
