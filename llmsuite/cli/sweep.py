"""The command `llmsuite sweep RECIPE --train.learning_rate=1e-4,3e-4`: a run for each combination of values."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry

if TYPE_CHECKING:
    from llmsuite.base.supervisor import SupervisedProcess

_MAX_RUNS = 1000
_GRACE_SECONDS = 60.0
"""Time for a run to write a checkpoint when the sweep is stopped."""
_POLL_SECONDS = 0.2
_UNSAFE = re.compile(r"[^\w.=+-]+")
"""Characters of a value that a name of a directory does not have here."""
_MAX_NAME_CHARS = 200


class _Trial(NamedTuple):
    """One combination of values."""

    name: str
    """Name of its directory, such as "learning_rate=1e-4"."""
    overrides: list[str]
    directory: Path


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("-j", "--jobs", type=PositiveInt, default=1, help="number of runs at the same time")
    parser.add_argument("--smoke", action="store_true", help="sweep the reduced run of --smoke")
    parser.epilog = (
        "Values of a key are separated by commas: --train.learning_rate=1e-4,3e-4 --seed=0,1 are four runs, each in a "
        "directory of its own below output_dir. The same command continues a sweep that was stopped: runs that have "
        "ended are kept, others are resumed. Commas in brackets, braces or quotes separate no values."
    )


def run(args: Any, registry: Registry) -> int:
    from llmsuite.recipe.resolve import plan_run

    axes, fixed = split_axes(args.overrides)
    if not axes:
        raise UserError("sweep: give a key several values, such as --train.learning_rate=1e-4,3e-4")
    root = plan_run(args.recipe, [*fixed, *(values[0] for values in axes)], registry, args.smoke).output_dir
    trials = [_trial(root, fixed, chosen) for chosen in _combinations(axes)]
    if len({trial.directory for trial in trials}) < len(trials):
        raise UserError("sweep: two combinations have the same values; leave one out")
    for trial in trials:  # all of them, before the first one starts
        plan_run(args.recipe, trial.overrides, registry, args.smoke)
    code = _run_all(trials, args)
    keys = ",".join(dict.fromkeys(values[0][2:].partition("=")[0] for values in axes))
    return max(code, _show(trials, keys, root))


def split_axes(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Part the overrides into those with several values, each as a list of overrides with one value, and the others."""
    axes: list[list[str]] = []
    fixed: list[str] = []
    for override in overrides:
        key, _, text = override.partition("=")
        values = split_values(text)
        if len(values) > 1:
            axes.append([f"{key}={value}" for value in values])
        else:
            fixed.append(override)
    return axes, fixed


def split_values(text: str) -> list[str]:
    """Split a text at its commas, but for those in brackets, braces or double quotes."""
    values = [""]
    depth = 0
    is_quoted = False
    for char in text:
        if char == '"':
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0 and not is_quoted:
            values.append("")
        else:
            values[-1] += char
    return [value.strip() for value in values]


def _combinations(axes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    number = 1
    for values in axes:
        number *= len(values)
    if number > _MAX_RUNS:
        raise UserError(f"sweep: {number:,} runs are more than {_MAX_RUNS:,}; give fewer values")
    return list(itertools.product(*axes))


def _trial(root: Path, fixed: Sequence[str], chosen: Sequence[str]) -> _Trial:
    """Return the trial of some values, below the directory of the sweep."""
    words = [override[2:] for override in chosen]
    short = [word.partition("=")[0].rpartition(".")[2] for word in words]
    if len(set(short)) == len(short):
        words = [f"{key}={word.partition('=')[2]}" for key, word in zip(short, words)]
    name = _UNSAFE.sub("-", ",".join(words).replace(",", "_"))[:_MAX_NAME_CHARS]
    others = [override for override in fixed if not override.startswith("--output_dir=")]
    return _Trial(name, [*others, *chosen, f"--output_dir={root / name}"], root / name)


def _run_all(trials: Sequence[_Trial], args: Any) -> int:
    """Run the trials that have not ended, `args.jobs` at a time. Returns 0 if all went well, else the exit code of the
    first that did not.

    The first Ctrl-C lets those that run write a checkpoint.
    """
    waiting = []
    for number, trial in enumerate(trials, 1):
        if _has_ended(trial.directory):
            print(f"{trial.name}: run {number} of {len(trials)} has ended already", flush=True)
        else:
            waiting.append((number, trial))
    running: list[tuple[_Trial, SupervisedProcess]] = []
    code = 0
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                number, trial = waiting.pop(0)
                print(f"{trial.name}: run {number} of {len(trials)}; its output: {_log(trial)}", flush=True)
                running.append((trial, _start(trial, args)))
            time.sleep(_POLL_SECONDS)
            for trial, process in list(running):
                if (ended := process.poll()) is not None:
                    process.end()
                    running.remove((trial, process))
                    code = code or abs(ended)
                    how = "ended" if ended == 0 else f"exit code {ended}; see {_log(trial)}"
                    print(f"{trial.name}: {how}", flush=True)
    except KeyboardInterrupt:
        for _, process in running:
            process.interrupt()
        for _, process in running:
            process.wait(_GRACE_SECONDS)
        raise
    finally:
        for _, process in running:
            process.end()
    return code


def _start(trial: _Trial, args: Any) -> SupervisedProcess:
    """Start the run of a trial, or resume it where it has begun."""
    from llmsuite.base.supervisor import SupervisedProcess
    from llmsuite.checkpoint.directory import list_steps

    trial.directory.parent.mkdir(parents=True, exist_ok=True)
    options = ["--smoke"] if args.smoke else []
    if list_steps(trial.directory / "checkpoints"):
        options.append("--resume")
    command = [sys.executable, "-m", "llmsuite", "run", args.recipe, *options, *trial.overrides]
    with open(_log(trial), "ab") as log:
        return SupervisedProcess(
            command, output=log, grace_seconds=_GRACE_SECONDS, environment={**os.environ, "PYTHONUNBUFFERED": "1"}
        )


def _log(trial: _Trial) -> Path:
    return trial.directory.with_name(f"{trial.directory.name}.log")


def _has_ended(directory: Path) -> bool:
    from llmsuite.observe.events import read_events

    events = read_events(directory)
    return bool(events) and events[-1]["event"] == "ended"


def _show(trials: Sequence[_Trial], keys: str, root: Path) -> int:
    """Print the runs, the one with the least loss first."""
    from llmsuite.cli.runs import list_runs
    from llmsuite.observe.runs import is_run, read_run

    runs = [read_run(trial.directory) for trial in trials if is_run(trial.directory)]
    if not runs:
        return 0
    is_evaluated = any(run.series("eval/loss")[0] for run in runs)
    columns = f"{keys},status,step,loss"
    best = "loss"
    if is_evaluated:
        best = "eval/loss"
        columns = f"{columns},{best}"
    print(f"\nllmsuite runs list {root} --columns {columns} --sort {best}")
    return list_runs(runs, columns.split(","), best)
