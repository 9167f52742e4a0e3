"""Contract of a model family as one assertion: every execution path of its model computes the same network.

A tiny model with random weights is trained, evaluated, decoded, exported and sharded over ranks on the CPU, in its own
processes; every module of each path is compared with the training pass on one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.cache import isolated_cache
from llmsuite.base.commands import Finished, run_command
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.contract.given import add_files, plugin_files
from llmsuite.contract.registry import load_plugins
from llmsuite.contract.specs import ModelFamily
from llmsuite.observe.activations.compare import compare
from llmsuite.observe.activations.merge import Side, read_side
from llmsuite.recipe.resolve import plan_run
from llmsuite.testing.family_forms import LOGPROBS, Task

TOLERANCE = 1e-5
"""Relative difference of two vectors, by their Euclidean norms, that counts as equal in float32."""
_LOGITS = "logits"
_ON_ONE = ("evaluation", "the model as it is called", "generation", "export", "rollouts")
_ON_RANKS = {"tensor parallel": (2, 1), "pipeline parallel": (1, 2)}
PATHS = (*_ON_ONE, *(f"{path} {kind}" for path in _ON_RANKS for kind in ("training", "generation", "export")))
"""Execution paths that are compared with the training pass on one device."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one execution path of a family."""

    path: str
    """One of `PATHS`."""
    refused: str | None = None
    """The message that refuses it; None where it is the same network."""

    def __str__(self) -> str:
        outcome = "the same network" if self.refused is None else f"refused: {self.refused}"
        return f"{self.path}: {outcome}"


def assert_family_contract(
    family: str | ModelFamily,
    directory: Path,
    *,
    shape: Mapping[str, Any] | None = None,
    plugins: Sequence[str | Path] = (),
    refuses: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Outcome]:
    """Raise AssertionError with the path and the first module that differ unless the model of a family is the same
    network in every one of `PATHS` as in its training pass. Takes a minute.

    Args:
        family: a registered family, or its name.
        directory: empty directory for the files of the test, such as pytest's `tmp_path`.
        shape: fields of its config, over those of `ModelFamily.smoke`. Two layers or more.
        plugins: Python files that register it, where no installed package does.
        refuses: paths that the family does not support: a path, or the first words of several, and a regular
            expression for the message that refuses it. The assertion fails for other paths that are refused, and for
            these paths if they work.
        tolerance: relative difference that counts as equal. Log-probabilities of sampled tokens may differ by ten
            times as much.

    Returns:
        The result of each path, to be printed.
    """
    name = family if isinstance(family, str) else family.name
    with plugin_files(plugins):
        registry = add_files(load_plugins())
        assert name in registry.models, registry.unknown("model", name)
        spec = registry.models[name]
        task = _task(spec, shape or {}, directory, registry)
        _run(task, "alone")
        outcomes = [_checked(path, directory, tolerance) for path in _ON_ONE]
        for path, (tp, pp) in _ON_RANKS.items():
            outcomes.append(_training(path, task, directory, tp, pp, tolerance, list(plugins)))
            _run(dataclasses.replace(task, tp=tp, pp=pp), path)
            outcomes += [_checked(f"{path} {kind}", directory, tolerance) for kind in ("generation", "export")]
    broken = list(_broken(outcomes, refuses or {}))
    assert not broken, f"family {name}:\n" + "\n".join(broken)
    return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]


def _task(spec: ModelFamily, shape: Mapping[str, Any], directory: Path, registry: Any) -> Task:
    """Write the recipe that trains the model, and return the task."""
    full_shape = {**spec.smoke, **shape}
    recipe = {
        "stage": "pretrain",
        "model": {"family": spec.name, "tokenizer": "data/tokenizer", "weights": "model"},
        "data": {"train": "data/pretrain/train.txt", "max_length": 32},
        "train": {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3},
        "output_dir": "run",
    }  # fmt: skip
    from_shape = {**recipe, "model": {"family": spec.name, "tokenizer": "data/tokenizer", "config": full_shape}}
    path = directory / "shape.json"
    path.write_text(json.dumps(from_shape, indent=1), encoding="utf-8")
    plan = plan_run(path, [], registry)  # reports errors in the shape
    assert plan.model.tokenizer is not None
    recipe["model"] = {**recipe["model"], "weights": str(directory / "model")}  # type: ignore[dict-item]
    (directory / "recipe.json").write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return Task(family=spec.name, shape=full_shape, directory=str(directory), tokenizer=str(plan.model.tokenizer))


