"""The contract of a model family as one assertion: however its model is run, it is the same network.

A tiny model with random weights is trained, evaluated, asked, exported and cut over ranks on the CPU, in processes of
its own; every module of each form is compared with the training pass on one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite import builtin
from llmsuite.align.compare import compare
from llmsuite.align.merge import Side, read_side
from llmsuite.cache import private_cache
from llmsuite.cli import commands
from llmsuite.plugins.given import add_files, plugin_files
from llmsuite.plugins.manager import load_plugins
from llmsuite.recipe.resolve import plan_run
from llmsuite.regular import is_dir, is_file
from llmsuite.specs import ModelFamily
from llmsuite.testing.family_forms import LOGPROBS, Told

TOLERANCE = 1e-5
"""Relative difference of two vectors, by their Euclidean norms, that is none in float32."""
_LOGITS = "logits"
_ON_ONE = ("evaluation", "the model as it is called", "generation", "export", "rollouts")
_ON_RANKS = {"tensor parallel": (2, 1), "pipeline parallel": (1, 2)}
PATHS = (*_ON_ONE, *(f"{path} {what}" for path in _ON_RANKS for what in ("training", "generation", "export")))
"""What is compared with the training pass on one device."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one path of a family has come to."""

    path: str
    """One of `PATHS`."""
    refused: str | None = None
    """The message that refuses it; None where it is the same network."""

    def __str__(self) -> str:
        return f"{self.path}: " + ("the same network" if self.refused is None else f"refused: {self.refused}")


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
        family: the name of a registered family, or itself.
        directory: empty, for what is written, such as pytest's `tmp_path`.
        shape: fields of its config, over those of `ModelFamily.smoke`. Two layers or more.
        plugins: Python files that register it, where no installed package does.
        refuses: what the family does not have: a path, or the first words of several, and a regular expression for the
            message that refuses it. What refuses without being named here, and what is named here and works, fails.
        tolerance: relative difference that is none. Log-probabilities of drawn tokens may differ by ten times as much.

    Returns:
        What each path has come to, to be printed.
    """
    name = family if isinstance(family, str) else family.name
    with plugin_files(plugins):
        registry = add_files(load_plugins(builtin, commands))
        assert name in registry.models, registry.unknown("model", name)
        spec = registry.models[name]
        told = _told(spec, shape or {}, directory, registry)
        _run(told, "alone")
        outcomes = [_checked(path, directory, tolerance) for path in _ON_ONE]
        for path, (tp, pp) in _ON_RANKS.items():
            outcomes.append(_training(path, told, directory, tp, pp, tolerance, list(plugins)))
            _run(dataclasses.replace(told, tp=tp, pp=pp), path)
            outcomes += [_checked(f"{path} {what}", directory, tolerance) for what in ("generation", "export")]
    broken = list(_broken(outcomes, refuses or {}))
    assert not broken, f"family {name}:\n" + "\n".join(broken)
    return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]


def _told(spec: ModelFamily, shape: Mapping[str, Any], directory: Path, registry: Any) -> Told:
    """The model, and the recipe that trains it."""
    whole = {**spec.smoke, **shape}
    recipe = {
        "stage": "pretrain",
        "model": {"family": spec.name, "tokenizer": "data/tokenizer", "weights": "model"},
        "data": {"train": "data/pretrain/train.txt", "max_length": 32},
        "train": {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3},
        "output_dir": "run",
    }  # fmt: skip
    from_shape = {**recipe, "model": {"family": spec.name, "tokenizer": "data/tokenizer", "config": whole}}
    path = directory / "shape.json"
    path.write_text(json.dumps(from_shape, indent=1), encoding="utf-8")
    plan = plan_run(path, [], registry)  # which tells what is wrong with the shape
    assert plan.tokenizer is not None
    recipe["model"] = {**recipe["model"], "weights": str(directory / "model")}  # type: ignore[dict-item]
    (directory / "recipe.json").write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return Told(family=spec.name, shape=whole, directory=str(directory), tokenizer=str(plan.tokenizer))


# what is checked


@dataclasses.dataclass(frozen=True)
class _Difference:
    path: str
    said: str


def _checked(path: str, directory: Path, tolerance: float) -> Outcome | _Difference:
    """What the record of a path says beside that of the training pass."""
    where = directory / path
    if is_file(refused := where / "refused.txt"):
        return Outcome(path, refused.read_text(encoding="utf-8"))
    ranks = len(list(where.glob("rank-*.json")))
    training, found = read_side(directory / "training", 1, "fp32"), read_side(where, ranks, "fp32")
    gap = found.metrics.get(LOGPROBS, 0.0)
    report = compare(training, found, ("training", path), tolerance)
    assert report.num_compared, f"{path}: nothing was compared"
    if report.first_forward is None and gap <= 10 * tolerance:
        return Outcome(path)
    first = _first(training, found, tolerance)
    layers = where.with_name(f"{path}, layer by layer")
    if first in (None, _LOGITS) and is_dir(layers):  # whose modules a kernel or a program hides
        first = _first(training, read_side(layers, 1, "fp32"), tolerance)
        first = first or "none of its layers, so what takes the place of all of them"
    off = max((row.output for row in report.rows if row.module == _LOGITS and row.output is not None), default=0.0)
    said = f"log-probabilities of drawn tokens differ by {gap:.1e}" if LOGPROBS in found.metrics else ""
    said = said or f"logits differ by {100 * off:.3g}%"
    return _Difference(path, f"{said} from the training pass; first module that differs: {first or _LOGITS}")


def _first(training: Side, found: Side, tolerance: float) -> str | None:
    first = compare(training, found, ("", ""), tolerance).first_forward
    return None if first is None else f"{first.name} ({first.of})" if first.of else first.name


def _training(
    path: str, told: Told, directory: Path, tp: int, pp: int, tolerance: float, plugins: list[str | Path]
) -> Outcome | _Difference:
    """A step on two ranks beside a step on one, forward and backward, as `llmsuite align` compares them."""
    degrees = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp}
    words = ["align", str(directory / "recipe.json"), "--json", f"--parallel={json.dumps(degrees)}"]
    words += ["--launch.num_devices=2", f"--tolerance={10 * tolerance}"]
    words += [word for file in plugins for word in ("--plugin", str(file))]
    name = f"{path} training"
    done = _python(["-m", "llmsuite", *words], directory)
    if done.returncode == 2:
        return Outcome(name, done.stderr.strip())
    assert done.returncode in (0, 3), f"llmsuite {' '.join(words)}: exit code {done.returncode}\n{done.stderr}"
    report = json.loads(done.stdout)
    if report["is_equal"]:
        return Outcome(name)
    first = report["first_forward"] or report["first_backward"]
    of = f" ({first['of']})" if "of" in first else ""
    return _Difference(name, f"first that differs from one rank: the {first['kind']} of {first['name']}{of}")


def _broken(outcomes: Sequence[Outcome | _Difference], refuses: Mapping[str, str]) -> Iterator[str]:
    """What is not as the contract or `refuses` has it."""
    unused = set(refuses)
    for outcome in outcomes:
        key = next((key for key in refuses if outcome.path.startswith(key)), None)
        if isinstance(outcome, _Difference):
            yield f"{outcome.path}: {outcome.said}"
        elif outcome.refused is None and key is not None:
            yield f"{outcome.path}: is the same network, and `refuses` says that it is refused"
        elif outcome.refused is not None and key is None:
            yield f"{outcome.path}: is refused, and `refuses` does not say so: {outcome.refused}"
        elif outcome.refused is not None and key is not None and not re.search(refuses[key], outcome.refused):
            yield f"{outcome.path}: is refused by another message than `refuses` has: {outcome.refused}"
        if key is not None:
            unused.discard(key)
    yield from (f"refuses: {key!r} begins no path; there are {', '.join(PATHS)}" for key in sorted(unused))


# processes


_MAKE = "import sys; from llmsuite.testing.family_forms import main; sys.exit(main(sys.argv[1]))"


def _run(told: Told, name: str) -> None:
    directory = Path(told.directory)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(told)), encoding="utf-8")
    done = _python(["-c", _MAKE, str(path)], directory)
    assert done.returncode == 0, (
        f"family {told.family}, {name}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )


def _python(words: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLMSUITE_CACHE": str(private_cache(directory / "cache"))}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
