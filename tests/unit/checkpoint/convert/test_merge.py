"""Merging and converting: equal tensors in every form, damaged sources named, and killed processes that resume."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file, sha256_of
from llmsuite.checkpoint import tensor_writer
from llmsuite.checkpoint.convert import rewrite as retensor_writer
from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
from llmsuite.checkpoint.convert.sources import open_source
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.inference.load import parameter_shapes
from llmsuite.recipe.shape import missing_model
from tests.support import tiny_llama
from tests.support.paths import ROOT
from tests.support.tiny_llama import CONFIG, FAMILIES, TOKENIZER


@pytest.mark.parametrize("config", [CONFIG, tiny_llama.tied()], ids=["untied", "tied"])
@pytest.mark.parametrize("part_bytes", [1 << 25, 100])
def test_there_and_back_is_bit_equal(
    tmp_path: Path, config: Any, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_writer, "_CHUNK_BYTES", part_bytes)  # so that tensors are read in parts
    expected = tiny_llama.write(tmp_path / "a", config, tokenizer=TOKENIZER)
    forms = [
        OutputFormat("paddlenlp"),
        OutputFormat("paddlenlp", fused=True),
        OutputFormat("hf", max_file_bytes=3000),
        OutputFormat("paddlenlp"),
        OutputFormat("hf"),
    ]
    for name, source, form in zip("bcdef", "abcde", forms):
        Rewrite(open_model(tmp_path / source, FAMILIES), form).write(tmp_path / name)
        assert tiny_llama.same(tiny_llama.read(tmp_path / name), expected), name
        assert broken_file(tmp_path / name) is None
        assert (tmp_path / name / "tokenizer.json").is_file()
    assert (tmp_path / "f/config.json").read_bytes() == (tmp_path / "a/config.json").read_bytes()
    assert json.loads((tmp_path / "c/config.json").read_text())["fuse_attention_qkv"] is True
    fused = safetensors.numpy.load_file(tmp_path / "c/model-00001-of-00001.safetensors")
    assert fused["llama.layers.0.self_attn.qkv_proj.weight"].shape == (24, 32)


@pytest.mark.parametrize(("option", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_command_writes_the_requested_dtype_and_files(
    tmp_path: Path, option: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tiny_llama.write(tmp_path / "a", dtype="float16")
    words = ["-o", str(tmp_path / "b"), "--layout", "hf", "--dtype", option, "--split-num", "3"]
    assert main(["convert", str(tmp_path / "a"), *words]) == 0
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(files) == 3
    assert f"21 tensors in 3 files, 0 MB of {dtype}, hf layout" in capsys.readouterr().out
    max_magnitude = max(value.nbytes for value in values.values()) * np.dtype(dtype).itemsize // 2
    assert max(f.stat().st_size for f in files) < sum(f.stat().st_size for f in files) / 3 + max_magnitude + 2000
    for name, value in tiny_llama.read(tmp_path / "b").items():
        assert value.tobytes() == values[name].astype("float32").astype(dtype).tobytes()
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["torch_dtype"] == dtype
    # torch wants each tensor at a multiple of its size
    for file in files:
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__")
        assert all((start + t["data_offsets"][0]) % np.dtype(dtype).itemsize == 0 for t in header.values())


def test_mixed_dtypes_are_kept_and_aligned(tmp_path: Path) -> None:
    values = tiny_llama.write(tmp_path / "a", dtype="bfloat16")
    file = tmp_path / "a/model.safetensors"
    model = open_model(tmp_path / "a", FAMILIES)
    stored = {n: np.ascontiguousarray(model.files.read(n)) for n in model.files.names}
    stored |= {n: v.astype("float32") for n, v in stored.items() if "norm" in n}
    for old in (tmp_path / "a").glob("model*"):
        old.unlink()
    safetensors.numpy.save_file(stored, file)
    Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("paddlenlp")).write(tmp_path / "b")
    for name, value in tiny_llama.read(tmp_path / "b").items():
        assert value.dtype == (np.float32 if "norm" in name else ml_dtypes.bfloat16)
        assert np.array_equal(value.astype("float32"), values[name].astype("float32"))


def test_the_manifest_lists_every_tensor(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a")
    Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf", max_file_bytes=3000)).write(tmp_path / "b")
    manifest = json.loads((tmp_path / "b/manifest.json").read_text())
    model = open_model(tmp_path / "b", FAMILIES)
    assert {key.split(":")[1] for key in manifest["tensors"]} == set(model.files.names)
    for key, entry in manifest["tensors"].items():
        file, name = key.split(":")
        value = safetensors.numpy.load_file(tmp_path / "b" / file)[name]
        assert entry["shape"] == list(value.shape)
        assert (entry["dtype"], entry["size"]) == (value.dtype.name, value.nbytes)
        assert entry["sha256"] == retensor_writer.hashlib.sha256(value.tobytes()).hexdigest()


@given(data=st.data())
def test_any_corrupted_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "corrupted"
    if not directory.exists():
        tiny_llama.write(directory.with_name("source"), tokenizer=TOKENIZER)
        Rewrite(open_model(directory.with_name("source"), FAMILIES), OutputFormat("hf")).write(directory)
    files = sorted(p for p in directory.iterdir() if p.name != "manifest.json")
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[at] ^ data.draw(st.integers(1, 255))
    try:
        path.write_bytes(content[:at] + bytes([changed]) + content[at + 1 :])
        assert str(path) in (broken_file(directory) or "")
    finally:
        path.write_bytes(content)
    assert broken_file(directory) is None


def error(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama.write(tmp_path / "a")
    a = str(tmp_path / "a")
    b = str(tmp_path / "b")
    for words, message in [
        (["merge", str(tmp_path / "none"), "-o", b], "is not a directory"),
        (["merge", str(tmp_path), "-o", b], "holds no model; looked for model.safetensors"),
        (["merge", a, "-o", a], "exists; choose another --output"),
        (
            ["merge", a, "-o", b, "--max-shard-size", "5 apples"],
            "'5 apples' is no amount of bytes",
        ),
        (["merge", a, "-o", b, "--max-shard-size", "5GB", "--split-num", "2"], "give one of them"),
        (["merge", a, "-o", b, "--split-num", "22"], "--split-num is 22; the model has 21 tensors"),
        (["merge", a, "-o", b, "--fused"], "add --layout paddlenlp"),
        (["merge", a, "-o", b, "--base", a], "is no LoRA adapter"),
    ]:
        assert message in error(*words, capsys=capsys), words
    assert not Path(b).exists()
    assert not Path(b + ".part").exists()


def test_a_gguf_file_is_to_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    expected = f"{file} is a GGUF file; make a model directory of it with `llmsuite import {file} -o DIR`\n"
    for place in (file, tmp_path):
        assert error("merge", str(place), "-o", str(tmp_path / "b"), capsys=capsys) == expected
        assert f"{missing_model(place)}\n" == expected


def test_another_shape_or_family_than_that_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama.write(tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    words = ["merge", str(tmp_path / "a"), "-o", str(tmp_path / "b")]
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "intermediate_size": 21}))
    assert "6 tensors have another shape: model.layers.0.mlp.gate_proj.weight is [24, 20]" in error(
        *words, capsys=capsys
    )
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "missing 9: model.layers.2" in error(*words, capsys=capsys)
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    assert "'mamba' is not supported" in error(*words, capsys=capsys)


def test_values_too_large_for_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama.write(tmp_path / "a")
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    path = tmp_path / "a" / index["weight_map"]["model.norm.weight"]
    values = safetensors.numpy.load_file(path)
    values["model.norm.weight"][3] = 70000.0
    safetensors.numpy.save_file(values, path)
    words = ["convert", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--layout=hf"]
    text = error(*words, "--dtype=fp16", capsys=capsys)
    assert "'model.norm.weight' has values too large for fp16" in text
    assert main([*words, "--dtype=bf16"]) == 0


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama.write(tmp_path / "a")
    rewrite = Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=rewrite.num_bytes - 1))
    with pytest.raises(UserError, match=r"b: needs 0\.0 GB; .* has 0\.0 GB left"):
        rewrite.write(tmp_path / "b")
    assert not (tmp_path / "b.part").exists()


# a run that is killed

SLOW = """
import sys, time
from pathlib import Path
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
from llmsuite.checkpoint.convert.sources import open_source
from tests.support.tiny_llama import FAMILIES
Rewrite(open_model(Path(sys.argv[1]), FAMILIES), OutputFormat("paddlenlp", max_file_bytes=3000)).write(
    Path(sys.argv[2]), lambda num_bytes: time.sleep(0.05))
