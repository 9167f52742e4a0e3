"""The teacher of a run: a frozen model, whose distributions the loss of a stage compares with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from llmsuite.base.files import check_intact
from llmsuite.base.progress import report
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.specs import ModelFamily
from llmsuite.data.tokenizer import TextTokenizer, check_same_tokens
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.weights import random_values
from llmsuite.inference.frozen import build_frozen, filled, unfilled
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.vocabulary import pad_values
from llmsuite.recipe.teacher import TeacherPlan


def load_teacher(
    plan: TeacherPlan, families: Mapping[str, ModelFamily], device: DeviceBackend, tokenizer: TextTokenizer
) -> Any:
    """Load the teacher, a `llmsuite.models.blocks.CausalLM`: this rank's part of it under tensor parallel.

    Args:
        plan: of the teacher.
        families: known model families.
        device: backend of the run.
        tokenizer: of the trained model.

    Raises:
        UserError: its files cannot be read, or it has other tokens than the model.
    """
    mesh = _tensor_mesh()
    if not device.has_values:  # no file is opened
        built = unfilled(plan.family, plan.config, device, plan.precision, mesh)
        teacher = filled(built, plan.family, device, plan.precision, mesh, read=None)
    elif plan.weights is None:
        report(f"{plan.key}: random values, from seed {plan.seed}")
        built = unfilled(plan.family, plan.config, device, plan.precision, mesh)
        alone = built if mesh.degrees.tp == 1 else unfilled(plan.family, plan.config, device, plan.precision)
        read = random_values([alone], plan.seed, plan.config.initializer_range)
        shapes = {name: tuple(parameter.shape) for name, parameter in alone.named_parameters()}
        teacher = filled(built, plan.family, device, plan.precision, mesh, pad_values(read, shapes))
    else:
        check_intact(plan.weights)
        source = open_model(plan.weights, families)
        check_same_tokens(plan.key, plan.weights, tokenizer)
        report(f"{plan.key}: loading {plan.weights} ({source.description})")
        teacher = build_frozen(source, device, plan.precision, mesh)
    for parameter in teacher.parameters():
        parameter.stop_gradient = True
    return teacher


def _tensor_mesh() -> Mesh:
    """The mesh of the run with only its axis tp: a teacher has no pipeline, and all of its experts on each rank."""
    mesh = collective.mesh()
    if mesh.degrees.tp == 1:
        return Mesh(Degrees(1, 1, 1, 1), 0)
    return Mesh(dataclasses.replace(mesh.degrees, ep=1), mesh.rank, groups=mesh.groups)


def teacher_digest(plan: TeacherPlan | None, families: Mapping[str, ModelFamily]) -> str:
    """Return a digest of the values of a teacher, for the identity of a run; empty without one. Reads all files."""
    if plan is None:
        return ""
    text = json.dumps([plan.precision, plan.config.to_hf(), plan.seed if plan.weights is None else None])
    digest = hashlib.sha256(text.encode())
    if plan.weights is not None:
        digest.update(open_model(plan.weights, families).digest().encode())
    return digest.hexdigest()
