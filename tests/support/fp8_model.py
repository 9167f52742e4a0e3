"""A model of random values in FP8, in the layout that DeepSeek-V3 and Qwen3-FP8 are published in.

Nothing of `llmsuite.checkpoint.fp8` is used: the values are those of a plain dequantisation by NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmsuite.checkpoint.tensor_writer import WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.contract.specs import ModelFamily

E4M3 = ml_dtypes.float8_e4m3fn
_CODES = np.array([code for code in range(256) if code & 0x7F != 0x7F], "uint8")
"""All codes but the two that are no numbers."""


def publish(
    directory: Path,
    family: ModelFamily,
    config: Any,
    block: Sequence[int] = (128, 128),
    seed: int = 0,
    std: float = 0.05,
) -> dict[str, np.ndarray]:
    """Write the model.

    Args:
        directory: to be made.
        family: of the model.
        config: its shape.
        block: rows and columns of a block.
        seed: of the values.
        std: about the size of the values.

    Returns:
        The float32 values of every parameter that is in FP8, by the name in the files, as they lie there.
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    names = family.names()
    values: dict[str, np.ndarray] = {}
    dequantised = {}
    for name, shape in {**names.parameter_shapes(config), **further_layers(family, config)}.items():
        place = names.hf_tensors(name, config)
        shape = shape[1:] if place.stacked else shape
        shape = shape[::-1] if names.is_linear(name) else shape
        for theirs in place.names:
            if (
                names.is_linear(name)
                and ".layers." in name
                and not name.endswith(("mlp.gate.weight", "eh_proj.weight"))
            ):
                codes, scales = random_blocks(rng, shape, block, std)
                values[theirs] = codes
                values[f"{theirs}_scale_inv"] = scales
                dequantised[theirs] = dequantise(codes, scales, block)
            else:
                plain = rng.standard_normal(shape, dtype="float32") * np.float32(std)
                is_gain = name.endswith("norm.weight")
                dtype = "float32" if name.endswith("e_score_correction_bias") else "bfloat16"
                values[theirs] = (plain * 0 + 1 if is_gain else plain).astype(dtype)
    specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in values.items()]
    options = WriteOptions(max_file_bytes=max(sum(spec.num_bytes for spec in specs) // 3, 1))
    write_tensors(directory, "model", specs, values.__getitem__, {"format": "pt"}, options)
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    config_json = {
        **config.to_hf(),
        "torch_dtype": "bfloat16",
        "quantization_config": {**quantization, "weight_block_size": list(block)},
    }
    (directory / "config.json").write_text(json.dumps(config_json))
    return dequantised


def further_layers(family: ModelFamily, config: Any) -> dict[str, tuple[int, ...]]:
    """The tensors of the layers that predict further tokens, as they lie in memory. Experts are single ones."""
    names = family.names()
    last = config.num_hidden_layers - 1
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {}
    for number in range(last + 1, last + 1 + getattr(config, "num_nextn_predict_layers", 0)):
        for name, shape in names.parameter_shapes(config).items():
            if name.startswith(f"model.layers.{last}."):
                place = names.hf_tensors(name, config)
                own = [theirs.replace(f".{last}.", f".{number}.", 1) for theirs in place.names]
                found |= dict.fromkeys(own, shape[1:] if place.stacked else shape)
        layer = f"model.layers.{number}"
        table = (config.vocab_size, hidden)
        found |= {f"{layer}.{part}.weight": (hidden,) for part in ("enorm", "hnorm", "shared_head.norm")}
        found |= {f"{layer}.eh_proj.weight": (2 * hidden, hidden)}
        found |= {f"{layer}.embed_tokens.weight": table, f"{layer}.shared_head.head.weight": table}
    return found


def random_blocks(
    rng: np.random.Generator, shape: Sequence[int], block: Sequence[int], std: float
) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, of which the largest of each block is 448, as a scale by the maximum makes it; and scales."""
    codes = rng.choice(_CODES, shape)
    counts = [-(-size // part) for size, part in zip(shape, block)]
    for row in range(counts[0]):
        for column in range(counts[1]):
            codes[row * block[0], column * block[1]] = rng.choice([0x7E, 0xFE])
    return codes.view(E4M3), (std / 100 * rng.lognormal(0, 0.5, counts)).astype("float32")


def dequantise(codes: np.ndarray, scales: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """Codes times the scale of their block, in float32."""
    spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return codes.astype("float32") * spread
