"""Metrics on their way to disk, loggers and plugins: a stage may be a plugin, and its numbers anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.specs import RunView
from llmsuite.engine.output import Output
from llmsuite.observe.runs import read_run


class Recorder:
    """Stands for loggers and plugins: keeps what they receive."""

    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.emitted: list[Any] = []

    def log(self, step: int, metrics: Any) -> None:
        self.logged.append(metrics)

    def emit(self, event: str, **given: Any) -> None:
        self.emitted.append(given.get("metrics"))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def output(tmp_path: Path, recorder: Recorder) -> Output:
    view = RunView(output_dir=tmp_path, recipe={"device": "cpu"}, num_ranks=1, total_steps=3)
    return Output(view, recorder, 0, recorder)  # type: ignore[arg-type]


NOT_FINITE = [math.nan, math.inf, -math.inf, 1e300, np.float32("nan"), 10**5000, None]
FINE = {"loss": 1.5, "tokens": 7, "speed": 2.0, "ips_total": 14.0}


@pytest.mark.parametrize("value", NOT_FINITE, ids=range(len(NOT_FINITE)))
def test_a_metric_that_is_not_finite_is_null_and_the_run_continues(
    output: Output, recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    for step in (1, 2):
        output.logged(step, {**FINE, "mine": value})
    output.evaluated(2, {"loss": 1.0, "mine": value})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["mine"] for line in lines[:2]] == [None, None]
    assert lines[2]["eval/mine"] is None
    assert (lines[0]["tokens"], type(lines[0]["tokens"])) == (7, int)
    assert recorder.logged == [FINE] * 2 + [{"eval/loss": 1.0}]
    assert recorder.emitted[1:3] == [FINE] * 2
    said = capsys.readouterr().out
    assert said.count("warning: ") == 2
    assert "warning: step 1: the metric mine is " in said
    assert "warning: step 2: the metric eval/mine is " in said
    assert read_run(tmp_path).series("mine") == ([], [])


def test_numbers_of_other_libraries_are_numbers(output: Output, recorder: Recorder) -> None:
    output.logged(1, {**FINE, "a": np.float32(0.5), "b": np.array(2)})
    assert recorder.logged == [{**FINE, "a": 0.5, "b": 2.0}]
    assert {type(recorder.logged[0][name]) for name in "ab"} == {float}


@pytest.mark.parametrize("value", ["1.5", [1.0], {}, object(), np.zeros(2)], ids=lambda value: type(value).__name__)
def test_a_metric_that_is_no_number_ends_the_run_by_name(output: Output, value: Any) -> None:
    with pytest.raises(
        UserError, match=r"^the metric mine is .*, which is .*not a number.*; a stage's metrics are numbers"
    ):
        output.logged(1, {"loss": 1.0, "mine": value})
