"""What a user should know about a recipe that is valid: rows that only show that it runs, and what is fetched first."""

from __future__ import annotations

from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.pins import hub_names
from llmsuite.recipe.resolve import RunPlan
from llmsuite.resources import bundled


def few_rows(plan: RunPlan) -> list[str]:
    """A note where a model is to be trained on a real device with the small files that come with llmsuite."""
    path = plan.train_file.resolve()
    if not plan.stage.trains or plan.device.name == "cpu" or not path.is_relative_to(bundled("data").resolve()):
        return []
    if not path.is_file():
        return []
    given, size = plan.recipe.__dict__["data"].__dict__["train"], path.stat().st_size / 1e3
    return [f"data.train: {given} is a sample of {size:.0f} kB; name your own data, or hf:ORG/NAME, before a real run"]


def not_fetched(plan: RunPlan) -> list[str]:
    """A note for everything that `llmsuite run` would fetch first."""
    notes = []
    for named in hub_names(plan.recipe):
        name = hub_name(named.name)
        if named.want is not Want.ROWS and name is not None and cached(name, named.want, named.kind) is None:
            notes.append(f"{named.key}: {name} is not on this machine; `llmsuite run` fetches it first")
    return notes
