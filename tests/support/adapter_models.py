"""Models with adapters, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.parameters import is_factor
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters
from llmsuite.checkpoint.adapter_writer import write_adapters
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from llmsuite.models.initial_values import initial_values
from llmsuite.models.shard_plan import UNSHARDED
from tests.support.families import FAMILIES, tiny

RANK = 3
ALPHA = 5.0
IDS = np.array([[1, 7, 11, 3, 2], [4, 4, 9, 0, 5]])


def section(**keys: Any) -> LoraSection:
    return LoraSection(**{"rank": RANK, "alpha": ALPHA, **keys})


def base_of(family: str, directory: Path, **shape: Any) -> None:
    """A model of the smoke shape, changed by `shape`, on disk, with parameters that tell tokens apart."""
    spec = FAMILIES[family]
    config = spec.config_cls(**{**spec.smoke, **shape})
    shapes = {name: list(p.shape) for name, p in tiny(family, **shape).named_parameters()}
    values = {name: initial_values(0, name, s, 0.15) + (len(s) == 1) for name, s in shapes.items()}
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    directory.mkdir()
    write_model(directory, spec, config, values.__getitem__, specs)


def adapted(family: str, directory: Path, lora: LoraSection) -> tuple[Any, list[str]]:
    """The live model of a directory with random adapters, and the modules that have one."""
    model = load_model(open_model(directory, FAMILIES), CpuBackend())
    modules = adapted_modules(model, FAMILIES[family].shard_plan or UNSHARDED, lora.target_modules)
    add_adapters(model, modules, lora.adapter_config)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(initial_values(1, name, parameter.shape, 0.2))
    model.eval()
    return model, modules


def factors_of(model: Any) -> dict[str, np.ndarray]:
    return {name: parameter.numpy() for name, parameter in model.named_parameters() if is_factor(name)}


def write(directory: Path, model: Any, modules: list[str], lora: LoraSection, base: Path, **options: Any) -> Adapters:
    opened = open_model(base, FAMILIES)
    values = factors_of(model)
    metadata = Adapters(modules, lora.adapter_config, Base(str(base), opened.digest(), lora.base_format))
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    directory.mkdir()
    write_adapters(directory, metadata, opened.family, opened.config, values.__getitem__, specs, **options)
    return metadata
