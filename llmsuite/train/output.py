"""What rank 0 writes and says during a run: metrics, loggers, the line of the current step, events for plugins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.files import write_text_atomic
from llmsuite.locks import OpenDirectory
from llmsuite.observe.completions import COMPLETIONS, CompletionsFile
from llmsuite.observe.events import add_event, environment, write_environment
from llmsuite.observe.generations import drop_generations, write_generations
from llmsuite.observe.loggers import Loggers
from llmsuite.observe.metrics import MetricsFile
from llmsuite.plugins.manager import Registry
from llmsuite.progress import StepLine, report
from llmsuite.rl.checks import number_or_none, shown
from llmsuite.shown import redacted, redacted_data
from llmsuite.specs import RunView

_SHOWN = (
    *("loss", "bleu4", "rougel", "reward", "pass@1", "completions/length", "learning_rate", "grad_norm"),
    *("rewards/margin", "rewards/accuracy"),
)


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """The content of `recipe.json`; URLs have no secrets there."""
    return json.dumps(redacted_data(dict(recipe)), indent=2, ensure_ascii=False) + "\n"


def _number(name: str, value: Any) -> float | None:
    """A metric as JSON has it. Raises UserError when it is no number."""
    try:
        number = number_or_none(value)
    except TypeError as error:
        raise UserError(f"the metric {name} is {error}; a stage's metrics are numbers") from error
    return value if number is not None and type(value) is int else number


class Silence:
    """The output of ranks above 0, and of a run that has not begun: none."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step whose metrics are recorded."""

    def rank_numbers(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """A number of every rank, with each record of a run of several ranks."""

    def drew(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Completions that this step learns from, or this step first."""

    def stepped(self, step: int) -> None:
        """A step whose metrics are not recorded."""

    def skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step that updated nothing."""

    def rolled_back(self, step: int, kept: int) -> None:
        """After a bad step the run goes on from a checkpoint; later records go."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after a step."""

    def answered(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Answers at the evaluation after a step."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint that is complete on disk."""

    def failed(self, error: BaseException) -> None:
        """The run ends by an error or an interrupt."""

    def interrupted(self) -> None:
        """The process ends at once."""

    def ended(self, step: int) -> None:
        """The run ends after a step, its last one or not."""


class Output(Silence):
    """The output of rank 0."""

    def __init__(self, view: RunView, registry: Registry, resume_step: int, loggers: Loggers, draws: bool = False):
        """`draws` says that the run learns from completions, which are recorded."""
        self._view, self._registry, self._loggers = view, registry, loggers
        directory = view.output_dir
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = OpenDirectory(directory)
        write_text_atomic(directory / "recipe.json", recipe_text(view.recipe))
        recipe = view.recipe
        write_environment(directory, environment(recipe["device"], view.mesh, view.num_ranks))
        add_event(directory, "started" if resume_step == 0 else "resumed", step=resume_step, of=view.total_steps)
        self._file = MetricsFile(directory / "metrics.jsonl", resume_step)
        self._ranks = MetricsFile(directory / "ranks.jsonl", resume_step) if view.num_ranks > 1 else None
        self._completions = CompletionsFile(directory / COMPLETIONS, resume_step) if draws else None
        drop_generations(directory, resume_step)
        self._line = StepLine(view.total_steps, resume_step + 1, _SHOWN)
        self._not_finite: set[str] = set()
        """Metrics that were not finite, each of which is reported once."""
        registry.emit("llmsuite_run_start", run=view)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._directory.check()
        finite = self._record(step, metrics)
        self._line.step(step, finite)
        self._registry.emit("llmsuite_step_end", run=self._view, step=step, metrics=finite)

    def _record(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write metrics, which may be of a plugin's stage, and return those that are finite: JSON knows no others, and
        a metric that went wrong is no reason to lose the run. Raises UserError for one that is no number."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if value is not None}
        for name in sorted(numbers.keys() - finite.keys() - self._not_finite):
            report(f"warning: step {step}: the metric {name} is {shown(metrics[name])}; it is null in metrics.jsonl")
            self._not_finite.add(name)
        self._file.write({"step": step, **numbers})
        self._loggers.log(step, finite)
        return finite

    def rank_numbers(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        assert self._ranks is not None
        self._ranks.write({"step": step, **numbers})

    def drew(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._completions is not None
        self._completions.write(step, rows)
        self._registry.emit("llmsuite_rollouts", run=self._view, step=step, completions=rows)

    def stepped(self, step: int) -> None:
        self._directory.check()
        self._line.step(step, None)

    def skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        known = {name: metrics[name] for name in ("loss", "grad_norm", "loss_scale") if name in metrics}
        add_event(self._view.output_dir, "skipped", step=step, **known)

    def rolled_back(self, step: int, kept: int) -> None:
        report(f"step {step} was bad: going on from step {kept} with the samples behind it")
        add_event(self._view.output_dir, "rolled back", step=step, to=kept)
        self._file.rewind(kept)
        drop_generations(self._view.output_dir, kept)
        if self._ranks is not None:
            self._ranks.rewind(kept)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record(step, {f"eval/{name}": value for name, value in metrics.items()})
        report(f"eval at step {step}: " + "  ".join(f"{n} {metrics[n]:.4g}" for n in _SHOWN if n in metrics))

    def answered(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        if rows:
            write_generations(self._view.output_dir, step, rows)

    def saved(self, step: int, path: Path) -> None:
        report(f"saved {path}")
        add_event(self._view.output_dir, "saved", step=step)
        self._registry.emit("llmsuite_checkpoint_saved", run=self._view, step=step, path=path)

    def failed(self, error: BaseException) -> None:
        is_there = self._directory.is_there()
        self._close()
        stopped = isinstance(error, KeyboardInterrupt)
        what = {} if stopped else {"error": redacted(f"{type(error).__name__}: {error}")}
        if is_there:
            with contextlib.suppress(UserError):  # a disk that is full may be why it fails
                add_event(self._view.output_dir, "stopped" if stopped else "failed", **what)
        self._registry.emit("llmsuite_run_error", run=self._view, error=error)

    def interrupted(self) -> None:
        with contextlib.suppress(UserError):
            add_event(self._view.output_dir, "stopped")

    def ended(self, step: int) -> None:
        self._close()
        add_event(self._view.output_dir, "ended" if step == self._view.total_steps else "stopped", step=step)
        self._registry.emit("llmsuite_run_end", run=self._view, step=step)

    def _close(self) -> None:
        self._directory.close()
        self._line.close()
        self._file.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._completions is not None:
            self._completions.close()
        self._loggers.close()
