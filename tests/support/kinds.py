"""Kinds of adapters, and what tests of several of them ask of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.checkpoint.adapter_dir import Adapters, SavedAdapters
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from tests.support.adapter_models import IDS, adapted, base_of, factors_of, write
from tests.support.families import FAMILIES

METHODS = ("mixer", "dora", "pissa", "olora", "lora_ga", "mora", "vera", "lokr")
BEGINNINGS = ("pissa", "olora", "lora_ga")
"""Kinds that are values of `lora.init`."""
STRUCTURED = ("mora", "lokr")
"""Kinds that are not pairs of factors."""


def keys_of(method: str) -> dict[str, str]:
    """The keys of section `lora` of a kind of adapters."""
    if method == "lora":
        return {}
    return {"init": method} if method in BEGINNINGS else {"method": method}


def written(directory: Path, family: str, lora: LoraSection) -> tuple[Any, Adapters]:
    """A model with random adapters, and their metadata; `base` and `adapter` are in the directory afterwards."""
    base_of(family, directory / "base")
    model, modules = adapted(family, directory / "base", lora)
    return model, write(directory / "adapter", model, modules, lora, directory / "base")


def check_merged(directory: Path, model: Any, limit: float) -> None:
    """The adapters in `written`, merged into the base, have the logits of the live model, up to `limit` of the
    largest."""
    base = open_model(directory / "base", FAMILIES)
    source = add_adapter(base, directory / "adapter")
    merged = load_model(source, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    live = model(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(merged, live, rtol=0, atol=limit * np.abs(live).max())
    assert np.abs(live - load_model(base, CpuBackend())(paddle.to_tensor(IDS)).numpy()).max() > 0.1
    for name in source.names:  # of a slice of its rows, too
        whole = source.read(name)
        half = source.spec(name).shape[0] // 2
        index = [slice(half, None), *[slice(None)] * (whole.ndim - 1)]
        np.testing.assert_allclose(source.read(name, index), whole[half:], rtol=1e-6, atol=1e-7)


def check_read_again(directory: Path, family: str, model: Any, metadata: Adapters) -> None:
    """Training goes on from what is `written`, to the bit."""
    saved = SavedAdapters(directory / "adapter", metadata, FAMILIES[family], model.config)
    for name, value in factors_of(model).items():
        assert saved.spec(name).shape == value.shape
        assert saved.read(name).tobytes() == value.tobytes(), name
        index = [slice(n // 3, n) for n in value.shape]
        np.testing.assert_array_equal(saved.read(name, index), value[tuple(index)])
