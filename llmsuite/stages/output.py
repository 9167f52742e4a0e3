"""What rank 0 writes and says during a run: metrics, loggers, the line of the current step, events for plugins."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.files import write_text_atomic
from llmsuite.observe.metrics import MetricsFile
from llmsuite.observe.progress import StepLine, report
from llmsuite.plugins.hookspecs import RunView
from llmsuite.plugins.manager import Registry

_SHOWN = ("loss", "learning_rate", "grad_norm", "rewards/margin", "rewards/accuracy")


class Output:
    """Its methods are what the loop tells."""

    def __init__(self, view: RunView, registry: Registry, resume_step: int, loggers: list[Any]):
        self._view, self._registry, self._loggers = view, registry, loggers
        directory = view.output_dir
        directory.mkdir(parents=True, exist_ok=True)
        write_text_atomic(directory / "recipe.json", json.dumps(view.recipe, indent=2, ensure_ascii=False) + "\n")
        self._file = MetricsFile(directory / "metrics.jsonl", resume_step)
        self._line = StepLine(view.total_steps, resume_step + 1, _SHOWN)
        registry.emit("llmsuite_run_start", run=view)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write({"step": step, **metrics})
        for logger in self._loggers:
            logger.log(step, metrics)
        self._line.step(step, metrics)
        self._registry.emit("llmsuite_step_end", run=self._view, step=step, metrics=metrics)

    def stepped(self, step: int) -> None:
        self._line.step(step, None)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON knows no NaN, and an evaluation that went wrong is no reason to lose the run
        named = {f"eval/{name}": value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write({"step": step, **named})
        for logger in self._loggers:
            logger.log(step, {name: value for name, value in named.items() if value is not None})
        report(f"eval at step {step}: " + "  ".join(f"{n} {metrics[n]:.4g}" for n in _SHOWN if n in metrics))

    def saved(self, step: int, path: Path) -> None:
        report(f"saved {path}")
        self._registry.emit("llmsuite_checkpoint_saved", run=self._view, step=step, path=path)

    def failed(self, error: BaseException) -> None:
        self._close()
        self._registry.emit("llmsuite_run_error", run=self._view, error=error)

    def ended(self, step: int) -> None:
        self._close()
        self._registry.emit("llmsuite_run_end", run=self._view, step=step)

    def _close(self) -> None:
        self._line.close()
        self._file.close()
        for logger in self._loggers:
            logger.close()
