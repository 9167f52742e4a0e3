"""Checkpoints of GPTQ: read as their bytes say, of every kind that is published, a slice at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.gptq import GptqFormat
from llmsuite.checkpoint.gptq_writer import codes_of
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.models.block_quant import BlockFormat
from tests.support.gptq_files import CONFIG, of_bytes, publish
from tests.support.tiny_llama import FAMILIES

KINDS: dict[str, dict[str, Any]] = {
    "4 bit": {"group_size": 32},
    "8 bit": {"group_size": 32, "bits": 8},
    "last group smaller": {"group_size": 40},
    "by activation": {"group_size": 32, "desc_act": True, "sym": False},
    "one group": {"group_size": -1, "checkpoint_format": "gptq_v2"},
    "without g_idx": {"group_size": 32, "checkpoint_format": "gptq", "g_idx": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slices_match_a_plain_dequantisation(tmp_path: Path, kind: str) -> None:
    expected = publish(tmp_path / "a", **KINDS[kind])
    model = open_model(tmp_path / "a", FAMILIES)
    assert len(expected) == 7 * CONFIG.num_hidden_layers
    for name, values in expected.items():
        assert model.spec(name).shape == values.shape
        assert np.array_equal(model.read(name), values.astype("float32")), name
        for index in ((slice(0, 16), slice(8, 24)), (slice(33, 61), slice(3, 5)), (slice(7, 8), slice(0, 1))):
            assert np.array_equal(model.read(name, index), values[index].astype("float32")), (name, index)


@pytest.mark.parametrize("group", [32, 64])
def test_written_codes_are_read_back(group: int) -> None:
    form = GptqFormat(4, group)
    values = np.random.default_rng(1).standard_normal((128, 24)).astype("float32")
    parts = codes_of(values, form)
    blocks = BlockFormat("int4", group)
    codes = of_bytes(parts["qweight"].T, 4).astype(int).T
    assert (of_bytes(parts["qzeros"], 4) == 7).all(), "8, less 1: what kernels for symmetric codes suppose"
    found = (codes - 8) * parts["scales"][parts["g_idx"]].astype("float32")
    step = np.abs(values).reshape(-1, group, 24).max(1, keepdims=True) / 8
    error = np.abs(found - values).reshape(-1, group, 24)
    assert (error <= step * 1.002).all(), "half a step, and a whole one where the other side has one level less"
    assert (error > step * 0.502).mean() < 0.05
    assert np.abs(found - blocks.rounded(values)).max() < 2e-3, "but for the scales' float16"


def test_unsupported_or_damaged_gptq_is_refused(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.up_proj"
    for number, (words, message) in enumerate(
        (
            ({"bits": 3}, "quantization_config.bits is 3; GPTQ is read with 4 or 8"),
            ({"group_size": "64"}, "quantization_config.group_size is '64'"),
            ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; GPTQ is read as gptq or gptq_v2"),
            ({"group_size": 16}, r"is \[3, 64\]; codes of \[64, 96\] in groups of 16 has \[6, 64\]"),
        )
    ):
        publish(tmp_path / str(number), group_size=32)
        hf_config = json.loads((tmp_path / str(number) / "config.json").read_text())
        hf_config["quantization_config"] |= words
        (tmp_path / str(number) / "config.json").write_text(json.dumps(hf_config))
        with pytest.raises(UserError, match=message):
            open_model(tmp_path / str(number), FAMILIES)
    publish(tmp_path / "lacking", group_size=32, lacking=f"{layer}.scales")
    with pytest.raises(UserError, match=f"{layer}.qweight has no {layer}.scales"):
        open_model(tmp_path / "lacking", FAMILIES)
