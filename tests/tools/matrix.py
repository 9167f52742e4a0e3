"""Every recipe, made small by `--smoke`, on its own mesh against one process.

Of a recipe that does not train, answers are compared in place of losses, to the token. One that trains is held
against its plan too: what every rank sends in a step, in which order its passes run, what lives in its memory.

`make matrix` runs all of them and writes docs/notes/support.json, of which docs/reference/support.md is made; a test
fails when a recipe is not the one that was run. With names it runs those only and puts them in their place in the
report:

    python -m tests.tools.matrix llama/sft gpt/gpt-175b-pretrain
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.stages.sections import DpoSection
from tests.conftest import registry_with
from tests.multi.conftest import Runner
from tests.parity import planned
from tests.parity.cases import LIMIT, ROUNDING, Case, run_cases
from tests.parity.planned import truth_of
from tests.parity.qat import FLIPPED
from tests.support.paths import ROOT

REPORT = ROOT / "docs" / "notes" / "support.json"
STEPS = 3
MODES = ("dynamic", "to_static")
PROGRAM = "program"
"""Mode of a recipe whose steps are one program each, `to_static` with `program: step`."""
_IN_BOTH = ("pretrain", "sft", "lora", "dpo")
"""Recipes with these names are run in both modes, the others in their own."""
# as the recipes, but small steps of AdamW's denominator and of a rate that moves; tests/parity/cases.py says why
_COMMON = (
    f"--train.max_steps={STEPS}", "--train.warmup_ratio=0", "--train.adam_epsilon=1e-2", "--train.log_steps=1",
    "--data.max_length=64", "--data.eval=null", "--checkpoint.save_steps=null",
)  # fmt: skip
_RATE = {False: "--train.learning_rate=3e-3", True: "--train.learning_rate=0.03"}
"""Learning rate of models and (True) of adapters, whose first gradients are small beside such an epsilon."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A recipe in one of the modes."""

    recipe: str
    """`family/name`."""
    mode: str

    @property
    def name(self) -> str:
        return f"{self.recipe.replace('/', '-')}-{self.mode}"

    @property
    def path(self) -> str:
        return f"recipes/{self.recipe}.json"

    def trains(self, registry: Registry) -> bool:
        return registry.stages[json.loads((ROOT / self.path).read_text(encoding="utf-8"))["stage"]].trains

    def plan(self, registry: Registry) -> RunPlan:
        return plan_run(ROOT / self.path, self.words(registry), registry, smoke=True)

    def common(self, registry: Registry) -> list[str]:
        data = json.loads((ROOT / self.path).read_text(encoding="utf-8"))
        stage = registry.stages[data["stage"]]
        # a rollout of several steps would need as many
        updates = [f"--{stage.name}.updates=1"] if data.get(stage.name, {}).get("updates", 1) > 1 else []
        # pipelines of programs need two rows or more in a micro-batch, and as many micro-batches as stages
        size = f"--train.global_batch_size={16 if self._is_program_pipeline else 8}"
        return [*_COMMON, size, _RATE["adapters_only" in stage.capabilities], *updates] if stage.trains else []

    @property
    def _is_program_pipeline(self) -> bool:
        parallel = json.loads((ROOT / self.path).read_text(encoding="utf-8")).get("parallel", {})
        return self.mode == PROGRAM and parallel.get("pipeline_parallel_degree", 1) > 1

    def words(self, registry: Registry) -> list[str]:
        if not self.trains(registry):
            return []
        rows = 2 if self._is_program_pipeline else 1
        mode = "to_static" if self.mode == PROGRAM else self.mode
        return [*self.common(registry), f"--train.micro_batch_size={rows}", f"--engine.mode={mode}"]

    def digest(self, registry: Registry) -> str:
        """Digest of what is run: the keys that the recipe, `--smoke` and this file give, and their values."""
        loaded = self.plan(registry).loaded
        given: dict[str, Any] = {}
        for key in sorted(loaded.given):
            value: Any = loaded.recipe
            for part in key:
                value = value[part] if isinstance(value, dict) else value.__dict__[part]
            given[".".join(key)] = value
        given.pop("data.ignore_columns", None)  # columns that nothing reads change no number
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]

    def many(self, registry: Registry) -> Case:
        """On its own mesh."""
        num_ranks = self.plan(registry).parallel.degrees.num_ranks
        words = self.words(registry)
        # the calls of a program are made by Paddle, where nothing records them
        is_traced = self.trains(registry) and self.mode != PROGRAM
        return Case(self.name, num_ranks, words, recipe=self.path, trace=is_traced)

    def one(self, registry: Registry) -> Case:
        """The same model and batch in one process; equal ones of several recipes are one case."""
        plan = self.plan(registry)
        words = [
            *self.common(registry), *(("--train.micro_batch_size=8",) if self.trains(registry) else ()),
            "--launch.num_devices=1", "--parallel={}", "--engine={}",
            f"--model.config={json.dumps(plan.model.section.config, sort_keys=True)}",
        ]  # fmt: skip
        alone = plan_run(ROOT / self.path, words, registry, smoke=True).loaded.recipe
        learnt = {key: repr(value) for key, value in as_plain(alone).items() if key != "output_dir"}
        digest = hashlib.sha256(json.dumps(learnt, sort_keys=True).encode()).hexdigest()[:16]
        return Case(f"one-{digest}", 1, words, recipe=self.path)


