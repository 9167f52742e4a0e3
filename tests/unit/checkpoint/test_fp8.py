"""Models in FP8: read as a plain dequantisation reads them, and written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint import fp8
from llmsuite.checkpoint.fp8 import Fp8Format, block_scales, quantise
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.stored import read_header
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.cli.main import main
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from tests.support.families import FAMILIES
from tests.support.fp8_model import dequantise, publish, random_blocks

BLOCK = (16, 24)
"""Cut by slices of tensor parallel ranks, and by the edges of matrices."""
QUANTISED = {
    "deepseek": {"kv_lora_rank": 20, "moe_intermediate_size": 28, "hidden_size": 72, "num_nextn_predict_layers": 1},
    "qwen": {"model_type": "qwen3", "hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Shapes whose sizes are no multiples of a block."""


def shape(family: str) -> Any:
    return FAMILIES[family].config_cls(**{**FAMILIES[family].smoke, **QUANTISED[family]})


def raw(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor as it lies in its file."""
    stored = [tensor for path in TensorFiles(directory, "model").paths for tensor in read_header(path).values()]
    return {t.name: (t.code, t.shape, b"".join(map(bytes, t.chunks()))) for t in stored}


def wanted(family: str, expected: dict[str, np.ndarray], name: str) -> np.ndarray | None:
    """A parameter as it lies in memory, where it is in FP8."""
    place = FAMILIES[family].names().hf_tensors(name, shape(family))
    if place.names[0] not in expected:
        return None
    return np.stack([expected[n].T for n in place.names]) if place.stacked else expected[place.names[0]].T


@pytest.mark.parametrize("family", QUANTISED)
def test_values_and_slices_match_a_plain_dequantisation(tmp_path: Path, family: str) -> None:
    expected = publish(tmp_path / "a", FAMILIES[family], shape(family), BLOCK)
    model = open_model(tmp_path / "a", FAMILIES)
    plan = FAMILIES[family].shard_plan
    assert model.is_fp8
    assert plan is not None
    degrees = Degrees(pp=1, dp=2, sharding=1, tp=2, ep=2)
    compared = 0
    for name in model.names:
        values = wanted(family, expected, name)
        if values is None:
            continue
        compared += 1
        assert model.spec(name).shape == values.shape
        assert np.array_equal(model.read(name), values)
        for rank in range(degrees.num_ranks):
            index = local_slice(name, values.shape, plan, Mesh(degrees, rank))
            found = model.read(name, index)
            assert found.dtype == np.float32
            assert np.array_equal(found, values[tuple(index)]), (name, rank)
    assert compared > 10


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 60), columns=st.integers(1, 60), seed=st.integers(0, 1 << 30), data=st.data())
def test_dequantised_values_become_the_same_bytes_again(rows: int, columns: int, seed: int, data: Any) -> None:
    block = data.draw(st.tuples(st.integers(1, 32), st.integers(1, 32)))
    form = Fp8Format(*block)
    rng = np.random.default_rng(seed)
    codes, scales = random_blocks(rng, (rows, columns), block, 0.02)
    value = dequantise(codes, scales, block)
    again = block_scales(value, form)
    numbers = form.block_numbers(0, 0, rows), form.block_numbers(1, 0, columns)
    requantised = quantise(value, again, *numbers)
    assert np.array_equal(dequantise(requantised, again, block), value)
    assert np.array_equal(requantised.astype("float32"), codes.astype("float32"))
    # a block of few values may have two scales that give the same values
    full = [np.all([(numbers[0] == r).sum() * (numbers[1] == c).sum() >= 64]) for r, c in np.ndindex(scales.shape)]
    assert np.array_equal(again.ravel()[full], scales.ravel()[full])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(1e-6, 1e3))
def test_other_values_are_rounded_to_nearest(seed: int, std: float) -> None:
    value = np.random.default_rng(seed).standard_normal((40, 50), dtype="float32") * np.float32(std)
    value[:16, :24] = 0
    form = Fp8Format(*BLOCK)
    scales = block_scales(value, form)
    codes = quantise(value, scales, form.block_numbers(0, 0, 40), form.block_numbers(1, 0, 50))
    error = np.abs(dequantise(codes, scales, BLOCK) - value)
    spread = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[:40, :50]
    # 3 bits after the point of a normal number; steps of 2**-9 below 2**-6
    assert (error <= np.maximum(np.abs(value) / 16, spread * 2**-10) * 1.001).all()


@pytest.mark.parametrize("family", QUANTISED)
def test_merge_writes_bfloat16_or_the_same_fp8(tmp_path: Path, family: str) -> None:
    expected = publish(tmp_path / "a", FAMILIES[family], shape(family), BLOCK)
    published = raw(tmp_path / "a")
    for target, source, words in (
        ("bf16", "a", []),
        ("fp8", "a", ["--dtype", "fp8"]),
        ("fp32", "a", ["--dtype", "fp32"]),
    ):
        assert main(["merge", str(tmp_path / source), "-o", str(tmp_path / target), *words]) == 0
    files = TensorFiles(tmp_path / "bf16", "model")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    for name, value in expected.items():
        assert files.spec(name).dtype == "bfloat16"
        assert np.array_equal(files.read(name), value.astype("bfloat16"))
    assert not any(name.endswith("_scale_inv") for name in files.names)
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert written["quantization_config"]["weight_block_size"] == list(BLOCK)
    assert written["torch_dtype"] == "bfloat16"
    assert raw(tmp_path / "fp8") == published
    whole = open_model(tmp_path / "fp32", FAMILIES)
    assert all(np.array_equal(whole.files.read(name), value) for name, value in expected.items())


def test_float32_that_came_from_fp8_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"))
    published = raw(tmp_path / "a")
    assert main(["merge", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--dtype", "fp32"]) == 0
    assert main(["merge", str(tmp_path / "b"), "-o", str(tmp_path / "c"), "--dtype", "fp8"]) == 0
    assert raw(tmp_path / "c") == published


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
def test_import_writes_bfloat16(tmp_path: Path, layout: str) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    assert main(["import", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--layout", layout]) == 0
    before, after = (open_model(tmp_path / which, FAMILIES) for which in "ab")
    assert not after.is_fp8
    for name in before.names:
        assert np.array_equal(after.read(name), before.read(name).astype(after.spec(name).dtype))


def test_a_family_or_layout_without_fp8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    words = ["--dtype", "fp8", "--layout", "paddlenlp"]
    assert main(["merge", str(tmp_path / "a"), "-o", str(tmp_path / "b"), *words]) == 2
    assert "--dtype fp8: PaddleNLP has no layout of it; choose bf16, or layout hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({"weight_block_size": None}, r"weight_block_size is None; .* such as \[128, 128\]"),
        ({"weight_block_size": [24, 16]}, r"scale_inv' is \[.*\]; a matrix of \[.*\] in blocks of 24 x 16 has"),
        ({"quant_method": "eetq"}, "does not know quantization_config"),
        (None, "is in FP8, and config.json has no quantization_config of it"),
    ],
)
def test_unsupported_fp8_formats_are_refused(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    if change is None:
        del config["quantization_config"]
    else:
        config["quantization_config"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "a", FAMILIES)


def test_a_matrix_without_scales_is_named(tmp_path: Path) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    index = tmp_path / "a" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"experts\.3\.up_proj\.weight' is in FP8, and there is no .*_scale_inv"):
        open_model(tmp_path / "a", FAMILIES)


def test_only_the_slice_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    model = open_model(tmp_path / "a", FAMILIES)
    sizes = list[int]()
    plain = fp8.dequantise

    def counted(codes: np.ndarray, *blocks: np.ndarray) -> np.ndarray:
        sizes.append(codes.size)
        return plain(codes, *blocks)

    monkeypatch.setattr("llmsuite.checkpoint.fp8.dequantise", counted)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    model.read(name, [slice(2, 4), slice(5, 15), slice(20, 24)])
    assert sizes == [40, 40]


def test_mtp_layers_are_carried_along(tmp_path: Path) -> None:
    publish(tmp_path / "a", FAMILIES["deepseek"], shape("deepseek"), BLOCK)
    assert main(["merge", str(tmp_path / "a"), "-o", str(tmp_path / "b")]) == 0
    before, after = (open_model(tmp_path / which, FAMILIES) for which in "ab")
    assert before.config.num_nextn_predict_layers == after.config.num_nextn_predict_layers == 1
    carried = {name.removeprefix("model.layers.4.") for name in before.carried}
    parts = (
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        "shared_head.head",
        "embed_tokens",
        "mlp.experts.7.up_proj",
    )
    assert carried >= {f"{part}.weight" for part in parts}
    assert sorted(before.files.names) == sorted(after.files.names)
    for name in before.carried:
        assert np.array_equal(after.read(name), before.read(name).astype(after.spec(name).dtype))
    # without the tensors the config does not promise them
    index = tmp_path / "b" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {n: f for n, f in content["weight_map"].items() if not n.startswith("model.layers.4.")}
    index.write_text(json.dumps(content))
    alone = open_model(tmp_path / "b", FAMILIES)
    assert alone.carried == []
    assert alone.config.num_nextn_predict_layers == 0
