"""Fetches what a recipe names on a hub, before ranks start, and writes the commits into the recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmsuite.data.remote import pin_data
from llmsuite.errors import RecipeError, UserError
from llmsuite.files import read_json_file
from llmsuite.hub.fetch import fetch_named
from llmsuite.hub.listing import Report, Want
from llmsuite.hub.names import hub_name
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.pins import hub_names, value_of
from llmsuite.recipe.resolve import RunPlan, resolve
from llmsuite.recipe.shape import base_named


def fetch_names(
    plan: RunPlan, registry: Registry, report: Report, resume: bool = False, loads_model: bool = True
) -> RunPlan:
    """The plan with everything that it names on a hub on this machine, and with commits in place of branches.

    The model's config comes first: whether the recipe fits it is known before the weights are fetched.

    Args:
        plan: of the run.
        registry: the known stages, families and devices.
        report: receives a line for each download.
        resume: take the commits that the run was started with.
        loads_model: whether the weights are needed, or the tokenizer only.

    Raises:
        RecipeError: something cannot be fetched, or the model is not the one that the recipe describes.
    """
    named = list(hub_names(plan.recipe))
    if not named:
        return plan
    if resume:
        _take_recorded(plan)
    for _, key, want, _ in named:
        if want is Want.MODEL:
            _fetch(plan, key, Want.CONFIG if loads_model else Want.TOKENIZER, report)
    plan = dataclasses.replace(resolve(plan.loaded, registry), smoke_of=plan.smoke_of)
    for _, key, want, _ in named:
        if want is Want.ROWS:
            _pin_rows(plan, key, report)
        elif want is Want.TOKENIZER or loads_model:
            _fetch(plan, key, want, report)
    if loads_model and not plan.stage.trains and plan.weights is not None:
        base = base_named(resolve(plan.loaded, registry).weights or plan.weights)
        if base is not None:
            try:
                fetch_named(base, Want.MODEL, report)
            except UserError as error:
                message = f"the model of its adapters, {base}, cannot be fetched: {error}"
                raise RecipeError([plan.loaded.problem("model.weights", message)]) from error
    return dataclasses.replace(resolve(plan.loaded, registry), smoke_of=plan.smoke_of)


def _fetch(plan: RunPlan, dotted: str, want: Want, report: Report) -> None:
    section = plan.recipe.__dict__[dotted.partition(".")[0]]
    given = value_of(section, dotted)
    try:
        found = fetch_named(given, want, report)
    except UserError as error:
        raise _problem(plan, dotted, given, error) from error
    if found is not None:
        section.__dict__[dotted.partition(".")[2]] = str(found.name)


def _pin_rows(plan: RunPlan, dotted: str, report: Report) -> None:
    section = plan.recipe.__dict__[dotted.partition(".")[0]]
    given = value_of(section, dotted)
    try:
        section.__dict__[dotted.partition(".")[2]] = pin_data(given, report)
    except UserError as error:
        raise _problem(plan, dotted, given, error) from error


def _problem(plan: RunPlan, dotted: str, given: str, error: UserError) -> RecipeError:
    name = hub_name(given)
    unlike = "" if name is None or name.hub else f"{given} is not here (working directory: {Path.cwd()}), and "
    return RecipeError([plan.loaded.problem(dotted, f"{unlike}{error}")])


def _take_recorded(plan: RunPlan) -> None:
    """Take the commits from the recipe that the run has recorded, where the names are the same."""
    path = plan.output_dir / "recipe.json"
    recorded = read_json_file(path) if path.is_file() else {}
    for section, key, _, _ in list(hub_names(plan.recipe)):
        section_name, _, field = key.partition(".")
        found = recorded.get(section_name, {}).get(field)
        then, now = (hub_name(value) if isinstance(value, str) else None for value in (found, value_of(section, key)))
        if then is None or now is None or now.is_pinned:
            continue
        if then.is_pinned and then.at(then.hub, None) == now.at(now.hub or then.hub, None):
            section.__dict__[field] = found