def entries() -> list[Entry]:
    """Each recipe in its own mode, some in both."""
    found = []
    for path in sorted((ROOT / "recipes").glob("*/*.json")):
        recipe = f"{path.parent.name}/{path.stem}"
        engine = json.loads(path.read_text(encoding="utf-8")).get("engine", {})
        own = PROGRAM if engine.get("program") == "step" else str(engine.get("mode", "dynamic"))
        found += [Entry(recipe, mode) for mode in (MODES if path.stem in _IN_BOTH else (own,))]
    return found


def run(runner: Runner, chosen: Iterable[Entry], registry: Registry) -> list[dict[str, Any]]:
    """Run entries and what they are compared with; returns a record of each."""
    chosen = list(chosen)
    ones = {entry: entry.one(registry) for entry in chosen}
    cases = {case.name: case for case in ones.values()}
    failed = run_cases(runner, [*cases.values(), *(entry.many(registry) for entry in chosen)])
    records = []
    for entry in chosen:
        plan = entry.plan(registry)
        record = {
            "recipe": entry.recipe,
            "mode": entry.mode,
            "family": plan.model.family.name,
            "stage": plan.train.stage.name,
            "digest": entry.digest(registry),
            "asked": str(plan.smoke_of),
            "mesh": str(plan.parallel.degrees),
        }
        printed = failed.get(ones[entry].name) or failed.get(entry.name)
        if printed is not None:
            record |= {"passed": False, "problem": printed.strip().splitlines()[-1].partition("; its log")[0][:300]}
        elif not entry.trains(registry):
            record |= _same_answers(runner, ones[entry].name, entry.name)
        else:
            record |= _compared(runner, ones[entry].name, entry.name, plan)
            # no plan has the messages of rollouts, and Paddle makes those of programs
            if record["passed"] and not plan.train.profile.updates and entry.mode != PROGRAM:
                record |= _planned(runner, entry.name, plan)
        records.append(record)
    return records


def _compared(runner: Runner, one: str, many: str, plan: RunPlan) -> dict[str, Any]:
    """The largest relative difference of loss and gradient norm in any step. Where inputs are rounded, those of the
    steps behind the first may differ by what tests/parity/qat.py says."""
    rounded = plan.model.qat.activation_bits is not None
    expected = runner.metrics(one)
    found = runner.metrics(many)
    if [len(expected), len(found)] != [STEPS, STEPS]:
        return {"passed": False, "problem": f"{len(expected)} and {len(found)} steps were recorded"}
    if plan.train.profile.updates:
        return _same_rollouts(expected, found)
    if abs(expected[-1]["loss"] / expected[0]["loss"] - 1) < 1e-3:  # steps see other samples: it need not have fallen
        return {"passed": False, "problem": "the loss stays what it was, so nothing was compared"}
    keys = ("loss", "grad_norm")
    found_by = {key: [abs(b[key] / a[key] - 1) for a, b in zip(expected, found, strict=True)] for key in keys}
    limits = {key: [LIMIT, *[FLIPPED[key] if rounded else LIMIT] * (STEPS - 1)] for key in keys}
    margins = [margin_rounding(plan, record) for record in expected]
    limits["grad_norm"] = [max(pair) for pair in zip(limits["grad_norm"], margins, strict=True)]
    pairs = [pair for key in keys for pair in zip(found_by[key], limits[key], strict=True)]
    if not all(difference <= limit for difference, limit in pairs):  # NaN is none either
        return {"passed": False, "problem": f"differs by {json.dumps(found_by)}"}
    told: dict[str, Any] = {"rounded": True} if rounded else {}
    if max(found_by["grad_norm"]) > LIMIT and not rounded:
        told["grad_norm_limit"] = max(limits["grad_norm"])
    return {**{key: max(values) for key, values in found_by.items()}, **told, "passed": True}


