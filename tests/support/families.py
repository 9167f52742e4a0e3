"""The built-in families and their reference cases, for tests that hold for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.builtin import llmsuite_register_models
from tests.support.paths import REFERENCE

FAMILIES = {family.name: family for family in llmsuite_register_models()}
CASES = sorted(
    f"{family}/{path.name}" for family in FAMILIES for path in (REFERENCE / family).iterdir() if path.is_dir()
)
"""`family/case` of every model transformers has made logits with."""
LINEAR = [name for name, family in FAMILIES.items() if family.config_cls(**family.smoke).shape_spec().has_states]
"""Families with linear attention."""
PRESETS = [(family.name, preset) for family in FAMILIES.values() for preset in family.presets]


def read_config(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    config: dict[str, Any] = json.loads((REFERENCE / case / "config.json").read_text(encoding="utf-8"))
    return config


def config_of(case: str) -> Any:
    """The shape of a case."""
    return FAMILIES[case.split("/")[0]].config_cls.from_hf(read_config(case))


def reference(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Input ids [B, L] and logits [B, L, V]."""
    with np.load(REFERENCE / case / "reference.npz") as stored:
        return stored["input_ids"], stored["logits"]


def reference_gradient(case: str) -> np.ndarray | None:
    """Gradient of the embedding [V, D] with the loss of the next tokens; None where transformers made none."""
    with np.load(REFERENCE / case / "reference.npz") as stored:
        return stored.get("embedding_gradient")


def load(directory: Path) -> Any:
    """The live model of a directory, in evaluation mode. Imports Paddle."""
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.inference.load import load_model

    return load_model(open_model(directory, FAMILIES), CpuBackend())


def tiny(family: str, **shape: Any) -> Any:
    """The smoke shape of a family, or a variation of it, on the meta level: shapes without values. Imports Paddle."""
    import paddle

    from llmsuite.devices.ops import Ops

    spec = FAMILIES[family]
    with paddle.LazyGuard():
        return spec.factory()(spec.config_cls(**{**spec.smoke, **shape}), Ops())
