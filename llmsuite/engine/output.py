"""Output of rank 0 during a run: metrics, loggers, the line of the current step, events for plugins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import write_text_atomic
from llmsuite.base.locks import OpenDirectory
from llmsuite.base.progress import StepProgress, report
from llmsuite.base.redaction import redacted, redacted_data
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import RunView
from llmsuite.observe.completions import COMPLETIONS, CompletionsFile
from llmsuite.observe.events import add_event, environment, write_environment
from llmsuite.observe.generations import drop_generations, write_generations
from llmsuite.observe.loggers import Loggers
from llmsuite.observe.metrics import MetricsFile
from llmsuite.rl.checks import number_or_none, shown

_SHOWN = (
    *("loss", "bleu4", "rougel", "reward", "pass@1", "completions/length", "learning_rate", "grad_norm"),
    *("rewards/margin", "rewards/accuracy"),
)


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return the content of `recipe.json`, without the secrets of URLs."""
    return json.dumps(redacted_data(dict(recipe)), indent=2, ensure_ascii=False) + "\n"


def _number(name: str, value: Any) -> float | None:
    """Convert a metric for JSON; None where it is not finite. Raises UserError when it is no number."""
    try:
        number = number_or_none(value)
    except TypeError as error:
        raise UserError(f"the metric {name} is {error}; a stage's metrics are numbers") from error
    return value if number is not None and type(value) is int else number


class NullOutput:
    """No output: that of all ranks but rank 0, and of a run that has not started."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called for a step whose metrics are recorded."""

    def rank_numbers(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Called with numbers of every rank, with each record of a run with several ranks."""

    def sampled(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called with the completions of a rollout; `step` is the first step that trains on them."""

    def stepped(self, step: int) -> None:
        """Called for a step whose metrics are not recorded."""

    def skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called for a step that updated nothing."""

    def rolled_back(self, step: int, kept: int) -> None:
        """Called when the run continues from the checkpoint of step `kept` after a bad step; later records are
        removed."""

    def evaluated(self, step: int, metrics: Mapping[str, float], sets: Sequence[str] = ("",)) -> None:
        """Called with the metrics of an evaluation after a step; `sets` are the names of its sets of data, which the
        metrics have in front."""

    def generated(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Called with the generated answers of an evaluation after a step."""

    def saved(self, step: int, path: Path) -> None:
        """Called for a checkpoint that is complete on disk."""

    def failed(self, error: BaseException) -> None:
        """Called when the run ends with an error or an interrupt."""

    def interrupted(self) -> None:
        """Called when a second signal ends the process immediately."""

    def ended(self, step: int, why: str = "") -> None:
        """Called when the run ends after a step. `why` is the reason why it ends as planned before its last step."""


class WatchedDirectory(NullOutput):
    """The leading rank of a machine with an output_dir of its own: it writes only checkpoints there, and ends the run
    when the directory is removed or replaced."""

    def __init__(self, directory: Path):
        """Open the directory, which `claim_directory` has made."""
        self._directory = OpenDirectory(directory)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._directory.check()

    def stepped(self, step: int) -> None:
        self._directory.check()

    def failed(self, error: BaseException) -> None:
        self._directory.close()

    def ended(self, step: int, why: str = "") -> None:
        self._directory.close()


class Output(NullOutput):
    """Output of rank 0."""

    def __init__(
        self, view: RunView, registry: Registry, resume_step: int, loggers: Loggers, has_rollouts: bool = False
    ):
        """`has_rollouts` is True where the run trains on sampled completions, which are recorded."""
        self._view = view
        self._registry = registry
        self._loggers = loggers
        directory = view.output_dir
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = OpenDirectory(directory)
        write_text_atomic(directory / "recipe.json", recipe_text(view.recipe))
        recipe = view.recipe
        write_environment(directory, environment(recipe["device"], view.mesh, view.num_ranks))
        event = "started" if resume_step == 0 else "resumed"
        add_event(directory, event, step=resume_step, of=view.total_steps)
        self._file = MetricsFile(directory / "metrics.jsonl", resume_step)
        self._ranks: MetricsFile | None = None
        if view.num_ranks > 1:
            self._ranks = MetricsFile(directory / "ranks.jsonl", resume_step)
        self._completions: CompletionsFile | None = None
        if has_rollouts:
            self._completions = CompletionsFile(directory / COMPLETIONS, resume_step)
        drop_generations(directory, resume_step)
        self._line = StepProgress(view.total_steps, resume_step + 1, _SHOWN)
        self._not_finite: set[str] = set()
        """Names of metrics that were not finite; each is reported once."""
        registry.emit("llmsuite_run_start", run=view)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._directory.check()
        finite = self._record(step, metrics)
        self._line.step(step, finite)
        self._registry.emit("llmsuite_step_end", run=self._view, step=step, metrics=finite)

    def _record(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write metrics, which may come from a plugin's stage, and return the finite ones. The others become null, as
        JSON has no NaN and the run should continue. Raises UserError for a metric that is no number."""
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

    def sampled(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._completions is not None
        self._completions.write(step, rows)
        self._registry.emit("llmsuite_rollouts", run=self._view, step=step, completions=rows)

    def stepped(self, step: int) -> None:
        self._directory.check()
        self._line.step(step, None)

    def skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        recorded = {name: metrics[name] for name in ("loss", "grad_norm", "loss_scale") if name in metrics}
        add_event(self._view.output_dir, "skipped", step=step, **recorded)

    def rolled_back(self, step: int, kept: int) -> None:
        report(f"step {step} was bad: continuing from step {kept} with the samples after step {step}")
        add_event(self._view.output_dir, "rolled back", step=step, to=kept)
        self._file.rewind(kept)
        drop_generations(self._view.output_dir, kept)
        if self._ranks is not None:
            self._ranks.rewind(kept)

    def evaluated(self, step: int, metrics: Mapping[str, float], sets: Sequence[str] = ("",)) -> None:
        self._record(step, {f"eval/{name}": value for name, value in metrics.items()})
        names = [f"{of_set}/{name}" if of_set else name for of_set in sets for name in _SHOWN]
        report(f"eval at step {step}: " + "  ".join(f"{n} {metrics[n]:.4g}" for n in names if n in metrics))

    def generated(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
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
        details = {} if stopped else {"error": redacted(f"{type(error).__name__}: {error}")}
        if is_there:
            with contextlib.suppress(UserError):  # the run may fail because the disk is full
                add_event(self._view.output_dir, "stopped" if stopped else "failed", **details)
        self._registry.emit("llmsuite_run_error", run=self._view, error=error)

    def interrupted(self) -> None:
        with contextlib.suppress(UserError):
            add_event(self._view.output_dir, "stopped")

    def ended(self, step: int, why: str = "") -> None:
        self._close()
        event = "ended" if why or step == self._view.total_steps else "stopped"
        more = {"why": why} if why else {}
        if why:
            report(f"ended after step {step}: {why}")
        add_event(self._view.output_dir, event, step=step, **more)
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
