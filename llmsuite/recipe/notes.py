"""What a user should know about a recipe that is valid: rows that only show that it runs, and what is fetched first."""

from __future__ import annotations

from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.pins import hub_names, value_of
from llmsuite.recipe.resolve import RunPlan
from llmsuite.resources import bundled


def few_rows(plan: RunPlan) -> list[str]:
    """A note where a model is to be trained on a real device with the small files that come with llmsuite."""
    path = plan.train_file.resolve()
    if not plan.stage.trains or plan.device.name == "cpu" or not path.is_relative_to(bundled("data").resolve()):
        return []
    if not path.is_file():
        return []
    given, size = value_of(plan.recipe.__dict__["data"], "data.train"), path.stat().st_size / 1e3
    return [f"data.train: {given} is a sample of {size:.0f} kB; name your own data, or hf:ORG/NAME, before a real run"]


def not_fetched(plan: RunPlan) -> list[str]:
    """A note for everything that `llmsuite run` would fetch first."""
    notes = []
    for section, key, want, kind in hub_names(plan.recipe):
        name = hub_name(value_of(section, key))
        if want is not Want.ROWS and name is not None and cached(name, want, kind) is None:
            notes.append(f"{key}: {name} is not on this machine; `llmsuite run` fetches it first")
    return notes
