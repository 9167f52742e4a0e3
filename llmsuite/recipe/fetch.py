"""Fetches what a recipe names on a hub, before ranks start, and writes the commits into the recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmsuite.data.remote import pin_data
from llmsuite.errors import RecipeError, UserError
from llmsuite.files import read_json_object
from llmsuite.hub.fetch import fetch_named
from llmsuite.hub.listing import Report, Want
from llmsuite.hub.names import hub_name
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.pins import Named, hub_names, rename
from llmsuite.recipe.resolve import RunPlan, resolve
from llmsuite.recipe.shape import base_named
from llmsuite.regular import is_file


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
    names = hub_names(plan.recipe)
    if not names:
        return plan
    if resume:
        _take_recorded(plan, names)
    for named in names:
        if named.want is Want.MODEL:
            _fetch(plan, named, Want.CONFIG if loads_model else Want.TOKENIZER, report)
    plan = dataclasses.replace(resolve(plan.loaded, registry), smoke_of=plan.smoke_of)
    for named in names:
        if named.want is Want.ROWS:
            _pin_rows(plan, named, report)
        elif named.want is Want.TOKENIZER or loads_model:
            _fetch(plan, named, named.want, report)
    if loads_model and not plan.stage.trains and plan.weights is not None:
        base = base_named(resolve(plan.loaded, registry).weights or plan.weights)
        if base is not None:
            try:
                fetch_named(base, Want.MODEL, report)
            except UserError as error:
                message = f"the model of its adapters, {base}, cannot be fetched: {error}"
                raise RecipeError([plan.loaded.problem("model.weights", message)]) from error
    return dataclasses.replace(resolve(plan.loaded, registry), smoke_of=plan.smoke_of)


def _fetch(plan: RunPlan, named: Named, want: Want, report: Report) -> None:
    try:
        found = fetch_named(named.name, want, report)
    except UserError as error:
        raise _problem(plan, named, error) from error
    if found is not None:
        rename(plan.loaded, named, str(found.name))


def _pin_rows(plan: RunPlan, named: Named, report: Report) -> None:
    try:
        found = pin_data(named.name, report)
    except UserError as error:
        raise _problem(plan, named, error) from error
    rename(plan.loaded, named, found)


def _problem(plan: RunPlan, named: Named, error: UserError) -> RecipeError:
    name = hub_name(named.name)
    unlike = "" if name is None or name.hub else f"{named.name} is not here (working directory: {Path.cwd()}), and "
    return RecipeError([plan.loaded.problem(named.key, f"{unlike}{error}")])


def _take_recorded(plan: RunPlan, names: list[Named]) -> None:
    """Take the commits from the recipe that the run has recorded, where the names are the same."""
    path = plan.output_dir / "recipe.json"
    recorded = read_json_object(path) if is_file(path) else {}
    for named in names:
        section_name, _, field = named.key.partition(".")
        found = named.recorded(recorded.get(section_name, {}).get(field))
        then, now = (hub_name(value) if value is not None else None for value in (found, named.name))
        if found is None or then is None or now is None or now.is_pinned:
            continue
        if then.is_pinned and then.at(then.hub, None) == now.at(now.hub or then.hub, None):
            rename(plan.loaded, named, found)