"""


def test_kill_9_and_again_skips_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_llama.write(tmp_path / "a")
    target = tmp_path / "b"
    part = tmp_path / "b.part"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "a"), str(target)], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (part / "journal.jsonl").exists() or (part / "journal.jsonl").read_text().count('"file"') < 3:
        assert process.poll() is None, "it was done before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    lines = (part / "journal.jsonl").read_text().splitlines()
    done = [json.loads(line)["file"] for line in lines if line.endswith("}")]
    times = {name: (part / name).stat().st_mtime_ns for name in done}
    damaged = part / done[1]  # and one of them suffers meanwhile
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    written = []
    original = tensor_writer.TensorFile

    def write_file(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(tensor_writer, "TensorFile", write_file)
    model = open_model(tmp_path / "a", FAMILIES)
    Rewrite(model, OutputFormat("paddlenlp", max_file_bytes=3000)).write(target)
    assert tiny_llama.same(tiny_llama.read(target), expected)
    assert broken_file(target) is None
    assert not part.exists()
    assert {p.name for p in target.iterdir() if p.name.startswith(".") or "journal" in p.name} == set()
    all_files = {path.name for path in target.glob("*.safetensors")}
    assert set(written) == all_files - (set(done) - {done[1]})
    assert all((target / name).stat().st_mtime_ns == times[name] for name in done if name != done[1])


def test_unfinished_files_of_another_model_are_deleted(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a")
    model = open_model(tmp_path / "a", FAMILIES)

    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rewrite(model, OutputFormat("hf", dtype="float16")).write(tmp_path / "b", stop)
    assert (tmp_path / "b.part").is_dir()
    expected = tiny_llama.write(tmp_path / "a", seed=1)
    Rewrite(model, OutputFormat("hf")).write(tmp_path / "b")
    assert tiny_llama.same(tiny_llama.read(tmp_path / "b"), expected)


def test_two_processes_do_not_mix_their_files(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a")
    rewrite = Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf"))

    def again(num_bytes: int) -> None:
        with pytest.raises(UserError, match="another run is writing there"):
            rewrite.write(tmp_path / "b")

    rewrite.write(tmp_path / "b", again)
    assert broken_file(tmp_path / "b") is None


# adapters


def test_a_damaged_source_is_named_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a", tokenizer=TOKENIZER)
    source = tmp_path / "b"
    Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf")).write(source)
    manifest = json.loads((source / "manifest.json").read_text())
    tensor = "model.layers.1.mlp.up_proj.weight"
    file, entry = next((k.split(":")[0], e) for k, e in manifest["tensors"].items() if k.endswith(f":{tensor}"))
    for name, at, words in [
        (file, entry["start"] + entry["size"] - 1, [file, repr(tensor), "sha256 in its manifest.json"]),
        (file, 30, [file, "sha256 in its manifest.json"]),
        ("config.json", 12, ["config.json does not have the sha256"]),
        ("tokenizer.json", 100, ["tokenizer.json does not have the sha256"]),
    ]:
        full = (source / name).read_bytes()
        # neither the header's length nor the form of JSON
        (source / name).write_bytes(full[:at] + bytes([full[at] ^ 1]) + full[at + 1 :])
        for form in (
            OutputFormat("hf"),
            OutputFormat("paddlenlp"),
            OutputFormat("hf", "bfloat16"),
            OutputFormat("paddlenlp", fused=True),
        ):
            with pytest.raises(UserError) as caught:
                Rewrite(open_source(source, FAMILIES, parameter_shapes), form).write(tmp_path / "c")
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert not (tmp_path / "c").exists()
        (source / name).write_bytes(full)
    (source / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json: has no sizes"):
        open_source(source, FAMILIES, parameter_shapes)
    (source / "manifest.json").unlink()  # as in directories that others have written
    Rewrite(open_source(source, FAMILIES, parameter_shapes), OutputFormat("paddlenlp")).write(tmp_path / "c")
    assert tiny_llama.same(tiny_llama.read(tmp_path / "c"), tiny_llama.read(tmp_path / "a"))


def test_a_manifest_with_one_hash_per_file(tmp_path: Path) -> None:
    """The form that earlier versions of llmsuite wrote."""
    tiny_llama.write(tmp_path / "a")
    Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf")).write(tmp_path / "b")
    manifest = json.loads((tmp_path / "b/manifest.json").read_text())
    for name, entry in manifest["files"].items():
        manifest["files"][name] = {"size": entry["size"], "sha256": sha256_of(tmp_path / "b" / name)}
    for entry in manifest["tensors"].values():
        del entry["start"]
    (tmp_path / "b/manifest.json").write_text(json.dumps(manifest))
    assert broken_file(tmp_path / "b") is None
    open_source(tmp_path / "b", FAMILIES, parameter_shapes)
    file = next((tmp_path / "b").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert str(file) in (broken_file(tmp_path / "b") or "")
    with pytest.raises(UserError, match="does not have the sha256"):
        open_source(tmp_path / "b", FAMILIES, parameter_shapes)


def test_a_manifest_that_leaves_bytes_out(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "a")
    Rewrite(open_model(tmp_path / "a", FAMILIES), OutputFormat("hf")).write(tmp_path / "b")
    manifest = json.loads((tmp_path / "b/manifest.json").read_text())
    manifest["tensors"].pop(sorted(manifest["tensors"], key=lambda name: manifest["tensors"][name]["start"])[1])
    (tmp_path / "b/manifest.json").write_text(json.dumps(manifest))
    assert "does not cover every byte of model-00001" in (broken_file(tmp_path / "b") or "")
