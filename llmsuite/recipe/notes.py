"""What a user should know about a recipe that is valid: rows that only show that it runs, and what is fetched first."""

from __future__ import annotations

from pathlib import Path

from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.pins import hub_names, value_of
from llmsuite.recipe.resolve import RunPlan
from llmsuite.resources import bundled

_FULL_SIZE = 250e6
"""Parameters from which on the rows that come with llmsuite are too few to learn from."""


def few_rows(plan: RunPlan) -> list[str]:
    """A note if a model of full size is to learn from the few rows that come with llmsuite."""
    if not plan.stage.trains or not _is_below(plan.train_file, bundled("data")):
        return []
    config = plan.model_config
    # 12 D^2 parameters a layer: Narayanan et al. 2021, arXiv 2104.04473, section 5.1; a plugin may count otherwise
    count = 12 * getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0) ** 2
    if count < _FULL_SIZE:
        return []
    size = f"{count / 1e9:,.1f} billion parameters or so"
    return [
        f"data.train: {value_of(plan.recipe.__dict__['data'], 'data.train')} is a small file that comes with llmsuite "
        f"and shows that the recipe runs; to train {size}, name data of yours or of a hub: hf:ORG/NAME?split=train"
    ]


def not_fetched(plan: RunPlan) -> list[str]:
    """A note for everything that `llmsuite run` would fetch first."""
    notes = []
    for section, key, want, kind in hub_names(plan.recipe):
        name = hub_name(value_of(section, key))
        if want is not Want.ROWS and name is not None and cached(name, want, kind) is None:
            notes.append(f"{key}: {name} is not on this machine; `llmsuite run` fetches it first")
    return notes


def _is_below(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())
