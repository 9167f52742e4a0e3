"""Adapters of PEFT and PaddleNLP are added to their base, and those that do not fit are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy

from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.errors import UserError
from llmsuite.base.files import write_json
from llmsuite.checkpoint.adapter_base import BASE, Base
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.models.block_quant import BlockFormat
from tests.support import tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILIES

RANK = 3
ALPHA = 12
TARGETS = ("q_proj", "v_proj", "down_proj")


def error(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def factors(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [inputs, rank] and B [rank, outputs] by our names."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype("float32")

    return {
        name: (normal(v.shape[0], RANK), normal(RANK, v.shape[1]))
        for name, v in tiny_llama.values().items()
        if name.split(".")[-2] in TARGETS
    }


def write_peft(directory: Path, changes: Any = (), extra: Any = (), drop: str = "") -> Path:
    """An adapter as HF PEFT saves it."""
    directory.mkdir()
    tensors = {}
    for name, (a, b) in factors().items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(b.T)
    tensors = {**{n: v for n, v in tensors.items() if not drop or drop not in n}, **dict(extra)}
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), **dict(changes)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def expected_sum(scale: float, dtype: str = "float32") -> dict[str, np.ndarray]:
    values = tiny_llama.values(dtype=dtype)
    for name, (a, b) in factors().items():
        values[name] = (values[name].astype("float32") + scale * (a @ b)).astype(dtype)
    return values


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_of_peft_is_added_to_its_base(tmp_path: Path, layout: Any, dtype: str) -> None:
    tiny_llama.write(tmp_path / "base", layout=layout, dtype=dtype)
    adapter = write_peft(tmp_path / "adapter")
    words = ["--base", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--layout", layout]
    assert main(["merge", str(adapter), *words]) == 0
    for name, value in tiny_llama.read(tmp_path / "out").items():
        expected = expected_sum(ALPHA / RANK, dtype)[name]
        assert value.dtype == expected.dtype
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        assert np.allclose(value.astype("float32"), expected.astype("float32"), rtol=tolerance)
    assert not tiny_llama.same(tiny_llama.read(tmp_path / "out"), tiny_llama.read(tmp_path / "base"))


@pytest.mark.parametrize(("dtype", "doubled"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_an_adapter_is_added_to_the_quantised_base_it_was_trained_on(
    tmp_path: Path, dtype: str, doubled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.write(tmp_path / "base", dtype=dtype)
    base = tmp_path / "base"
    adapter = write_peft(tmp_path / "adapter")
    format = BlockFormat("nf4", 4, doubled)
    sha256 = open_model(base, FAMILIES).digest()
    write_json(adapter / BASE, Base(str(base), sha256, format).to_json())
    assert main(["merge", str(adapter), "-o", str(tmp_path / "out")]) == 0
    scales = ", with quantised scales" if doubled else ""
    assert f"stored as nf4 in blocks of 4{scales}; it is merged" in capsys.readouterr().out
    merged = tiny_llama.read(tmp_path / "out")
    trained = factors()
    for name, value in tiny_llama.values(dtype=dtype).items():
        expected = value.astype("float32")
        if ".layers." in name and expected.ndim == 2:
            expected = format.rounded(expected)
        if name in trained:
            a, b = trained[name]
            expected = expected + ALPHA / RANK * (a @ b)
        assert merged[name].dtype == value.dtype
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(merged[name].astype("float32"), expected, rtol=tolerance, atol=tolerance)
    model = add_adapter(open_model(base, FAMILIES), adapter)
    name = "model.layers.1.mlp.down_proj.weight"
    part = [slice(3, 9), slice(1, 5)]  # no multiples of the block
    np.testing.assert_array_equal(model.read(name, part), model.read(name)[tuple(part)])


def test_paddlenlps_layout_and_stabilised_scale(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "base")
    directory = tmp_path / "adapter"
    directory.mkdir()
    tensors = {}
    for name, (a, b) in factors().items():
        module = name.replace("model.", "llama.").removesuffix(".weight")
        tensors |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
    safetensors.numpy.save_file(tensors, directory / "lora_model_state.safetensors")
    (directory / "lora_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, "rslora": True}))
    merged = add_adapter(open_model(tmp_path / "base", FAMILIES), directory)
    for name, expected in expected_sum(ALPHA / math.sqrt(RANK)).items():
        assert np.allclose(merged.read(name), expected, rtol=1e-5, atol=1e-6)
        half = [slice(1, n) for n in expected.shape]
        assert np.allclose(merged.read(name, half), expected[tuple(half)], rtol=1e-5, atol=1e-6)


def test_a_pickle_of_paddlenlp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama.write(tmp_path / "base")
    directory = tmp_path / "adapter"
    directory.mkdir()
    tensors = {}
    for name, (a, b) in factors().items():
        module = name.replace("model.", "llama.").removesuffix(".weight")
        tensors |= {f"{module}.lora_A": paddle.to_tensor(a), f"{module}.lora_B": paddle.to_tensor(b)}
    paddle.save(tensors, str(directory / "lora_model_state.pdparams"))
    (directory / "lora_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    words = ["merge", str(directory), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    assert "lora_model_state.pdparams: is a pickle. With --allow-pickle" in error(*words, capsys=capsys)
    assert main([*words, "--allow-pickle"]) == 0
    for name, expected in expected_sum(ALPHA / RANK).items():
        assert np.allclose(tiny_llama.read(tmp_path / "out")[name], expected, rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "out")
    (directory / "lora_model_state.pdparams").rename(directory / "lora_model_state.tp00.pdparams")
    assert "parts of ranks; let PaddleNLP merge them first" in error(*words, "--allow-pickle", capsys=capsys)


@pytest.mark.parametrize("rank", [2, 64])
def test_lokr_of_paddlenlp(tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The update of its own layers, compared with that from the files of its `LoKrModel.save_pretrained`."""
    theirs = import_alone("paddlenlp.peft.lokr.lokr_layers")[0].LoKrLinear
    tiny_llama.write(tmp_path / "base")
    directory = tmp_path / "adapter"
    directory.mkdir()
    tensors = {}
    expected = tiny_llama.values()
    rng = np.random.default_rng(0)
    for name in factors():
        layer = theirs(*expected[name].shape, lokr_dim=rank)
        module = name.replace("model.", "llama.")
        for kind, parameter in layer.named_parameters():
            if kind.startswith("lokr"):
                parameter.set_value(rng.normal(size=parameter.shape).astype("float32"))
                tensors[f"{module.removesuffix('.weight')}.{kind}"] = parameter
        expected[name] = expected[name] + layer.get_adapter_weight().numpy()
    assert any(name.endswith("lokr_w2") for name in tensors) == (rank == 64)
    paddle.save(tensors, str(directory / "lokr_model_state.pdparams"))
    output = {"base_model_name_or_path": str(tmp_path / "base"), "lokr_dim": rank, "lokr_alpha": 0.0, "scaling": 0.0}
    (directory / "lokr_config.json").write_text(json.dumps(output))
    words = ["merge", str(directory), "-o", str(tmp_path / "out")]
    assert "lokr_model_state.pdparams: is a pickle. With --allow-pickle" in error(*words, capsys=capsys)
    assert main([*words, "--allow-pickle"]) == 0
    for name, value in tiny_llama.read(tmp_path / "out").items():
        assert np.allclose(value, expected[name], rtol=1e-5, atol=1e-6), name
    words = ["convert", str(directory), "-o", str(tmp_path / "other"), "--layout", "hf"]
    assert "have no other layout; merge them" in error(*words, capsys=capsys)


