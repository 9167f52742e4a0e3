"""From the file of another suite to a recipe and a report: the same, translated, without counterpart, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.conversion.arguments import Arguments
from llmsuite.recipe.conversion.conversion import check_stage
from llmsuite.recipe.conversion.family import family_of
from llmsuite.recipe.conversion.kinds import is_on
from llmsuite.recipe.conversion.refuse import Reason, find, joined, left_without, refusal, why_refused
from llmsuite.recipe.document import JSONC, YAML
from llmsuite.recipe.source import parse_json, read_text
from llmsuite.recipe.suites.suite import Report, Run, Suite


def read_values(path: Path, suite: Suite | None = None) -> dict[str, Any]:
    """The keys and values of a file in YAML, as programs read it that read YAML 1.1, JSON, or a shell script of a suite
    that has such.

    Raises:
        UserError: it cannot be read, or is no object; with line and column.
    """
    text, suffix = read_text(path), path.suffix.lower()
    if suffix == ".sh":
        if suite is None or suite.read_shell is None:
            raise UserError(f"{path}: is a shell script; give the YAML or JSON file of arguments")
        return suite.read_shell(path)
    if suffix in YAML:
        from llmsuite.recipe.yaml_source import parse_yaml

        found = parse_yaml(text, str(path), yaml_1_1=True).value
    else:
        found = parse_json(text, str(path), comments=suffix in JSONC).value
    if not isinstance(found, dict):
        raise UserError(f"{path}:1:1: has no keys; give a YAML or JSON file of arguments")
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
) -> Report:
    """A recipe of the same run.

    Args:
        suite: whose file it is.
        values: what is in it.
        name: of the file, for the recipe's `source`.
        registry: what stages and families there are.
        stage: of the recipe, where the file does not tell.
        family: of the model, where its name does not tell.
        num_devices: of all machines, where the file does not tell.
        leave_out: arguments that the recipe may do without, although it is another job then.

    Raises:
        UserError: no recipe can be the same job, stage or family cannot be told, or an argument is not of its type.
    """
    flat = suite.flatten(dict(values))
    job, at_once = f"this job of {suite.name}", list[Reason]()
    try:
        stage = suite.stage(flat, name, stage)
        # what says more than that the family cannot be told
        at_once += [
            (key, value, why)
            for key, value in flat.items()
            if (why := why_refused(suite.refused, key, value)) is not None
        ]
        run = _read(suite, flat, name, registry, stage, family, num_devices)
    except UserError as stop:
        raise refusal(at_once, flat, name, leave_out, job, stop) or stop from None
    run.report.refused = joined(at_once, run.report.refused)
    if (error := refusal(run.report.refused, flat, name, leave_out, job)) is not None:
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
    """The run with its recipe, and what is left over told."""
    check_stage(stage, registry)
    if family is not None and family not in registry.models:
        raise UserError(registry.unknown("model", family))
    model = str(flat.get(suite.model_key) or "")
    if not model:
        raise UserError(f"{name}: has no {suite.model_key}")
    spec = registry.models[family] if family is not None else family_of(model, registry, suite.model_key)
    run = Run(suite, Arguments(dict(flat)), name, registry, stage, spec, num_devices)
    report = run.report
    report.recipe = suite.recipe(run)
    for key, value in run.left.items():
        why = why_refused(suite.refused, key, value)
        if why is None and (known := find(suite.without, key)) is not None:
            report.left_out.append((key, value, known))
        elif why is None and not is_on(value):
            report.left_out.append((key, value, "it says no"))
        elif why is None and find(suite.refused, key) is not None:
            report.left_out.append((key, value, "with this value it says what is so anyway"))
        else:
            report.refused.append((key, value, why or run.unknown(key)))
    return run


def _finished(run: Run, leave_out: Sequence[str]) -> Report:
    """The report, with what became of each argument that the recipe follows."""
    suite, report = run.suite, run.report
    used = {key: value for key, value in run.arguments.values.items() if key not in run.left}
    told = {key for key, _, _ in (*report.left_out, *report.refused)}
    leaves = _leaves(report.recipe)
    for key, value in used.items():
        if key in told or value is None:
            continue
        if any(ours.rpartition(".")[2] == key and leaf == value for ours, leaf in leaves.items()):
            report.same.append((key, value))
        else:
            report.translated.append((key, value, find(suite.becomes, key) or "see the notes"))
    if without := left_without(report, leave_out):
        report.recipe["source"] += f", without {', '.join(without)}"
    return report


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