# checks


@dataclasses.dataclass(frozen=True)
class _Difference:
    path: str
    message: str


def _checked(path: str, directory: Path, tolerance: float) -> Outcome | _Difference:
    """Compare the record of a path with that of the training pass."""
    where = directory / path
    refused = where / "refused.txt"
    if is_file(refused):
        return Outcome(path, refused.read_text(encoding="utf-8"))
    ranks = len(list(where.glob("rank-*.json")))
    training = read_side(directory / "training", 1, "fp32")
    found = read_side(where, ranks, "fp32")
    gap = found.metrics.get(LOGPROBS, 0.0)
    report = compare(training, found, ("training", path), tolerance)
    assert report.num_compared, f"{path}: nothing was compared"
    if report.first_forward is None and gap <= 10 * tolerance:
        return Outcome(path)
    first = _first(training, found, tolerance)
    layers = where.with_name(f"{path}, layer by layer")
    if first in (None, _LOGITS) and is_dir(layers):  # a kernel or a program hides the modules
        first = _first(training, read_side(layers, 1, "fp32"), tolerance)
        first = first or "none of its layers, so the kernel or program that runs instead of them"
    off = max((row.output for row in report.rows if row.module == _LOGITS and row.output is not None), default=0.0)
    message = f"logits differ by {100 * off:.3g}%"
    if LOGPROBS in found.metrics:
        message = f"log-probabilities of sampled tokens differ by {gap:.1e}"
    return _Difference(path, f"{message} from the training pass; first module that differs: {first or _LOGITS}")


def _first(training: Side, found: Side, tolerance: float) -> str | None:
    first = compare(training, found, ("", ""), tolerance).first_forward
    if first is None:
        return None
    return f"{first.name} ({first.of})" if first.of else first.name


def _training(
    path: str, task: Task, directory: Path, tp: int, pp: int, tolerance: float, plugins: list[str | Path]
) -> Outcome | _Difference:
    """Compare a step on two ranks with a step on one, forward and backward, with `llmsuite align`."""
    degrees = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp}
    args = ["align", str(directory / "recipe.json"), "--json", f"--parallel={json.dumps(degrees)}"]
    args += ["--launch.num_devices=2", f"--tolerance={10 * tolerance}"]
    args += [arg for file in plugins for arg in ("--plugin", str(file))]
    name = f"{path} training"
    done = _python(["-m", "llmsuite", *args], directory)
    if done.code == 2:
        return Outcome(name, done.errors.strip())
    assert done.code in (0, 3), f"llmsuite {' '.join(args)}: exit code {done.code}\n{done.errors}"
    report = json.loads(done.output)
    if report["is_equal"]:
        return Outcome(name)
    first = report["first_forward"] or report["first_backward"]
    of = f" ({first['of']})" if "of" in first else ""
    return _Difference(name, f"first that differs from one rank: the {first['kind']} of {first['name']}{of}")


def _broken(outcomes: Sequence[Outcome | _Difference], refuses: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the messages about violations of the contract and of `refuses`."""
    unused = set(refuses)
    for outcome in outcomes:
        key = next((key for key in refuses if outcome.path.startswith(key)), None)
        if isinstance(outcome, _Difference):
            yield f"{outcome.path}: {outcome.message}"
        elif outcome.refused is None and key is not None:
            yield f"{outcome.path}: is the same network, but `refuses` lists it as refused"
        elif outcome.refused is not None and key is None:
            yield f"{outcome.path}: is refused, but `refuses` does not list it: {outcome.refused}"
        elif outcome.refused is not None and key is not None and not re.search(refuses[key], outcome.refused):
            yield f"{outcome.path}: is refused with a message that does not match `refuses`: {outcome.refused}"
        if key is not None:
            unused.discard(key)
    yield from (f"refuses: {key!r} is no beginning of a path; paths: {', '.join(PATHS)}" for key in sorted(unused))


# processes


_MAKE = "import sys; from llmsuite.testing.family_forms import main; sys.exit(main(sys.argv[1]))"


def _run(task: Task, name: str) -> None:
    directory = Path(task.directory)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    done = _python(["-c", _MAKE, str(path)], directory)
    assert done.code == 0, f"family {task.family}, {name}: exit code {done.code}\n{done.output}{done.errors}"


def _python(args: Sequence[str], directory: Path) -> Finished:
    environment = {**os.environ, "LLMSUITE_CACHE": str(isolated_cache(directory / "cache"))}
    return run_command([sys.executable, *args], environment)
