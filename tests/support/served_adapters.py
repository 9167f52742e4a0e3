"""Adapters that a server has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.adapters import MultiLoRADecoder, read_adapters
from llmsuite.inference.load import load_model
from llmsuite.models.families.llama import LlamaConfig
from tests.support import tiny_llama
from tests.support.tiny_llama import FAMILIES

CONFIG = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512)
TARGETS = {"a": ("q_proj", "v_proj", "down_proj"), "b": ("q_proj", "gate_proj", "o_proj"), "c": ("lm_head",)}


def write_adapter(
    directory: Path, name: str, changes: Any = (), extra: Any = (), config: LlamaConfig = CONFIG, seed: int = 0
) -> Path:
    """Write an adapter in the format of HF PEFT."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(len(name) + ord(name[0]) + seed)
    tensors = {}
    for target, value in tiny_llama.values(config).items():
        if target.split(".")[-2] in TARGETS[name]:
            module = f"base_model.model.{target.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = random.normal(size=[3, value.shape[0]]).astype("float32")
            tensors[f"{module}.lora_B.weight"] = random.normal(size=[value.shape[1], 3]).astype("float32")
    safetensors.numpy.save_file({**tensors, **dict(extra)}, directory / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": list(TARGETS[name]),
        **dict(changes),
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config), encoding="utf-8")
    return directory


def write_base_and_adapters(directory: Path) -> Path:
    tiny_llama.write(directory / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    for name in TARGETS:
        write_adapter(directory / name, name)
    return directory


def base_of(place: Path) -> ModelDirectory:
    return open_model(place / "base", FAMILIES)


def adapted(place: Path) -> MultiLoRADecoder:
    base = base_of(place)
    return MultiLoRADecoder(load_model(base, CpuBackend()), read_adapters({n: place / n for n in TARGETS}, base))
