"""Merging and converting the models of every family, whose parameters are stacked from, or parts of, what is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint import tensor_writer
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
from llmsuite.checkpoint.convert.sources import open_source
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.cli.main import main
from llmsuite.inference.load import parameter_shapes
from tests.support.families import CASES, FAMILIES, config_of, reference
from tests.support.paths import REFERENCE

FUSED_BY_PADDLENLP = ("llama", "qwen2")
EXPERTS = next(case for case in CASES if case.startswith("deepseek/v3"))
C_ATTN = next(case for case in CASES if case.startswith("gpt/"))


def open_(path: Path) -> ModelDirectory:
    return open_source(path, FAMILIES, parameter_shapes, allow_pickle=True)


def stored(directory: Path) -> dict[str, np.ndarray]:
    """The tensors in the files, except those that are no parameter."""
    model = open_model(directory, FAMILIES)
    names = {name for place in model.tensors.values() for name in place.names}
    return {name: np.ascontiguousarray(model.files.read(name)) for name in model.files.names if name in names}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert sorted(a) == sorted(b)
    for name, value in a.items():
        assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape), name
        assert value.tobytes() == b[name].tobytes(), name


def has_paddlenlp(case: str) -> bool:
    return FAMILIES[case.split("/")[0]].names().paddlenlp_prefix(config_of(case)) is not None


@pytest.fixture(params=[1 << 25, 100], ids=["whole", "in parts"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_writer, "_CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_equal(case: str, tmp_path: Path) -> None:
    expected = stored(REFERENCE / case)
    assert main(["merge", str(REFERENCE / case), "-o", str(tmp_path / "hf"), "--split-num=4"]) == 0
    assert_same(stored(tmp_path / "hf"), expected)
    if not has_paddlenlp(case):
        return
    words = ["--layout=paddlenlp", "--max-shard-size=9KB"]
    assert main(["convert", str(tmp_path / "hf"), "-o", str(tmp_path / "paddlenlp"), *words]) == 0
    prefix = FAMILIES[case.split("/")[0]].names().paddlenlp_prefix(config_of(case))
    theirs = stored(tmp_path / "paddlenlp")
    assert {name.replace(prefix, "model.", 1) for name in theirs} == set(expected)
    assert len(list((tmp_path / "paddlenlp").glob("*.safetensors"))) > 3
    assert main(["convert", str(tmp_path / "paddlenlp"), "-o", str(tmp_path / "back"), "--layout=hf"]) == 0
    assert_same(stored(tmp_path / "back"), expected)
    assert open_model(tmp_path / "back", FAMILIES).config == config_of(case)


@pytest.mark.parametrize("case", [case for case in CASES if not has_paddlenlp(case)])
def test_a_layout_paddlenlp_does_not_have_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-o", str(tmp_path / "out"), "--layout=paddlenlp"]
    assert main(["convert", str(REFERENCE / case), *words]) == 2
    model_type = config_of(case).to_hf()["model_type"]
    assert f"a {model_type} has no PaddleNLP layout that we know; write the hf layout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("case", [case for case in CASES if has_paddlenlp(case)])
def test_fused_as_paddlenlp_does_it_or_refused(case: str, tmp_path: Path) -> None:
    source = open_(REFERENCE / case)
    model_type = source.config.to_hf()["model_type"]
    if model_type not in FUSED_BY_PADDLENLP:
        with pytest.raises(UserError, match=f"a {model_type} has no matrices that PaddleNLP fuses"):
            Rewrite(source, OutputFormat("paddlenlp", fused=True))
        return
    Rewrite(source, OutputFormat("paddlenlp", fused=True)).write(tmp_path / "fused")
    kinds = {".".join(name.split(".")[-2:]) for name in open_model(tmp_path / "fused", FAMILIES).files.names}
    on_disk = safetensors.numpy.load_file(tmp_path / "fused/model-00001-of-00001.safetensors")
    assert any("qkv_proj.weight" in name for name in on_disk)
    assert any("qkv_proj.bias" in name for name in on_disk) == ("q_proj.bias" in kinds)
    assert not any(part in name for name in on_disk for part in (".q_proj.", ".v_proj.", ".up_proj."))
    Rewrite(open_(tmp_path / "fused"), OutputFormat("hf")).write(tmp_path / "back")
    assert_same(stored(tmp_path / "back"), stored(REFERENCE / case))


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
def test_paddlenlp_loads_a_qwen2_we_write_and_we_what_it_saves(fused: bool, tmp_path: Path) -> None:
    from paddlenlp.transformers import AutoModelForCausalLM

    case = "qwen/qwen2"
    Rewrite(open_(REFERENCE / case), OutputFormat("paddlenlp", fused=fused)).write(tmp_path / "ours")
    flags = {"fuse_attention_qkv": fused, "fuse_attention_ffn": fused}
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "ours"), **flags)
    model.eval()
    ids, logits = reference(case)
    found = model(input_ids=paddle.to_tensor(ids))
    found = (found[0] if isinstance(found, tuple) else found).numpy()
    assert np.abs(found - logits).max() < 1e-5
    assert any("qkv_proj" in name for name in model.state_dict()) == fused
    model.save_pretrained(str(tmp_path / "theirs"))  # as .pdparams
    Rewrite(open_(tmp_path / "theirs"), OutputFormat("hf")).write(tmp_path / "back")
    assert_same(stored(tmp_path / "back"), stored(REFERENCE / case))


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype(case: str, dtype: str, tmp_path: Path) -> None:
    Rewrite(open_(REFERENCE / case), OutputFormat("hf", dtype)).write(tmp_path / "out")
    assert_same(stored(tmp_path / "out"), {n: v.astype(dtype) for n, v in stored(REFERENCE / case).items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("case", CASES)
def test_a_slice_of_a_stored_tensor(case: str) -> None:
    model = open_model(REFERENCE / case, FAMILIES)
    expected = stored(REFERENCE / case)
    for as_in_memory in (False, True):
        tensors = TensorLayout(model.family, model.config, map(model.spec, model.names), as_in_memory=as_in_memory)
        assert set(tensors.names) == set(expected)
        for name in tensors.names:
            value = expected[name].T if as_in_memory and name in tensors.linears else expected[name]
            assert tensors.spec(name).shape == value.shape
            assert np.array_equal(tensors.read(name, model.read), value)
            for first, last in ((0, 1), (0, 3), (1, 2), (2, 3)):
                index = [slice(n * first // 3, max(n * last // 3, n * first // 3 + 1)) for n in value.shape]
                assert np.array_equal(tensors.read(name, model.read, index), value[tuple(index)]), (name, index)


@pytest.mark.parametrize("case", CASES)
def test_a_save_of_a_live_model_is_merged(case: str, tmp_path: Path) -> None:
    """dist.save_state_dict of our model: by our names, matrices [inputs, outputs], experts stacked."""
    source = open_(REFERENCE / case)
    state = {name: paddle.to_tensor(np.ascontiguousarray(source.read(name))) for name in source.names}
    dist.save_state_dict({"model": state}, str(tmp_path / "run/dist_ckpt"))
    shutil.copyfile(REFERENCE / case / "config.json", tmp_path / "run/config.json")
    assert main(["merge", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    assert_same(stored(tmp_path / "out"), stored(REFERENCE / case))


def cut(case: str, name: str, value: np.ndarray, rank: int) -> np.ndarray:
    """The part of one of two ranks, of a tensor as PaddleNLP holds it."""
    full = (".mlp.gate.", "shared_expert_gate", "_a_proj", "kv_a_proj_with_mqa")
    if any(part in name for part in full) or (value.ndim < 2 and not name.endswith(".bias")):
        return value
    by_rows = "o_proj" in name or "down_proj" in name or "embed_tokens" in name
    if name.endswith("e_score_correction_bias"):
        return value
    return np.array_split(value, 2, 0 if by_rows else -1)[rank]


@pytest.mark.parametrize("case", [c for c in CASES if has_paddlenlp(c) and config_of(c).num_attention_heads % 2 == 0])
def test_files_of_ranks(case: str, tmp_path: Path) -> None:
    source = open_(REFERENCE / case)
    tensors = TensorLayout(source.family, source.config, map(source.spec, source.names), "paddlenlp")
    (tmp_path / "ranks").mkdir()
    shutil.copyfile(REFERENCE / case / "config.json", tmp_path / "ranks/config.json")
    for rank in range(2):
        own = {
            name: cut(case, name, np.ascontiguousarray(tensors.read(name, source.read)), rank) for name in tensors.names
        }
        paddle.save(own, str(tmp_path / f"ranks/model_state.tp{rank:02d}.pdparams"))
    assert main(["merge", str(tmp_path / "ranks"), "-o", str(tmp_path / "out"), "--allow-pickle"]) == 0
    assert_same(stored(tmp_path / "out"), stored(REFERENCE / case))


def test_paddlenlps_files_of_a_layout_we_do_not_know(tmp_path: Path) -> None:
    shutil.copyfile(REFERENCE / "qwen/qwen3/config.json", tmp_path / "config.json")
    paddle.save({"qwen3.norm.weight": paddle.ones([3])}, str(tmp_path / "model_state.pdparams"))
    with pytest.raises(UserError, match="PaddleNLP's layout of a qwen3 is not supported"):
        open_(tmp_path)


def test_an_expert_of_another_shape_or_dtype_is_named(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / EXPERTS, tmp_path / "a")
    values = safetensors.numpy.load_file(tmp_path / "a/model.safetensors")
    name = next(name for name in values if ".experts.2.up_proj" in name)
    for changed, message in (
        (values[name][:, 1:].copy(), rf"1 tensors have another shape: {name} is .* float32, but .*experts\.0\.up_proj"),
        (values[name].astype("float16"), rf"1 tensors have another shape: {name} is .* float16, but"),
    ):
        safetensors.numpy.save_file({**values, name: changed}, tmp_path / "a/model.safetensors")
        with pytest.raises(UserError, match=message):
            open_(tmp_path / "a")


# adapters


def add(case: str, target: str, directory: Path, by_columns: bool, **settings: Any) -> None:
    """Merge an adapter of one HF module; the model must be the base and the product."""
    expected = stored(REFERENCE / case)
    matrix = expected[f"{target}.weight"] if by_columns else expected[f"{target}.weight"].T
    rng = np.random.default_rng(0)
    a = rng.normal(size=(2, matrix.shape[0])).astype("float32")
    b = rng.normal(size=(matrix.shape[1], 2)).astype("float32")
    (directory / "adapter").mkdir()
    factors = {f"base_model.model.{target}.lora_A.weight": a, f"base_model.model.{target}.lora_B.weight": b}
    safetensors.numpy.save_file(factors, directory / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **settings}
    (directory / "adapter/adapter_config.json").write_text(json.dumps(config))
    delta = 3 * (a.T @ b.T)
    expected[f"{target}.weight"] = expected[f"{target}.weight"] + (delta if by_columns else delta.T)
    merged = add_adapter(open_(REFERENCE / case), directory / "adapter")
    Rewrite(merged, OutputFormat("hf")).write(directory / "out")
    found = stored(directory / "out")
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("part_bytes")
def test_an_adapter_of_queries_keys_and_values_in_one(tmp_path: Path) -> None:
    """PEFT sets fan_in_fan_out for the matrices GPT-2 stores [inputs, outputs]."""
    add(C_ATTN, "transformer.h.1.attn.c_attn", tmp_path, by_columns=True, fan_in_fan_out=True)


@pytest.mark.usefixtures("part_bytes")
def test_an_adapter_of_one_expert(tmp_path: Path) -> None:
    config = config_of(EXPERTS)
    layer = next(i for i in range(config.num_hidden_layers) if config.has_experts(i))
    add(EXPERTS, f"model.layers.{layer}.mlp.experts.1.down_proj", tmp_path, by_columns=False)
