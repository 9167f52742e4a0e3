"""Conversion of a file of another suite to a recipe, with a report of every argument: same key, translated, ignored or
refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ConvertedRecipe
from llmsuite.data.keys import ALL
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.conversion.conversion import check_stage
from llmsuite.plugins.suites.conversion.family import family_of
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.conversion.refuse import Reason, find, honoured_leave_out, joined, refusal, why_refused
from llmsuite.plugins.suites.suite import Run, Suite
from llmsuite.recipe.document import read_document


def read_values(path: Path, suite: Suite | None = None) -> dict[str, Any]:
    """Return the arguments in a file: YAML 1.1, JSON, or a shell script if the suite supports it.

    Raises:
        UserError: the file cannot be read, or is not a mapping; with line and column.
    """
    if path.suffix.lower() == ".sh":
        if suite is None or suite.read_shell is None:
            raise UserError(f"{path}: is a shell script; pass the YAML or JSON file of arguments")
        return suite.read_shell(path)
    found = read_document(path, yaml_1_1=True).value
    if not isinstance(found, dict):
        raise UserError(f"{path}:1:1: has no keys; pass a YAML or JSON file of arguments")
    return found


def convert(
    suite: Suite,
    values: Mapping[str, Any],
    name: str,
    registry: Registry,
    stage: str | None = None,
    family: str | None = None,
    num_devices: int | None = None,
    leave_out: Sequence[str] = (),
) -> ConvertedRecipe:
    """Return a recipe of the same run, with a report.

    Args:
        suite: suite that the file is for.
        values: contents of the file.
        name: name of the file, for the recipe's `source`.
        registry: registered stages and families.
        stage: stage of the recipe, if the file does not determine it.
        family: family of the model, if its name does not determine it.
        num_devices: number of devices of all machines, if the file does not name it.
        leave_out: arguments to ignore, although the recipe is then another job.

    Raises:
        UserError: no recipe can be the same job, stage or family are not determined, or an argument has a wrong type.
    """
    flat = suite.flatten(dict(values))
    suite = suite.programs.get(str(flat.get("command", "")).partition(" ")[0], suite)
    job = f"this job of {suite.name}"
    reasons: list[Reason] = []
    try:
        stage = suite.stage(flat, name, stage)
        # collected first: these reasons are more useful than an undetermined family
        for key, value in flat.items():
            why = why_refused(suite.refused, key, value)
            if why is not None:
                reasons.append((key, value, why))
        run = _read(suite, flat, name, registry, stage, family, num_devices)
    except UserError as stop:
        raise refusal(reasons, flat, name, leave_out, job, stop) or stop from None
    run.result.refused = joined(reasons, run.result.refused)
    error = refusal(run.result.refused, flat, name, leave_out, job)
    if error is not None:
        raise error
    return _finished(run, leave_out)


def _read(
    suite: Suite,
    flat: Mapping[str, Any],
    name: str,
    registry: Registry,
    stage: str,
    family: str | None,
    num_devices: int | None,
) -> Run:
    """Return the conversion with its recipe and a report of unused arguments."""
    check_stage(stage, registry, suite.rollout_stages)
    if family is not None and family not in registry.models:
        raise UserError(registry.unknown("model", family))
    model = str(flat.get(suite.model_key) or "")
    if not model:
        raise UserError(f"{name}: has no {suite.model_key}")
    spec = (
        registry.models[family]
        if family is not None
        else family_of(model, registry, suite.model_key, suite.reads_codes)
    )
    run = Run(suite, Arguments(dict(flat)), name, registry, stage, spec, num_devices)
    report = run.result
    report.recipe = suite.recipe(run)
    if stage != "pretrain":  # whose texts are one column
        report.recipe["data"]["ignore_columns"] = [ALL]  # every suite leaves out the columns that it does not read
    for key, value in run.left.items():
        why = why_refused(suite.refused, key, value)
        ignored = find(suite.ignored, key)
        if why is None and ignored is not None:
            report.left_out.append((key, value, ignored))
        elif why is None and not is_on(value):
            report.left_out.append((key, value, "is off"))
        elif why is None and find(suite.refused, key) is not None:
            report.left_out.append((key, value, "has its default value"))
        else:
            report.refused.append((key, value, why or run.unknown(key)))
    return run


def _finished(run: Run, leave_out: Sequence[str]) -> ConvertedRecipe:
    """Return the report, completed by the arguments that the recipe uses."""
    suite = run.suite
    report = run.result
    used = {key: value for key, value in run.arguments.values.items() if key not in run.left}
    reported = {key for key, _, _ in (*report.left_out, *report.refused)}
    leaves = _leaves(report.recipe)
    for key, value in used.items():
        if key in reported or value is None:
            continue
        if any(ours.rpartition(".")[2] == key and leaf == value for ours, leaf in leaves.items()):
            report.same.append((key, value))
        else:
            report.translated.append((key, value, find(suite.translations, key) or "see the notes"))
    dropped = honoured_leave_out(report, leave_out)
    if dropped:
        report.recipe["source"] += f", without {', '.join(dropped)}"
    return report


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