def test_a_base_of_adapters_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama.write(tmp_path / "base")
    of_base = {"base_model_name_or_path": str(tmp_path / "base")}
    first = write_peft(tmp_path / "first", of_base)
    second = write_peft(tmp_path / "second", of_base)
    output = error("merge", str(first), "--base", str(second), "-o", str(tmp_path / "out"), capsys=capsys)
    assert f"{second} has adapters, not a model; merge them into their model with `llmsuite merge {second} -o" in output


WIDE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "extra", "says"),
    [
        ({"r": None}, {}, "adapter_config.json: r is None; a number above 0 is needed"),
        ({"lora_alpha": "16"}, {}, "adapter_config.json: lora_alpha is '16'; a number or null is needed"),
        ({"r": 8}, {}, "not of rank 8 as its configuration says"),
        ({"peft_type": "IA3"}, {}, "adapters of IA3 have no other layout; merge them"),
        (
            {},
            {f"{WIDE}.lora_A.weight": np.zeros((RANK, 7), "float32")},
            "are [7, 3] x [3, 16]; the matrix of the model",
        ),
    ],
)
def test_adapters_that_fit_no_model_are_not_converted(
    changes: dict[str, Any], extra: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.write(tmp_path / "base")
    directory = write_peft(tmp_path / "adapter", changes, extra)
    words = ["convert", str(directory), "--config", str(tmp_path / "base"), "-o", str(tmp_path / "other")]
    assert says in error(*words, "--layout", "paddlenlp", capsys=capsys)
    assert not (tmp_path / "other").exists()


def test_patterns_and_saved_modules(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "base")
    head = np.full((19, 24), 0.5, "float32")
    extra = {"base_model.model.lm_head.weight": head}
    patterns = {"alpha_pattern": {"layers.1.mlp.down_proj": 6}, "rank_pattern": {"q_proj": RANK}, "use_rslora": False}
    merged = add_adapter(open_model(tmp_path / "base", FAMILIES), write_peft(tmp_path / "adapter", patterns, extra))
    assert np.array_equal(merged.read("lm_head.weight"), head.T)
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.allclose(merged.read(name), expected_sum(6 / RANK)[name], rtol=1e-5, atol=1e-6)
    other = "model.layers.0.mlp.down_proj.weight"
    assert np.allclose(merged.read(other), expected_sum(ALPHA / RANK)[other], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"model.layers.7.mlp.up_proj.lora_A": np.zeros((3, 24), "f4")}}, "1 tensors match no tensor of"),
        ({"extra": {"model.embed_tokens.lora_embedding_A": np.zeros((3, 19), "f4")}}, "lacks the other factor"),
        ({"drop": "layers.0.self_attn.q_proj.lora_B"}, "lacks the other factor"),
        ({"changes": {"use_mora": True}}, "use_mora is on"),
        ({"changes": {"r": 4}}, "rank 4, its factors have rank 3"),
        ({"changes": {"lora_alpha": None}}, "lora_alpha is None"),
        ({"drop": "lora_"}, "has no lora_A and lora_B"),
        ({"changes": {"peft_type": "EVIL"}}, "peft_type is 'EVIL'; these are read: .*LORA"),
        (
            {"changes": {"target_modules": ["k_proj", "lm_head"]}},
            "target_modules names k_proj, lm_head, and the adapters in the files are of down_proj, q_proj, v_proj",
        ),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_llama.write(tmp_path / "base")
    if options.get("drop") == "lora_":
        options = {**options, "extra": {"base_model.model.lm_head.weight": np.zeros((19, 24), "float32")}}
    adapter = write_peft(tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=message):
        add_adapter(open_model(tmp_path / "base", FAMILIES), adapter)


