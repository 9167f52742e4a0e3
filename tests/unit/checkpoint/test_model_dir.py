"""Model directories in both layouts, and what is said of those that are not whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.model_writer import write_hf, write_paddlenlp
from llmsuite.checkpoint.shapes import skipped_tensors
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec
from tests.support import tiny_llama
from tests.support.fill import fill_parameters
from tests.support.tiny_llama import CONFIG, FAMILIES, TOKENIZER


def contents(directory: Path) -> dict[str, np.ndarray]:
    """The tensors as they lie in the files."""
    files = TensorFiles(directory, "model")
    return {name: files.read(name) for name in files.names}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape)
        assert value.tobytes() == b[name].tobytes()


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [CONFIG, tiny_llama.tied()], ids=["untied", "tied"])
def test_a_written_model_is_read_back(tmp_path: Path, layout: Any, dtype: str, config: Any) -> None:
    parameters = tiny_llama.write(tmp_path, config, layout, dtype=dtype)
    model = open_model(tmp_path, FAMILIES)
    assert (model.layout, model.config, model.family.name) == (layout, config, "llama")
    assert len(model.files.paths) > 1
    assert_same({name: np.ascontiguousarray(model.read(name)) for name in model.names}, parameters)
    for name, value in parameters.items():
        assert model.spec(name) == TensorSpec(name, value.shape, dtype)


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slice_is_oriented_as_in_memory(tmp_path: Path, layout: Any, dtype: str) -> None:
    parameters = tiny_llama.write(tmp_path, layout=layout, dtype=dtype)
    model = open_model(tmp_path, FAMILIES)
    rng = np.random.default_rng(0)
    for name, value in parameters.items():
        halves = [[slice(0, n // 2), slice(n // 2, n)] for n in value.shape]
        anywhere = [[slice(start := rng.integers(n), rng.integers(start + 1, n + 1))] for n in value.shape]
        for index in [*itertools.product(*halves), *itertools.product(*anywhere), tuple(map(slice, value.shape))]:
            found = model.read(name, list(index))
            assert (found.shape, found.dtype) == (value[index].shape, value.dtype)
            assert np.ascontiguousarray(found).tobytes() == value[index].tobytes(), (name, index)


def test_names_and_orientation_are_those_of_each_layout(tmp_path: Path) -> None:
    parameters = tiny_llama.write(tmp_path / "hf")
    tiny_llama.write(tmp_path / "paddlenlp", layout="paddlenlp")
    hf = contents(tmp_path / "hf")
    paddlenlp = contents(tmp_path / "paddlenlp")
    kv = "layers.1.self_attn.k_proj.weight"
    assert parameters[f"model.{kv}"].shape == (24, 8)
    assert hf[f"model.{kv}"].shape == (8, 24)  # [outputs, inputs]
    assert paddlenlp[f"llama.{kv}"].shape == (24, 8)
    assert np.array_equal(hf[f"model.{kv}"].T, paddlenlp[f"llama.{kv}"])
    assert hf["lm_head.weight"].shape == (19, 24)
    assert paddlenlp["lm_head.weight"].shape == (24, 19)
    # an embedding is a table, not a linear: rows are tokens in both
    assert hf["model.embed_tokens.weight"].shape == paddlenlp["llama.embed_tokens.weight"].shape == (19, 24)
    assert {name.replace("model.", "llama.") for name in hf} == set(paddlenlp)


def test_hf_to_paddlenlp_to_hf_is_bit_equal(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    tiny_llama.write(tmp_path / "a", tokenizer=TOKENIZER)
    write_paddlenlp(open_model(tmp_path / "a", FAMILIES), tmp_path / "b")
    assert open_model(tmp_path / "b", FAMILIES).layout == "paddlenlp"
    write_hf(open_model(tmp_path / "b", FAMILIES), tmp_path / "c")
    assert_same(contents(tmp_path / "a"), contents(tmp_path / "c"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "tokenizer.model", "merges.txt", "chat_template.jinja"])
def test_tokenizer_files_of_all_kinds_are_copied(tmp_path: Path, name: str) -> None:
    tiny_llama.write(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(b"part of a tokenizer")
    (tmp_path / "a" / "README.md").write_text("not part of it")
    (tmp_path / "b").mkdir()
    write_paddlenlp(open_model(tmp_path / "a", FAMILIES), tmp_path / "b")
    assert (tmp_path / "b" / name).read_bytes() == b"part of a tokenizer"
    assert not (tmp_path / "b" / "README.md").exists()


def rewrite(directory: Path, tensors: dict[str, np.ndarray], layout: str = "hf") -> Path:
    """A directory with these tensors in one file, and the config of the tiny model."""
    directory.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return directory


@pytest.fixture
def hf(tmp_path: Path) -> dict[str, np.ndarray]:
    tiny_llama.write(tmp_path / "source")
    return contents(tmp_path / "source")


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        hf.pop(name)
    hf["model.layers.2.mlp.up_proj.weight"] = hf["extra"] = np.zeros(1, "float32")
    with pytest.raises(UserError) as caught:
        open_model(rewrite(tmp_path / "model", hf), FAMILIES)
    text = str(caught.value)
    assert "missing 2: model.layers.1.mlp.up_proj.weight, model.norm.weight" in text
    assert "unexpected 2: " in text
    assert "extra" in text
    assert "model.layers.2.mlp.up_proj.weight" in text


def test_many_missing_tensors_are_counted(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    kept = {name: value for name, value in hf.items() if ".layers.1." not in name}
    with pytest.raises(UserError, match=r"missing 9: (model\S+, ){8}model\S+$"):
        open_model(rewrite(tmp_path / "model", kept), FAMILIES)


@pytest.mark.parametrize("count", [1, 20_000])
def test_very_many_or_long_names_are_shown_in_part(tmp_path: Path, hf: dict[str, np.ndarray], count: int) -> None:
    names = [f"alien.{number}" for number in range(count)] if count > 1 else ["alien." + 1_000_000 * "x"]
    with pytest.raises(UserError, match=f"unexpected {count}: alien") as caught:
        open_model(rewrite(tmp_path / "model", hf | dict.fromkeys(names, np.zeros(0, "float32"))), FAMILIES)
    assert len(str(caught.value)) < 10_000


def test_tolerated_tensors_are_reported(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    hf["model.layers.2.mlp.up_proj.weight"] = np.zeros(1, "float32")
    path = rewrite(tmp_path / "model", hf)
    reports: list[str] = []
    model = open_model(path, FAMILIES, load="known")
    shapes = {name: model.spec(name).shape for name in model.names}
    assert skipped_tensors(model, shapes, "known", reports.append) == set()
    assert reports == [f"{path}: left out, as the model has no such tensors: model.layers.2.mlp.up_proj.weight"]
    gone = hf.pop("model.norm.weight")
    other = "model.layers.0.mlp.up_proj.weight"
    assert gone is not None
    hf[other] = hf[other][:-1]
    path = rewrite(tmp_path / "model", hf)
    with pytest.raises(UserError, match=r"missing 1: model\.norm\.weight; unexpected 1: model\.layers\.2"):
        open_model(path, FAMILIES, load="known")
    model = open_model(path, FAMILIES, load="any")
    reports.clear()
    assert skipped_tensors(model, shapes, "any", reports.append) == {"model.norm.weight", other}
    assert "as they are missing: model.norm.weight" in reports[2]
    assert f"as the shape differs: {other} is [24, 19], config.json makes it [24, 20]" in reports[1]
    with pytest.raises(UserError, match=r"1 tensors have another shape"):
        skipped_tensors(model, shapes, "exact", reports.append)


def test_derived_tensors_are_ignored(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    hf["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, "float32")
    model = open_model(rewrite(tmp_path / "model", hf), FAMILIES)
    assert not any("rotary" in name for name in model.names)


def test_the_copy_of_a_tied_output_is_tolerated(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    directory = rewrite(tmp_path / "model", hf)
    (directory / "config.json").write_text(json.dumps(tiny_llama.tied().to_hf()))
    assert "lm_head.weight" not in open_model(directory, FAMILIES).names
    del hf["lm_head.weight"]
    assert "lm_head.weight" not in open_model(rewrite_config(directory, hf), FAMILIES).names


def rewrite_config(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    config = (directory / "config.json").read_bytes()
    rewrite(directory, tensors)
    (directory / "config.json").write_bytes(config)
    return directory


def test_an_untied_model_without_output_is_refused(tmp_path: Path, hf: dict[str, np.ndarray]) -> None:
    del hf["lm_head.weight"]
    with pytest.raises(UserError, match=r"missing 1: lm_head\.weight"):
        open_model(rewrite(tmp_path / "model", hf), FAMILIES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "mamba"}', ["'mamba' is not supported", "llama"]),
        ("{}", ["None is not supported"]),
        ("[]", ["is a list, not an object"]),
        ("{", ["is not JSON"]),
        ("", ["is not JSON"]),
    ],
)
def test_a_config_of_no_known_model(tmp_path: Path, text: str, words: list[str]) -> None:
    tiny_llama.write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        open_model(tmp_path, FAMILIES)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: cannot be read: No such file"):
        open_model(tmp_path, FAMILIES)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    expected = open_model(tmp_path / "a", FAMILIES).digest()
    assert open_model(tmp_path / "b", FAMILIES).digest() == expected
    (tmp_path / "b" / "README.md").write_text("says nothing about the weights")
    assert open_model(tmp_path / "b", FAMILIES).digest() == expected


@pytest.mark.parametrize("name", ["config.json", "model-00001", "model-00003"])
def test_the_digest_changes_with_one_byte(tmp_path: Path, name: str) -> None:
    tiny_llama.write(tmp_path)
    expected = open_model(tmp_path, FAMILIES).digest()
    path = next(path for path in tmp_path.iterdir() if path.name.startswith(name))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 if name != "config.json" else ord("\n") ^ ord(" ")
    path.write_bytes(content)
    assert open_model(tmp_path, FAMILIES).digest() != expected


def source(directory: Path, config: Any = CONFIG, dtype: str = "float32") -> ModelDirectory:
    tiny_llama.write(directory, config, dtype=dtype)
    return open_model(directory, FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("live", ["float32", "bfloat16", "float16"])
def test_fill_converts_to_the_dtype_of_the_model(tmp_path: Path, dtype: str, live: str) -> None:
    model = tiny_llama.model(seed=7)
    model.to(dtype=live)
    fill_parameters(model, source(tmp_path, dtype=dtype))
    expected = tiny_llama.values(dtype=dtype)
    for name, parameter in model.named_parameters():
        assert str(parameter.dtype) == f"paddle.{live}"
        wanted = expected[name].astype("float32").astype(live).astype("float32")
        assert np.array_equal(parameter.astype("float32").numpy(), wanted)


def test_fill_names_a_misshapen_tensor(tmp_path: Path) -> None:
    found = source(tmp_path, dataclasses.replace(CONFIG, intermediate_size=21))
    with pytest.raises(UserError) as caught:
        fill_parameters(tiny_llama.model(), found)
    assert "'model.layers.0.mlp.gate_proj.weight' is [24, 21], config.json makes it [24, 20]" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hidden_act", {}, "hidden_act is {}"),
        ("quantization_config", "gptq", "quantization_config is 'gptq'; an object is needed"),
        ("quantization_config", {"quant_method": "gptq", "bits": 3}, "quantization_config.bits is 3"),
        ("model_type", "x" * 10_000, "is not supported"),
    ],
)
def test_what_is_wrong_in_a_config_is_said_with_its_place(tmp_path: Path, key: str, value: Any, says: str) -> None:
    tiny_llama.write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError) as found:
        open_model(tmp_path, FAMILIES)
    message = str(found.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert len(message) < 1000
