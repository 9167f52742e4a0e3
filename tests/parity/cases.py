"""Runs many cases in the same rank processes, and compares them with the run in one process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from llmsuite.contract.registry import PluginInfo
from llmsuite.launch.ends import INTERRUPTED
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests import device, standin
from tests.conftest import registry_with
from tests.further import RUNS_ALL
from tests.multi.conftest import RECIPE, Runner
from tests.parity import token_stage
from tests.parity.points import Point
from tests.support.paths import ROOT

STEPS = 3
WORKER = "tests.parity.worker"
RECIPES = {"dpo": RECIPE, "tokens": token_stage.RECIPE}
OPTIMIZERS = {
    # at a rate that moves: an error of scale in the gradients cannot hide
    "sgd": ("--train.optimizer=sgd", "--train.learning_rate=0.2", "--train.max_grad_norm=1"),
    # The usual epsilon of 1e-8 divides by the root of second moments that may be next to nothing, which magnifies the
    # last bit of a gradient from step to step. Of the size of the gradients, it is as exact as SGD.
    "adamw": (
        "--train.optimizer=adamw", "--train.learning_rate=3e-3", "--train.adam_epsilon=1e-2", "--train.weight_decay=0.1"
    ),
}  # fmt: skip
COMMON = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--data.max_length=64", "--data.eval=null",
)  # fmt: skip
# the run in one process is saved after each step too: what the steps after the first have changed is known by it
_ONE = ("--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}")
_MANY = ("--checkpoint.save_steps=null",)
LIMIT = 1e-6
GRADIENT_LIMIT = 3e-6
"""Tolerance of the gradient of a single parameter: those of queries and keys are differences of nearly equal numbers,
which cost digits."""
STATE_LIMIT = 1e-5
KL_LIMIT = 1e-4
"""Tolerance of differences of log-probabilities, each about -100 and known to 1e-5 by float32."""
ROUNDING = 2.0**-24
"""Largest relative error of a number that is rounded to float32."""
_METRICS = ("loss", "grad_norm", "logps/chosen", "logps/rejected", "nll/chosen", "kl")


T = TypeVar("T")


def few(table: dict[str, T], *left: str) -> dict[str, T]:
    """A table of cases without some that `make test` and `make test-further` leave to `make parity`; see
    `tests.further`."""
    assert table.keys() >= {*left}
    return {name: case for name, case in table.items() if RUNS_ALL or name not in left}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    num_ranks: int
    words: Sequence[str]
    """Overrides of the recipe, on top of `--smoke`."""
    mutation: str | None = None
    """A name in `tests.parity.mutations`: what is changed in the engine while the case runs."""
    recipe: str = RECIPE
    trace: bool = False
    """Whether each rank writes down what it has sent in the last step, as `traffic-RANK.json`."""
    resume: bool = False
    """Whether it goes on from the checkpoints that are in its directory."""
    overlaps: bool = False
    """Whether the engine does as on a device that sends while it computes."""
    note_opened: bool = False
    """Whether each rank writes down which files it has opened, as `opened-RANK.json`."""


def four_layers(family: str) -> tuple[str, ...]:
    """A tiny shape that tensor parallel degree 4 and four pipeline stages can cut."""
    heads = ("--model.config.num_attention_heads=4", "--model.config.num_key_value_heads=4")
    return (*(heads if family in ("llama", "qwen") else ()), "--model.config.num_hidden_layers=4")


def once(words: Iterable[str]) -> list[str]:
    """Overrides of which the last one of each key counts."""
    return list({word.partition("=")[0]: word for word in words}.values())


def one_process(point: Point) -> Case:
    """The run that a point is compared with."""
    name = "one-" + "-".join(str(value) for _, value in point.run)
    return Case(name, 1, [*COMMON, *_ONE, *OPTIMIZERS[point["optimizer"]], *point.words(strategy=False)],
                recipe=RECIPES[point["stage"]])  # fmt: skip


def many_processes(point: Point) -> Case:
    """The run of a point."""
    words = [*COMMON, *_MANY, *OPTIMIZERS[point["optimizer"]], *point.words()]
    return Case(str(point), point.num_ranks, words, recipe=RECIPES[point["stage"]])


def plan_of(case: Case) -> RunPlan:
    """What a case runs."""
    registry = registry_with()
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    registry.add(PluginInfo("standin", "tests", "standin", plugin=standin))
    registry.add(PluginInfo("sim", "tests", "sim", plugin=device))
    return plan_run(ROOT / case.recipe, case.words, registry, smoke=True)


def run_points(runner: Runner, points: Iterable[Point], trace: bool = False) -> dict[str, str]:
    """Run points, traced or not, and what they are compared with; see `run_cases`."""
    points = list(points)
    ones = {case.name: case for case in map(one_process, points)}
    return run_cases(runner, [*ones.values(), *(dataclasses.replace(many_processes(p), trace=trace) for p in points)])


def run_cases(runner: Runner, cases: Iterable[Case], module: str = WORKER) -> dict[str, str]:
    """Run cases into directories of their names, those of as many ranks in the same processes, by the `main` of a
    module.

    Returns:
        Name and what was printed of each case that did not end well; it was passed over.
    """
    failed: dict[str, str] = {}
    for num_ranks, same in itertools.groupby(sorted(cases, key=lambda c: c.num_ranks), key=lambda c: c.num_ranks):
        left = list(same)
        idle = 0
        while left:
            path = runner.directory / f"cases-{num_ranks}.json"
            path.write_text(json.dumps([dataclasses.asdict(case) for case in left]))
            code, printed = runner.launch(num_ranks, module, str(path), fresh=any(case.trace for case in left))
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            before = left
            left = [case for case in left if not (runner.directory / case.name / "done").exists()]
            idle = idle + 1 if len(left) == len(before) else 0
            if left:  # go on behind the one that failed, unless three in a row have
                count = 1 if idle < 3 else len(left)
                failed |= {case.name: printed[-5000:] for case in left[:count]}
                left = left[count:]
    return failed


@dataclasses.dataclass
class Comparison:
    """How far a run is from the same run in one process."""

    metrics: float = 0.0
    """Largest relative difference of a metric of any step."""
    gradients: float = 0.0
    """Largest relative difference of the gradient of a parameter, as the optimizer gets it in the first step."""
    change: float = 0.0
    """Largest difference of a parameter after the last step, as a part of what the training has changed in it, once
    what float32 cannot hold of the parameter itself is taken off."""
    state: float = 0.0
    """Largest relative difference of a tensor of the optimizer's state. Adam's moments are means of gradients."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What is beyond the limits."""

    def check(self, what: str, difference: float, limit: float) -> float:
        """Note a difference that is beyond a limit, or not a number; returns it, infinite for that."""
        if not difference <= limit:
            self.problems.append(f"{what} differs by {difference:.1e}")
        return math.inf if math.isnan(difference) else difference


