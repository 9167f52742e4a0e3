"""Checkpoints of AWQ: read as AutoAWQ dequantises them, a slice at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.awq import AwqFormat
from llmsuite.checkpoint.model_dir import open_model
from tests.support.awq_files import packed, publish
from tests.support.gptq_files import CONFIG
from tests.support.tiny_llama import FAMILIES

_LAYER = "model.layers.0.mlp.up_proj"


def test_codes_are_in_the_order_of_autoawq() -> None:
    """`AWQ_REVERSE_ORDER`: the lowest 4 bits are output 0, the next ones output 2."""
    form = AwqFormat()
    assert form.unpack(np.array([[0x21]], "int32"), 1).tolist() == [[1, 0, 2, 0, 0, 0, 0, 0]]
    codes = np.random.default_rng(0).integers(0, 16, (5, 24))
    assert np.array_equal(form.unpack(packed(codes), 1), codes)


@pytest.mark.parametrize("group", [16, 32, -1])
def test_values_and_slices_match_a_plain_dequantisation(tmp_path: Path, group: int) -> None:
    expected = publish(tmp_path / "a", group_size=group)
    model = open_model(tmp_path / "a", FAMILIES)
    assert len(expected) == 7 * CONFIG.num_hidden_layers
    for name, values in expected.items():
        assert model.spec(name).shape == values.shape
        assert np.array_equal(model.read(name), values.astype("float32")), name
        for index in ((slice(0, 16), slice(8, 24)), (slice(33, 61), slice(3, 5)), (slice(7, 8), slice(0, 1))):
            assert np.array_equal(model.read(name, index), values[index].astype("float32")), (name, index)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"bits": 8}, "quantization_config.bits is 8; AWQ is read with 4"),
        ({"bits": True}, "quantization_config.bits is True"),
        ({"version": "gemv"}, "quantization_config.version is 'gemv'; AWQ is read as gemm"),
        ({"zero_point": False}, "zero_point is not true"),
    ],
)
def test_awq_of_other_kinds_is_refused(tmp_path: Path, words: dict[str, Any], message: str) -> None:
    publish(tmp_path / "a", group_size=32, **words)
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "a", FAMILIES)


def test_damaged_awq_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "lacking", group_size=32, lacking=f"{_LAYER}.scales")
    with pytest.raises(UserError, match=f"{_LAYER}.qweight has no {_LAYER}.scales"):
        open_model(tmp_path / "lacking", FAMILIES)
    publish(tmp_path / "group", group_size=16)
    config = tmp_path / "group" / "config.json"
    text = config.read_text()
    for group, message in (
        ("32", r"is \[6, 64\]; codes of \[64, 96\] in groups of 32 has \[3, 64\]|is \[4, \d+\]; codes of"),
        ("7", "inputs, which are no multiple of 7"),
        ('"a"', "quantization_config.group_size is 'a'"),
    ):
        config.write_text(text.replace('"group_size": 16', f'"group_size": {group}'))
        with pytest.raises(UserError, match=message):
            open_model(tmp_path / "group", FAMILIES)
