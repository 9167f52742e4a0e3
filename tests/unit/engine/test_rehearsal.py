"""A rank without the others; whole rehearsals are in tests/multi/test_rehearse.py."""

from __future__ import annotations

import math

from llmsuite.engine.rehearsal import RehearsedHeaders
from llmsuite.engine.rules import StepRules


def test_headers_come_in_the_order_of_micro_batches() -> None:
    headers = RehearsedHeaders([[1], [2]])
    # two chunks of a rank receive each micro-batch
    assert [headers.arrived([0]) for _ in range(4)] == [[1], [2], [1], [2]]
    headers.sent([5])
    assert headers.sent_headers == [[5]]
    headers.arrived([0])
    headers.restart()
    assert headers.arrived([0]) == [1]
    assert headers.sent_headers == []


def test_a_step_without_values_is_accepted() -> None:
    metrics = {"loss": math.nan, "grad_norm": math.inf}
    assert StepRules(has_values=False).decide(1, 0.0, metrics) == "accept"
    assert "skipped" not in metrics
