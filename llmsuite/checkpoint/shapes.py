"""Compares the tensors of a model directory with the shapes that its config.json gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import Load, ModelDirectory

Shapes = Mapping[str, tuple[int, ...]]


def check_shapes(model: ModelDirectory, shapes: Shapes) -> None:
    """Raise UserError that names every tensor whose shape is not the one by its config.json."""
    wrong = [*model.stack_mismatches(), *shape_mismatches(model, shapes).values()]
    if wrong:
        raise UserError(f"{model.path}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}")


def shape_mismatches(model: ModelDirectory, shapes: Shapes) -> dict[str, str]:
    """Return a message for each parameter whose stored shape differs."""
    found = {name: model.spec(name).shape for name in shapes if name in model.tensors}
    return {
        name: f"{name} is {list(shape)}, config.json makes it {list(shapes[name])}"
        for name, shape in found.items()
        if shape != tuple(shapes[name])
    }


def skipped_tensors(model: ModelDirectory, shapes: Shapes, load: Load, report: Callable[[str], None]) -> set[str]:
    """Return the parameters that a model directory lacks or has in another shape. Reports them and unexpected tensors.

    Raises:
        UserError: a shape differs, and `load` is not "any".
    """
    if load != "any":
        check_shapes(model, shapes)
    if model.unexpected:
        report(f"{model.path}: left out, as the model has no such tensors: {', '.join(model.unexpected)}")
    wrong = shape_mismatches(model, shapes)
    missing = [name for name in shapes if name not in model.tensors]
    if wrong:
        report(f"{model.path}: initialised from the seed, as the shape differs: {'; '.join(wrong.values())}")
    if missing:
        report(f"{model.path}: initialised from the seed, as they are missing: {', '.join(missing)}")
    return {*wrong, *missing}
