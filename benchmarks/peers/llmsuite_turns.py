"""A plugin of llmsuite: a run does its steps when it is told to; see `turns.py`."""

from __future__ import annotations

from collections.abc import Mapping

from turns import Turns

import llmsuite

llmsuite_critical = True
_TURNS = Turns()


@llmsuite.hookimpl
def llmsuite_run_start() -> None:
    _TURNS.wait()


@llmsuite.hookimpl
def llmsuite_step_end(metrics: Mapping[str, float]) -> None:
    _TURNS.losses.append(metrics["loss"])
    if "completions/length" in metrics:
        _TURNS.lengths.append(metrics["completions/length"])
    _TURNS.wait()
