"""Reference models of HF transformers."""

from __future__ import annotations

from pathlib import Path

from llmsuite.builtin import llmsuite_register_models
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.ops import Ops
from llmsuite.models.dense import DenseLM
from tests.support.fill import fill_parameters

FAMILIES = {family.name: family for family in llmsuite_register_models()}


def load(directory: Path) -> DenseLM:
    source = open_model(directory, FAMILIES)
    model = DenseLM(source.config, Ops())
    fill_parameters(model, source)
    model.eval()
    return model