def _same_rollouts(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    """The same for steps that learn from rollouts, whose loss is about 0: its difference is not divided by it. The
    completions are the same."""
    pairs = list(zip(expected, found, strict=True))
    if not any(a["grad_norm"] > 1e-3 for a in expected):
        return {"passed": False, "problem": "no step has a gradient, so nothing was compared"}
    drawn = {"tokens", "supervised_tokens", "reward"} & expected[0].keys()  # distillation has no rewards
    if any(a[key] != b[key] for a, b in pairs for key in drawn):
        return {"passed": False, "problem": "other completions were drawn"}
    loss = max(abs(b["loss"] - a["loss"]) for a, b in pairs)
    norm = max(abs(b["grad_norm"] - a["grad_norm"]) / (a["grad_norm"] or 1.0) for a, b in pairs)
    if not max(loss, norm) <= LIMIT:
        return {"passed": False, "problem": f"differs by {loss:.2g} in the loss, {norm:.2g} in the gradient norm"}
    return {"loss": loss, "grad_norm": norm, "passed": True}


def margin_rounding(plan: RunPlan, record: Mapping[str, float]) -> float:
    """How far the rounding of log-probabilities may move the gradient norm of a step, relatively; 0 where no reference
    is compared with.

    The loss of a pair is -log sigmoid(x), where x is beta times a difference of four log-probabilities: of two answers,
    by the model and by the reference. Each is a float32, thus off by up to 2**-24 of itself. The gradient of the pair
    is proportional to sigmoid(-x), whose relative change is at most the change of x. The log-probabilities of the
    reference are taken to be as large as those of the model, which begins as its equal.

    Args:
        plan: of the run.
        record: metrics of the step.
    """
    section = plan.train.stage_section
    if not isinstance(section, DpoSection) or section.loss != "sigmoid" or section.reference_from == "none":
        return 0.0
    sizes = abs(record["logps/chosen"]) + abs(record["logps/rejected"])
    return section.beta * 2 * ROUNDING * sizes


def _planned(runner: Runner, name: str, plan: RunPlan) -> dict[str, Any]:
    """How the last step was against its plan."""
    found = truth_of(runner.directory / name, plan)
    if found.problems:
        return {"passed": False, "problem": f"not as planned: {found.problems[0]}"}
    live = found.live_memory
    if not abs(live) <= planned.LIMIT:
        return {"passed": False, "problem": f"live memory is planned {live:+.1%} off"}
    return {"calls": found.calls, "bytes": found.num_bytes, "memory": live, "bubble": found.bubble}


def _same_answers(runner: Runner, one: str, many: str) -> dict[str, Any]:
    """How many tokens were answered, all of them the same."""
    found = []
    for name in (one, many):
        rows = (runner.directory / name / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([answer["ids"] for row in rows for answer in json.loads(row)["answers"]])
    if len({tuple(ids) for ids in found[0]}) < 4:
        return {"passed": False, "problem": "the answers are alike, so nothing was compared"}
    if differing := sum(a != b for a, b in zip(*found, strict=True)):
        return {"passed": False, "problem": f"{differing} of {len(found[0])} answers differ"}
    return {"tokens": sum(map(len, found[0])), "passed": True}


def main(names: list[str]) -> int:
    """Run all entries, or those of some recipes, family by family, and write those of each into the report; 1 when one
    in it did not pass."""
    registry = registry_with()
    known = entries()
    chosen = [entry for entry in known if not names or entry.recipe in names]
    kept = json.loads(REPORT.read_text(encoding="utf-8"))["runs"] if REPORT.is_file() else []
    there = {(entry.recipe, entry.mode) for entry in known}
    runs = {key: run for run in kept if (key := (run["recipe"], run["mode"])) in there}
    for _, family in itertools.groupby(chosen, key=lambda entry: entry.recipe.partition("/")[0]):
        with tempfile.TemporaryDirectory() as directory:
            records = run(Runner(Path(directory)), family, registry)
        for record in records:
            _print(record)
        runs |= {(record["recipe"], record["mode"]): record for record in records}
        _write([runs[key] for key in sorted(runs)])
    return 0 if all(record["passed"] for record in runs.values()) else 1


def _print(record: Mapping[str, Any]) -> None:
    found = record.get("problem") or (
        f"{record['tokens']} tokens the same"
        if "tokens" in record
        else f"loss {record['loss']:.1e}, grad_norm {record['grad_norm']:.1e}"
    )
    passed = "ok  " if record["passed"] else "FAIL"
    print(f"{passed} {record['recipe']} {record['mode']} {record['mesh']}: {found}", flush=True)


def _write(records: list[dict[str, Any]]) -> None:
    report = {"limit": LIMIT, "steps": STEPS, "paddle": importlib.metadata.version("paddlepaddle"), "runs": records}
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