def test_an_adapter_of_a_wider_model_is_refused(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "base", dataclasses.replace(CONFIG, intermediate_size=22))
    with pytest.raises(UserError, match=r"are \[20, 3\] x \[3, 24\]; model.layers.0.mlp.down_proj.weight of the base"):
        add_adapter(open_model(tmp_path / "base", FAMILIES), write_peft(tmp_path / "adapter"))


def test_an_adapter_needs_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--base DIR" in error("merge", str(write_peft(tmp_path / "a")), "-o", str(tmp_path / "b"), capsys=capsys)
    assert os.listdir(tmp_path) == ["a"]


# sources that are not as they were written


def test_other_tensors_that_peft_saves_are_merged(tmp_path: Path) -> None:
    """Adapters of the embedding and of the head, with the matrices themselves saved along as `base_layer`."""
    values = tiny_llama.values()
    embedding = values["model.embed_tokens.weight"]
    head = values["lm_head.weight"]
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=shape).astype("f4") for shape in ((RANK, len(embedding)), (embedding.shape[1], RANK)))
    c, d = (rng.normal(size=shape).astype("f4") for shape in ((RANK, head.shape[0]), (head.shape[1], RANK)))
    wrapper = "base_model.model."
    extra = {
        f"{wrapper}model.embed_tokens.lora_embedding_A": a,
        f"{wrapper}model.embed_tokens.lora_embedding_B": b,
        f"{wrapper}model.embed_tokens.base_layer.weight": embedding + 1,
        f"{wrapper}lm_head.lora_A.weight": c,
        f"{wrapper}lm_head.lora_B.weight": d,
        f"{wrapper}lm_head.base_layer.weight": np.ascontiguousarray(head.T),
    }
    tiny_llama.write(tmp_path / "base")
    source = add_adapter(open_model(tmp_path / "base", FAMILIES), write_peft(tmp_path / "adapter", extra=extra))
    scale = ALPHA / RANK
    expected = embedding + 1 + scale * (b @ a).T
    np.testing.assert_allclose(source.read("model.embed_tokens.weight"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(source.read("lm_head.weight"), head + scale * (d @ c).T, rtol=1e-5, atol=1e-5)
    rows = source.read("model.embed_tokens.weight", [slice(2, 5), slice(None)])
    np.testing.assert_allclose(rows, expected[2:5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights is 'pissa_niter_4': .* PEFT has changed"),
        ({"use_dora": True}, {}, "use_dora is True, which contradicts the tensors of"),
        (
            {},
            {"lora_B.bias": 32},
            "lora_B.bias' is added to model.layers.0.self_attn.q_proj.bias, which .* lacks in this",
        ),
        ({}, {"lora_magnitude_vector": 32}, "use_dora is None"),
        ({}, {"lora_magnitude_vector": 31}, "lora_magnitude_vector' is .31."),
    ],
)
def test_updates_that_are_no_sum_are_refused(tmp_path: Path, changes: Any, extra: Any, message: str) -> None:
    width = tiny_llama.values()["model.layers.0.self_attn.q_proj.weight"].shape[1]
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    more = {f"{module}.{name}": np.ones(size - 32 + width, "f4") for name, size in extra.items()}
    message = message.replace("31", str(width - 1))  # the cases are for a width of 32
    tiny_llama.write(tmp_path / "base")
    with pytest.raises(UserError, match=message):
        add_adapter(open_model(tmp_path / "base", FAMILIES), write_peft(tmp_path / "adapter", changes, more))


def test_an_adapter_of_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    rows, width = tiny_llama.values()["model.embed_tokens.weight"].shape
    module = "base_model.model.model.embed_tokens.lora_embedding"
    extra = {f"{module}_A": np.ones([RANK, rows], "f4"), f"{module}_B": np.ones([width, RANK], "f4")}
    tiny_llama.write(tmp_path / "base", config=dataclasses.replace(CONFIG, tie_word_embeddings=True))
    with pytest.raises(UserError, match="has one matrix for both"):
        add_adapter(open_model(tmp_path / "base", FAMILIES), write_peft(tmp_path / "adapter", extra=extra))
