"""Checkpoints of GPTQ."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.tensor_writer import write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from tests.support import tiny_llama
from tests.support.tiny_llama import FAMILY

CONFIG = dataclasses.replace(tiny_llama.CONFIG, hidden_size=64, intermediate_size=96, head_dim=16)


def of_bytes(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m * 32 / bits] that lie in numbers [n, m] with the first one in the lowest bits."""
    found = np.ascontiguousarray(words).view("uint8")
    return found if bits == 8 else np.stack([found & 15, found >> 4], 2).reshape(len(found), -1)


def publish(
    directory: Path, bits: int = 4, g_idx: bool = True, lacking: str = "", **config: Any
) -> dict[str, np.ndarray]:
    """Write a model with random codes; returns the values of its matrices by our names."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    files = dict[str, np.ndarray]()
    expected = dict[str, np.ndarray]()
    parameters = tiny_llama.values(CONFIG)
    specs = [TensorSpec(name, value.shape, "float32") for name, value in parameters.items()]
    arrangement = TensorLayout(FAMILY, CONFIG, specs)
    for name in arrangement.names:
        if not name.endswith("proj.weight"):
            files[name] = arrangement.read(name, lambda ours, _: parameters[ours])
            continue
        (num_outputs, num_inputs), layer = arrangement.spec(name).shape, name.removesuffix(".weight")
        size = config["group_size"] if config["group_size"] > 0 else num_inputs
        groups = np.arange(num_inputs) // size
        groups = rng.permutation(groups) if config.get("desc_act") else groups
        count = groups.max() + 1
        words = rng.integers(0, 2**32, (num_outputs, num_inputs * bits // 32), dtype="uint32").view("int32")
        zeros = rng.integers(0, 2**32, (count, num_outputs * bits // 32), dtype="uint32").view("int32")
        scales = rng.standard_normal((count, num_outputs)).astype("float16")
        parts = {"qweight": words.T, "qzeros": zeros, "scales": scales}
        if g_idx:
            parts["g_idx"] = groups.astype("int32")
        files |= {f"{layer}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
        zero = of_bytes(zeros, bits).astype(int) + (config.get("checkpoint_format") != "gptq_v2")
        codes = of_bytes(words, bits).astype(int).T
        expected[name] = (codes - zero[groups] % 2**bits) * scales[groups].astype("float32")
    files.pop(lacking, None)
    stored = [TensorSpec(name, value.shape, value.dtype.name) for name, value in files.items()]
    write_tensors(directory, "model", stored, files.__getitem__, {"format": "pt"})
    hf_config = {**CONFIG.to_hf(), "quantization_config": {"quant_method": "gptq", "bits": bits, **config}}
    (directory / "config.json").write_text(json.dumps(hf_config))
    return expected
