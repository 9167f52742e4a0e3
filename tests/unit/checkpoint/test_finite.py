"""Values that are NaN or infinite are counted by their bits, and none are written unless that is wanted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmsuite.checkpoint.finite import NonFiniteError, count_nonfinite, first_nonfinite, raise_on_nonfinite
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.tensor_writer import WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from tests.conftest import PluginSite
from tests.support import tiny_llama
from tests.support.served_adapters import write_adapter
from tests.support.tiny_llama import FAMILIES

CONFIG = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512, hidden_size=64, intermediate_size=64, head_dim=16)
WHERE = "model.layers.1.mlp.down_proj.weight"


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int8"]),
    bits=arrays.arrays("uint64", st.integers(0, 40), elements=st.integers(0, 2**64 - 1)),
    turned=st.booleans(),
)
def test_nonfinite_values_are_counted_exactly(dtype: str, bits: np.ndarray, turned: bool) -> None:
    """Whatever the bits are: of each dtype all patterns, and none of integers."""
    values = bits.view("uint8").view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = values.reshape(2, -1).T if turned and values.size % 2 == 0 else values
    expected = 0 if dtype.startswith("int") else int((~np.isfinite(values.astype("float64"))).sum())
    assert count_nonfinite(values) == expected


def test_all_values_of_large_arrays_and_scalars_are_counted() -> None:
    values = np.zeros((1 << 20) + 3, "f4")
    values[[0, 1 << 20, (1 << 20) + 2]] = np.nan, np.inf, -np.inf
    assert count_nonfinite(values) == 3
    assert count_nonfinite(np.array(np.nan)) == 1
    assert count_nonfinite(np.array(np.finfo("float32").max, "f4")) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_writer_counts_all_parts_of_a_tensor(tmp_path: Path, dtype: str) -> None:
    value = np.zeros([4, 3], dtype)
    value[0, 1] = np.nan
    value[3, 2] = -np.inf
    specs = [TensorSpec("a", (2,), "float32"), TensorSpec("b", (4, 3), dtype)]

    def read(name: str) -> Any:
        return np.ones(2, "f4") if name == "a" else iter([value[:2], value[2:]])

    with pytest.raises(NonFiniteError, match="'b' has 2 of 12 values that are not finite"):
        write_tensors(tmp_path, "model", specs, read, {}, WriteOptions(on_nonfinite=raise_on_nonfinite(tmp_path)))
    write_tensors(tmp_path, "model", specs, read, {})
    path = next(tmp_path.glob("*.safetensors"))
    assert "'b' has 2 of 12" in str(first_nonfinite([path]))


# the commands


def write(directory: Path, count: int = 3) -> Path:
    """A model of which one tensor has values that are not finite."""
    tiny_llama.write(directory, CONFIG, tokenizer=tiny_llama.TOKENIZER)
    for path in directory.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path)
        if WHERE in tensors:
            tensors[WHERE].reshape(-1)[:count] = [np.nan, np.inf, -np.inf][:count]
            safetensors.numpy.save_file(tensors, path)
    (directory / "manifest.json").unlink(missing_ok=True)
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of three such values, a good one, and an adapter to that of NaN."""
    found = tmp_path_factory.mktemp("finite")
    write(found / "model")
    tiny_llama.write(found / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    adapter = write_adapter(found / "adapter", "a", {"base_model_name_or_path": str(found / "base")}, config=CONFIG)
    path = adapter / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors[min(tensors)][0, :2] = np.nan
    safetensors.numpy.save_file(tensors, path)
    (found / "texts.txt").write_text("hello world " * 80)
    return found


CALIBRATE = ("calibrate", "--texts", "{place}/texts.txt", "--max_length", "32", "--windows", "1")
COMMANDS = {
    "merge": ("merge",),
    "merge bf16": ("merge", "--dtype", "bf16"),
    "merge fp8": ("merge", "--dtype", "fp8"),
    "merge fp16": ("merge", "--dtype", "fp16"),
    "merge paddlenlp": ("merge", "--layout", "paddlenlp"),
    "merge fused": ("merge", "--layout", "paddlenlp", "--fused"),
    "merge distcp": ("merge", "--layout", "distcp"),
    "merge gguf": ("merge", "--layout", "gguf"),
    "merge gguf fp32": ("merge", "--layout", "gguf", "--dtype", "fp32"),
    "convert": ("convert", "--layout", "paddlenlp"),
    "import": ("import",),
    "import paddlenlp": ("import", "--layout", "paddlenlp"),
    "calibrate nf4": CALIBRATE,
    "calibrate int4": (*CALIBRATE, "--precision", "int4"),
    "export": ("export",),
    "deploy": ("deploy",),
}


def run(place: Path, target: Path, source: str, *words: str) -> int:
    name, *more = (word.format(place=place) for word in words)
    return main([name, str(place / source), "-o", str(target), *more])


@pytest.mark.parametrize("command", COMMANDS)
def test_nonfinite_tensors_are_refused_by_name(
    command: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, tmp_path / "out", "model", *COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert "not finite" in said
    assert "--allow-nonfinite" in said
    assert str(place / "model") in said
    assert "down_proj" in said
    assert " 3 of 4,096 values" in said or "fp8" in command or "fused" in command
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.parametrize("command", ["merge", "merge distcp", "merge gguf", "deploy", "calibrate nf4"])
def test_an_adapter_that_is_not_finite_is_named(
    command: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, tmp_path / "out", "adapter", *COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert "adapter_model.safetensors: 'base_model.model.model.layers." in said
    assert " has 2 of " in said
    assert not list(tmp_path.iterdir())


def test_nonfinite_adapters_in_another_layout_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, tmp_path / "out", "adapter", "convert", "--layout", "paddlenlp") == 2
    assert "has 2 of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run(place, tmp_path / "out", "adapter", "convert", "--layout", "paddlenlp", "--allow-nonfinite") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("merge",),
        ("merge", "--dtype", "bf16"),
        ("convert", "--layout", "paddlenlp"),
        ("import",),
    ],
)
def test_nonfinite_values_are_written_if_allowed(words: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path / "out", "model", *words, "--allow-nonfinite") == 0
    found = open_model(tmp_path / "out", FAMILIES).read(WHERE).astype("float32")
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(open_model(place / "model", FAMILIES).read(WHERE)))


