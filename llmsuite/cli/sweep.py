"""The command `llmsuite sweep RECIPE --train.learning_rate=1e-4,3e-4`: a run for each combination of values."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry

if TYPE_CHECKING:
    from llmsuite.base.supervisor import SupervisedProcess
    from llmsuite.recipe.load import LoadedRecipe

_MAX_RUNS = 1000
_GRACE_SECONDS = 60.0
"""Time for a run to write a checkpoint when the sweep is stopped."""
_POLL_SECONDS = 0.2
_UNSAFE = re.compile(r"[^\w.=+-]+")
"""Characters of a value that a name of a directory does not have here."""
_PLAIN = re.compile(r"[\w.+-]*")
"""A value that the name of a directory has as it is."""
_MAX_NAME_CHARS = 200
_DIGEST_CHARS = 8


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
        "ended are kept, others are resumed. Runs of another recipe are refused, as by `run --resume`. Commas in "
        "brackets, braces or quotes separate no values."
    )


def run(args: Any, registry: Registry) -> int:
    from llmsuite.recipe.resolve import plan_run

    axes, fixed = split_axes(args.overrides)
    if not axes:
        raise UserError("sweep: give a key several values, such as --train.learning_rate=1e-4,3e-4")
    root = plan_run(args.recipe, [*fixed, *(values[0] for values in axes)], registry, args.smoke).output_dir
    trials = [_trial(root, fixed, chosen) for chosen in _combinations(axes)]
    for override, count in Counter(itertools.chain(*axes)).items():
        if count > 1:
            raise UserError(f"sweep: {override} is there twice; leave one out")
    waiting = []
    for trial in trials:  # all of them, before the first one starts
        plan = plan_run(args.recipe, trial.overrides, registry, args.smoke)
        if not is_done(plan.loaded, trial.directory):
            waiting.append(trial)
    code = _run_all(trials, waiting, args)
    keys = ",".join(values[0][2:].partition("=")[0] for values in axes)
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
    name = name_of(chosen)
    others = [override for override in fixed if not override.startswith("--output_dir=")]
    return _Trial(name, [*others, *chosen, f"--output_dir={root / name}"], root / name)


def name_of(chosen: Sequence[str]) -> str:
    """Name of the directory of a run, such as "learning_rate=1e-4_seed=0", by its overrides of swept keys. Different
    values have different names."""
    words = [override[2:] for override in chosen]
    short = [word.partition("=")[0].rpartition(".")[2] for word in words]
    if len(set(short)) == len(short):
        words = [f"{key}={word.partition('=')[2]}" for key, word in zip(short, words)]
    name = _UNSAFE.sub("-", "_".join(words))
    if len(name) > _MAX_NAME_CHARS or not all(_PLAIN.fullmatch(word.partition("=")[2]) for word in words):
        # other values may have the same name
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:_DIGEST_CHARS]
        name = f"{name[: _MAX_NAME_CHARS - _DIGEST_CHARS - 1]}-{digest}"
    return name


def is_done(loaded: LoadedRecipe, directory: Path) -> bool:
    """Return True where the run of this recipe has ended in a directory; False where it has to be started or resumed.

    Raises:
        UserError: the directory has a run of another recipe, which `llmsuite run --resume` would refuse too.
    """
    from llmsuite.engine.run_record import RunRecord
    from llmsuite.observe.events import read_events
    from llmsuite.recipe.fetch import pin_recorded
    from llmsuite.recipe.pins import hub_names

    pin_recorded(loaded, hub_names(loaded.recipe))
    record = RunRecord.from_recipe(loaded, directory)
    elsewhere = "give this sweep another --output_dir, or remove that directory"
    if differing := record.differing_keys():
        raise UserError(f"sweep: {directory} has a run that differs in {', '.join(differing)}; {elsewhere}")
    try:
        record.check()
    except UserError as error:
        raise UserError(f"sweep: {error}; or {elsewhere}") from error
    events = read_events(directory)
    return bool(events) and events[-1]["event"] == "ended" and not record.differs_in_length()


def _run_all(trials: Sequence[_Trial], unfinished: Sequence[_Trial], args: Any) -> int:
    """Run the unfinished ones of all trials, `args.jobs` at a time. Returns 0 if all went well, else the exit code of
    the first that did not: 128 + the number of the signal that has killed it, as a shell does.

    The first Ctrl-C lets those that run write a checkpoint.
    """
    waiting = []
    for number, trial in enumerate(trials, 1):
        if trial in unfinished:
            waiting.append((number, trial))
        else:
            print(f"{trial.name}: run {number} of {len(trials)} has ended already", flush=True)
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
                    code = code or (ended if ended >= 0 else 128 - ended)
                    print(f"{trial.name}: {_how(ended, trial)}", flush=True)
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


def _how(code: int, trial: _Trial) -> str:
    """Words for how the run of a trial has ended, by its exit code, negative for a signal."""
    if code == 0:
        return "ended"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how}; its log: {_log(trial)}"


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