def compare(
    runner: Runner,
    one: str,
    many: str,
    stem: str = "model",
    limit: float | Mapping[str, float] = LIMIT,
    falls: bool = True,
    gradient_limit: float = GRADIENT_LIMIT,
    gradient_limits: Mapping[str, float] = MappingProxyType({}),
    has_gradients: bool = True,
    metric_limits: Mapping[str, float] = MappingProxyType({}),
) -> Comparison:
    """Compare metrics, the first step's gradients, and what the last step has left: parameters, optimizer's state.

    `stem` is that of the parameters' files, `limit` how far what has changed in one of them may be off, for all or by
    name, `falls` whether the loss of the last step has to be lower than that of the first, whose samples are others;
    for `gradient_limit` and `gradient_limits` see `compare_gradients`; without `has_gradients`, the run has left none
    outside of its programs. A metric may be off by LIMIT, or by its entry in `metric_limits` where that is more.
    """
    result = Comparison()
    ours = runner.metrics(one)
    theirs = runner.metrics(many)
    assert len(ours) == STEPS
    assert not falls or ours[-1]["loss"] < 0.98 * ours[0]["loss"], "nothing was learnt, so nothing is compared"
    if len(theirs) != STEPS:
        result.problems.append(f"{len(theirs)} steps were recorded")
    for a, b in zip(ours, theirs):
        for key in ("tokens", "supervised_tokens"):
            if a[key] != b[key]:
                result.problems.append(f"step {a['step']}: {b[key]} {key}, not {a[key]}")
        for key in _METRICS:
            if key in a:
                # of an estimate that may be 0, what it is a difference of is not told
                far = abs(b[key] - a[key]) if key == "kl" else abs(b[key] / a[key] - 1)
                most = KL_LIMIT if key == "kl" else max(LIMIT, metric_limits.get(key, 0.0))
                difference = result.check(f"step {a['step']}: {key}", far, most)
                result.metrics = max(result.metrics, difference)
    if has_gradients:
        gradients = compare_gradients(runner, one, many, gradient_limit, gradient_limits)
        result.gradients = gradients.gradients
        result.problems += gradients.problems
    first, last, found = (runner.weights(n, s, stem) for n, s in ((one, 1), (one, STEPS), (many, STEPS)))
    assert last.keys() == found.keys()
    for name, value in last.items():
        rounding = STEPS * ROUNDING * norm(value)
        change = norm(value - first[name])
        difference = norm(found[name] - value) - rounding
        difference = difference / change if change else norm(found[name] - value)  # as it was: exactly
        allowed = limit[name] if isinstance(limit, Mapping) else limit
        result.change = max(result.change, result.check(name, difference, allowed))
    slots = runner.weights(one, STEPS, "optimizer")
    found = runner.weights(many, STEPS, "optimizer")
    assert slots.keys() == found.keys()
    for name, value in slots.items():
        difference = _difference(found[name], value)
        result.state = max(result.state, result.check(name, difference, STATE_LIMIT))
    return result


def compare_gradients(
    runner: Runner,
    one: str,
    many: str,
    limit: float = GRADIENT_LIMIT,
    limits: Mapping[str, float] = MappingProxyType({}),
) -> Comparison:
    """Compare the first step's gradients alone.

    That of a parameter may be off by `limit`, or by its entry in `limits` where that is more.
    """
    result = Comparison()
    (gradients,), stages = first_gradients(runner, one), first_gradients(runner, many)
    assert gradients.keys() == set().union(*stages)
    for stage in stages:  # of which two may have a tied parameter
        for name, value in stage.items():
            allowed = max(limit, limits.get(name, 0.0))
            expected = gradients[name]  # behind it the gradient of a padded vocabulary has to be zero
            expected = np.pad(expected, [(0, n - m) for n, m in zip(value.shape, expected.shape, strict=True)])
            difference = result.check(f"gradient of {name}", _difference(value, expected), allowed)
            result.gradients = max(result.gradients, difference)
    return result


def first_gradients(runner: Runner, name: str) -> list[dict[str, np.ndarray]]:
    """The first step's gradients by parameter, of each pipeline stage."""
    return [dict(np.load(path)) for path in sorted((runner.directory / name).glob("gradients-*.npz"))]


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if not expected.any():  # as the first gradient of a factor is whose other one is zero
        return norm(found)
    return norm(found - expected) / norm(expected)


def norm(values: np.ndarray) -> float:
    """Euclidean norm, summed in float64."""
    return float(np.linalg.norm(values.astype("float64")))
