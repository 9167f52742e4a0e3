"""Downloads of models and data that a recipe names on a hub, before ranks start; the recipe is pinned to commits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.files import read_json_object_if_there
from llmsuite.base.hub.fetch import fetch_named
from llmsuite.base.hub.listing import Report, Want
from llmsuite.base.hub.names import hub_name
from llmsuite.contract.registry import Registry
from llmsuite.data.remote import pin_data
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.pins import HubReference, hub_names, rename
from llmsuite.recipe.resolve import RunPlan, resolve
from llmsuite.recipe.shape import base_named


def fetch_names(
    loaded: LoadedRecipe, registry: Registry, report: Report, resume: bool = False, loads_model: bool = True
) -> RunPlan:
    """Download everything that a recipe names on a hub, and return its plan with commits instead of branches.

    The config of the model is downloaded first, so that the recipe is checked against it before the weights are.

    Args:
        loaded: recipe of the run, with valid rules; it gets the commits.
        registry: registered stages, families and devices.
        report: called with a line of text for each download.
        resume: use the commits that the interrupted run has recorded.
        loads_model: True to download the weights, False for the tokenizer only.

    Raises:
        RecipeError: a download failed, or the model does not fit the recipe.
    """
    names = hub_names(loaded.recipe)
    if resume:
        pin_recorded(loaded, names)
    for named in names:
        if named.want is Want.MODEL:
            first = Want.CONFIG if loads_model else Want.TOKENIZER
            _fetch(loaded, named, first, report)
    plan = resolve(loaded, registry)
    if not names:
        return plan
    for named in names:
        if named.want is Want.ROWS:
            _pin_rows(loaded, named, report)
        elif named.want is Want.TOKENIZER or loads_model:
            _fetch(loaded, named, named.want, report)
    if loads_model and not plan.train.stage.trains and plan.model.weights is not None:
        base = base_named(resolve(loaded, registry).model.weights or plan.model.weights)
        if base is not None:
            try:
                fetch_named(base, Want.MODEL, report)
            except UserError as error:
                message = f"the model of its adapters, {base}, cannot be fetched: {error}"
                raise RecipeError([loaded.problem("model.weights", message)]) from error
    return resolve(loaded, registry)


def _fetch(loaded: LoadedRecipe, named: HubReference, want: Want, report: Report) -> None:
    try:
        found = fetch_named(named.name, want, report)
    except UserError as error:
        raise _problem(loaded, named, error) from error
    if found is not None:
        rename(loaded, named, str(found.name))


def _pin_rows(loaded: LoadedRecipe, named: HubReference, report: Report) -> None:
    try:
        found = pin_data(named.name, report)
    except UserError as error:
        raise _problem(loaded, named, error) from error
    rename(loaded, named, found)


def _problem(loaded: LoadedRecipe, named: HubReference, error: UserError) -> RecipeError:
    name = hub_name(named.name)
    not_local = ""
    if name is not None and not name.hub:
        not_local = f"{named.name} is not a local path (working directory: {Path.cwd()}), and "
    return RecipeError([loaded.problem(named.key, f"{not_local}{error}")])


def pin_recorded(loaded: LoadedRecipe, names: Sequence[HubReference]) -> None:
    """Pin names of `hub_names` to the commits that the run in output_dir has recorded, where the names are the same.
    Downloads nothing."""
    recorded = read_json_object_if_there(Path(loaded.recipe.output_dir) / "recipe.json")
    for named in names:
        section_name = named.key.partition(".")[0]
        found = named.recorded(recorded.get(section_name, {}).get(named.field))
        if found is None:
            continue
        then = hub_name(found)
        now = hub_name(named.name)
        if then is None or now is None or now.is_pinned:
            continue
        if then.is_pinned and then.at(then.hub, None) == now.at(now.hub or then.hub, None):
            rename(loaded, named, found)
