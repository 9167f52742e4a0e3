"""What a recipe asks of the stage, the family and the device that it names, which a plugin may have brought."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import RecipeError
from llmsuite.plugins.manager import BUILTIN, Registry
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.schema.recipe import Recipe
from llmsuite.schema.rule import Violation
from llmsuite.specs import ModelFamily


def format_problems(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    """A format of other rows than those of the stage. One that says no `row_kind` asks for it when it reads rows."""
    stage, name = registry.stages[recipe.stage], recipe.data.format
    fitting = [f.name for f in registry.data_formats.values() if f.kind == stage.row_kind]
    if name != "auto" and name not in registry.data_formats:
        yield "data.format", registry.unknown("data format", name)
    elif stage.row_kind and not fitting:
        kinds = ", ".join(sorted({f.kind for f in registry.data_formats.values()}))
        yield (
            "stage",
            f"{stage.name} trains on {stage.row_kind} rows, which no data format gives; there are formats of: {kinds}",
        )
    elif stage.row_kind and name != "auto" and name not in fitting:
        gives = registry.data_formats[name].kind
        message = f"{name} gives {gives} rows, and stage {stage.name} trains on {stage.row_kind} rows"
        yield "data.format", f"{message}; choose auto or one of: {', '.join(fitting)}"


def names_problems(family: ModelFamily, registry: Registry) -> Iterator[Violation]:
    """What tells the names of parameters has all that it is asked for. Those of built-in families are not imported to
    look."""
    if registry.owner("model", family.name).distribution == BUILTIN:
        return
    names = family.names()
    asked = ("parameter_names", "is_linear", "hf_tensors", "from_hf", "paddlenlp_prefix")
    if missing := [name for name in asked if not callable(getattr(names, name, None))]:
        yield (
            "model.family",
            f"`names` of {family.name!r} returned {names!r}, which has no function {', '.join(missing)}",
        )


def backend_of(loaded: LoadedRecipe, registry: Registry) -> DeviceBackend | None:
    """What drives the device; None for an unknown one. Raises RecipeError for what drives none."""
    device = registry.devices.get(loaded.recipe.device)
    backend = None if device is None else device.factory()
    if device is None or isinstance(backend, DeviceBackend):
        return backend
    base = f"{DeviceBackend.__module__}.{DeviceBackend.__name__}"
    message = f"the factory of {device.name!r} returned {backend!r}; it has to return an object derived from {base}"
    raise RecipeError([loaded.problem("device", message)])
