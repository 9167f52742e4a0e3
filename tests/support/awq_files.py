"""Checkpoints of AWQ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.tensor_writer import write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from tests.support import tiny_llama
from tests.support.gptq_files import CONFIG
from tests.support.tiny_llama import FAMILY

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""`AWQ_ORDER` of AutoAWQ."""


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes [n, m] as numbers [n, m / 8], as `WQLinear_GEMM.from_linear` of AutoAWQ packs them."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), "uint32")
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] |= codes[:, column * 8 + _ORDER[i]].astype("uint32") << np.uint32(4 * i)
    return words.view("int32")


def publish(directory: Path, lacking: str = "", **config: Any) -> dict[str, np.ndarray]:
    """Write a model with random codes; returns the values of its matrices [I, O] in float16 by our names."""
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
        codes = rng.integers(0, 16, (num_inputs, num_outputs))
        zeros = rng.integers(0, 16, (num_inputs // size, num_outputs))
        scales = (rng.standard_normal(zeros.shape) / 50).astype("float16")
        files |= {f"{layer}.qweight": packed(codes), f"{layer}.qzeros": packed(zeros), f"{layer}.scales": scales}
        groups = np.arange(num_inputs) // size
        expected[name] = (codes - zeros[groups]).astype("float16") * scales[groups]
    files.pop(lacking, None)
    stored = [TensorSpec(name, value.shape, value.dtype.name) for name, value in files.items()]
    write_tensors(directory, "model", stored, files.__getitem__, {"format": "pt"})
    own = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, **config}
    (directory / "config.json").write_text(json.dumps({**CONFIG.to_hf(), "quantization_config": own}))
    return expected