@pytest.mark.parametrize("layout", ["distcp", "gguf"])
def test_allowed_nonfinite_values_are_written_in_other_layouts(layout: str, place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path / "out", "model", "merge", "--layout", layout, "--allow-nonfinite") == 0
    assert any((tmp_path / "out").iterdir())


def test_a_matrix_that_overflows_its_new_dtype_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest numbers of float32 are infinite in bfloat16."""
    write(tmp_path / "model", count=0)
    for path in (tmp_path / "model").glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path)
        if WHERE in tensors:
            tensors[WHERE][0, 0] = np.finfo("float32").max
            safetensors.numpy.save_file(tensors, path)
    assert main(["merge", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--dtype", "bf16"]) == 2
    assert "1 of 4,096 values" in capsys.readouterr().err


def test_a_gguf_file_with_nonfinite_values_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("merge", "--layout", "gguf", "--dtype", "fp32", "--allow-nonfinite")
    assert run(place, tmp_path / "gguf", "model", *words) == 0
    file = str(tmp_path / "gguf" / "model.gguf")
    assert main(["import", file, "-o", str(tmp_path / "out")]) == 2
    assert f"{file}: '{WHERE}' has 3 of 4,096" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["import", file, "-o", str(tmp_path / "out"), "--allow-nonfinite"]) == 0


def test_nonfinite_scales_of_quantised_files_are_reported(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scales of a GPTQ checkpoint that are not finite make its matrices so."""
    assert run(place, tmp_path / "gptq", "base", *COMMANDS["calibrate int4"]) == 0
    path = next((tmp_path / "gptq").glob("*.safetensors"))
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.scales"))
    tensors[name][0, 0] = np.inf
    safetensors.numpy.save_file(tensors, path)
    manifest = tmp_path / "gptq" / "manifest.json"
    assert json.loads(manifest.read_text())
    manifest.unlink()
    assert main(["convert", str(tmp_path / "gptq"), "-o", str(tmp_path / "out"), "--layout", "hf"]) == 2
    said = capsys.readouterr().err
    assert "q_proj.scales' has 1 scales that are not finite" in said
    assert str(path) in said


READS = """
    from llmsuite.checkpoint.tensor_writer import write_tensors
    specs = [model.spec(name) for name in model.names]
    write_tensors(directory, "model", specs, model.read, {"format": "pt"})
"""
COPIES = """
    for path in model.files.paths:
        shutil.copy(path, directory)
    shutil.copy(model.path / "model.safetensors.index.json", directory)
"""
MAKES = """
    from llmsuite.checkpoint.tensor_writer import write_tensors
    from llmsuite.checkpoint.tensors import TensorSpec
    specs = [TensorSpec("t", (2,), "float32")]
    write_tensors(directory, "model", specs, lambda name: np.array([1, np.nan], "float32"), {"format": "pt"})
"""
EXPORTER = """
import shutil

import numpy as np

from llmsuite import hookimpl
from llmsuite.contract.specs import Exporter


def write(model, directory):
    shutil.copy(model.path / "config.json", directory)
{body}

@hookimpl
def llmsuite_register_exporters():
    return [Exporter(name="other", help="a layout of a plugin", write=write)]
"""


@pytest.mark.parametrize(("body", "source"), [(READS, "model"), (COPIES, "model"), (MAKES, "base")])
def test_output_of_a_plugin_exporter_is_checked(
    body: str, source: str, place: Path, tmp_path: Path, site: PluginSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("other-layout", EXPORTER.format(body=body))
    words = ("import", "--layout", "other")
    assert run(place, tmp_path / "out", source, *words) == 2
    said = capsys.readouterr().err
    assert "not finite" in said
    assert "--allow-nonfinite" in said
    assert not list(tmp_path.glob("out*")), "nothing is left"
    if body != MAKES:  # which is no model
        assert run(place, tmp_path / "out", source, *words, "--allow-nonfinite") == 0
