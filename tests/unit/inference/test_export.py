"""Exported models: the program of every family is the model, and verifying notices when it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.export import export
from llmsuite.inference.export_manifest import read_manifest
from llmsuite.inference.fused import fuse
from llmsuite.inference.generate import Generator, generate
from llmsuite.inference.load import load_model, parameter_shapes
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.verify import check_files, compare, compare_loop
from tests.support.adapter_models import adapted, section, write
from tests.support.families import FAMILIES, LINEAR
from tests.support.written_family import write_family


@pytest.fixture(scope="module", params=[*sorted({*FAMILIES} - {*LINEAR}), "mistral"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and what was exported from it; the mistral has a window that most texts are longer than."""
    place = tmp_path_factory.mktemp("export")
    window = {"model_type": "mistral", "sliding_window": 5}
    family, shape = ("llama", window) if request.param == "mistral" else (request.param, {})
    source = open_model(write_family(place / "model", family, **shape), FAMILIES)
    export(source, place / "static", CpuBackend(), source.path, decoding_loop=True)
    return place / "model", place / "static"


def live(directory: Path) -> ModelDecoder:
    return ModelDecoder(load_model(open_model(directory, FAMILIES), CpuBackend()))


def test_the_program_is_the_model(pair: tuple[Path, Path]) -> None:
    model, static = pair
    assert check_files(static, model) > 4
    logits, difference, tokens = compare(Predictor(static), live(model), "fp32", seed=5)
    assert logits > 1000
    assert difference <= 1e-5
    assert tokens > 50


def test_a_program_attends_to_compressed_keys_with_few_new_tokens(tmp_path: Path) -> None:
    """With 25 positions expanded keys and values are less work in this shape: both forms are in the program."""
    source = open_model(write_family(tmp_path / "model", "deepseek", kv_lora_rank=32), FAMILIES)
    export(source, tmp_path / "static", CpuBackend(), source.path)
    ops = set(re.findall(r'"#":"1\.(\w+)"', (tmp_path / "static" / "model.json").read_text()))
    assert {"if", "matmul"} <= ops
    model = load_model(source, CpuBackend())
    program = Predictor(tmp_path / "static")
    for layer in model.model.layers:
        layer.self_attn.can_absorb = False
    full = ModelDecoder(model)
    ids = np.random.default_rng(0).integers(3, 500, (2, 80))
    padding = np.asarray([0, 3])
    caches: list[Any] = [None, None]
    for begin, end in ((0, 24), (24, 25), (25, 50), (50, 74), (74, 80)):
        (expected, caches[0]), (found, caches[1]) = (
            decoder.forward(ids[:, begin:end], padding, cache)
            for decoder, cache in zip((full, program), caches, strict=True)
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("program", ["model.json", "loop.json"])
def test_the_program_runs_on_any_x86_64(pair: tuple[Path, Path], program: str) -> None:
    """On the CPU these ops of Paddle 3.3.1 are compiled for AVX-512, and do not look whether it is there."""
    ops = set(re.findall(r'"#":"1\.(\w+)"', (pair[1] / program).read_text()))
    assert {"matmul", "softmax"} <= ops
    assert not ops & {"rms_norm", "fused_rms_norm", "fused_bias_residual_layernorm", "self_dp_attention"}


def test_lines_of_a_predictor_come_and_go_as_those_of_the_model(pair: tuple[Path, Path]) -> None:
    from llmsuite.data.tokenizer import TextTokenizer

    prompts = [[5], [9, 300, 44, 7, 7, 120], [80, 81, 82], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
    sampling = Sampling(max_new_tokens=7, temperature=1.0, seed=2)
    predictor = Predictor(pair[1])
    tokenizer = TextTokenizer(pair[1])
    together = Generator(predictor, tokenizer, set()).answers(prompts, sampling, batch_size=3)
    decoder = live(pair[0])
    for prompt, (answer,) in zip(prompts, together):
        assert list(answer.ids) == list(generate(decoder, prompt, set(), sampling))


def test_the_decoding_loop_makes_the_tokens_of_the_model(pair: tuple[Path, Path]) -> None:
    predictor = Predictor(pair[1])
    trained = live(pair[0])
    assert compare_loop(predictor, trained) > 100
    draw = np.random.default_rng(1)
    for lengths, count in (([1], 1), ([3, 17], 20), ([9], 12), ([2, 2, 5, 1, 8], 7)):
        prompts = [[int(i) for i in draw.integers(0, predictor.vocab_size, n)] for n in lengths]
        expected = [list(generate(trained, p, set(), Sampling(max_new_tokens=count))) for p in prompts]
        assert predictor.greedy(prompts, count) == expected
        ends = {expected[-1][count // 2], expected[0][-1]}
        cut = [list(generate(trained, p, ends, Sampling(max_new_tokens=count))) for p in prompts]
        assert min(map(len, cut)) < count
        assert predictor.greedy(prompts, count, ends) == cut
    with pytest.raises(UserError, match="context length is"):
        predictor.greedy([[1], [2] * predictor.max_length], 1)


def test_generate_runs_the_decoding_loop(llama: Path, tmp_path: Path, capsys: Any) -> None:
    static = tmp_path / "static"
    asked = tmp_path / "asked.jsonl"
    assert main(["export", str(llama), "-o", str(static), "--decoding_loop"]) == 0
    assert not (static / "loop.pdiparams").exists()
    assert main(["verify", str(static)]) == 0
    asked.write_text(
        "".join(json.dumps({"prompt": text, "key": 1}) + "\n" for text in ("Hello", "What is 2 + 2?", "1"))
    )
    common = ["--input", str(asked), "--max_new_tokens", "9", "--batch_size", "2"]
    rows = []
    for words in ([str(llama)], [str(static), "--engine", "static", "--decoding_loop"]):
        target = tmp_path / f"{len(words)}.jsonl"
        assert main(["generate", *words, *common, "--output", str(target)]) == 0
        rows.append(target.read_text())
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 3
    for words, message in (
        ([str(llama), "--decoding_loop"], "add --engine static"),
        ([str(static), "--engine", "static", "--decoding_loop", "--temperature", "1"], "leave out --temperature"),
    ):
        assert main(["generate", *words, "--prompt", "Hi"]) == 2
        assert message in capsys.readouterr().err
    (static / "loop.json").unlink()
    assert main(["generate", str(static), "--engine", "static", "--decoding_loop", "--prompt", "Hi"]) == 2
    assert "loop.json is missing" in capsys.readouterr().err


def test_a_pass_leaves_what_passes_before_it_gave(pair: tuple[Path, Path]) -> None:
    """Paddle writes results where those of an earlier run lie, when there is room."""
    predictor = Predictor(pair[1])
    trained = live(pair[0])
    draw = np.random.default_rng(0)
    rows = draw.integers(0, predictor.vocab_size, [3, 12])
    padding = np.zeros(3, "int64")
    kept = [predictor.forward(rows[:, : 12 - i], padding, None)[1] for i in range(4)]
    before = [[tensor.numpy().copy() for tensor in cache] for cache in kept]
    cache = expected_cache = None
    for step in range(5):
        new = rows[:, :4] if step == 0 else rows[:, step : step + 1]
        logits, cache = predictor.forward(new, padding, cache)
        expected, expected_cache = trained.forward(new, padding, expected_cache)
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    for values, tensors in zip(before, kept):
        assert all(np.array_equal(value, tensor.numpy()) for value, tensor in zip(values, tensors))


def test_fused_layers_give_the_same(pair: tuple[Path, Path]) -> None:
    source = open_model(pair[0], FAMILIES)
    ids = np.asarray([[7, 300, 12, 9], [0, 5, 41, 8]])
    model = load_model(source, CpuBackend())
    names = {name for name, _ in model.named_parameters()}
    before = model(paddle.to_tensor(ids)).numpy()
    fuse(model)
    assert np.abs(model(paddle.to_tensor(ids)).numpy() - before).max() <= 1e-5 * np.abs(before).max()
    now = {name for name, _ in model.named_parameters()}
    assert (now == names) == (source.family.name in ("gpt", "gemma", "granite_moe", "minimax"))
    assert sum(p.size for p in model.parameters()) == sum(
        int(np.prod(shape)) for shape in parameter_shapes(source.family, source.config).values()
    )
    logits = ModelDecoder(model).forward(ids, np.asarray([0, 1]), None)[0]
    expected = live(pair[0]).forward(ids, np.asarray([0, 1]), None)[0]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


def test_another_model_is_noticed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    family = json.loads((pair[0] / "config.json").read_text())["model_type"]
    name = next(f.name for f in FAMILIES.values() if family in f.hf_model_types)
    other = write_family(tmp_path / "other", name, seed=4)
    with pytest.raises(UserError, match=r"is not what .* was exported from"):
        check_files(pair[1], other)
    with pytest.raises(UserError, match="logits are off by"):
        compare(Predictor(pair[1]), live(other), "fp32")
    if name in ("granite", "granite_moe"):
        return  # their small models repeat the last token of a prompt, whatever the seed
    with pytest.raises(UserError, match="greedy tokens differ"):
        compare_loop(Predictor(pair[1]), live(other))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_family(tmp_path / "model", "llama")


def test_a_changed_file_is_noticed(llama: Path, tmp_path: Path, capsys: Any) -> None:
    static = tmp_path / "static"
    assert main(["export", str(llama), "-o", str(static)]) == 0
    assert main(["verify", str(static)]) == 0
    assert "greedy tokens are the same" in capsys.readouterr().out
    assert main(["generate", str(static), "--prompt", "Hi"]) == 2
    assert "is an exported program, not a model; `generate` and `serve` run it with" in capsys.readouterr().err
    parameters = static / "model.pdiparams"
    content = bytearray(parameters.read_bytes())
    content[len(content) // 2] ^= 1
    parameters.write_bytes(content)
    assert main(["verify", str(static)]) == 2
    assert "model.pdiparams does not have the sha256 it was written with" in capsys.readouterr().err
    parameters.write_bytes(content[:-4])
    assert main(["generate", str(static), "--engine", "static", "--prompt", "Hi"]) == 2
    assert "model.pdiparams has" in capsys.readouterr().err


def test_the_program_of_an_adapter_is_compared_with_both(llama: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = tmp_path / "adapter"
    static = tmp_path / "static"
    model, modules = adapted("llama", llama, section())
    write(adapter, model, modules, section(), llama)
    assert main(["export", str(adapter), "-o", str(static)]) == 0
    assert main(["verify", str(static)]) == 0
    assert main(["verify", str(static), "--source", str(llama)]) == 2
    assert "adapter_config.json: is missing, so nothing can be compared with it" in capsys.readouterr().err
    moved = adapter.rename(tmp_path / "moved")
    (moved / "base.json").unlink()  # the program knows which model it was added to
    assert main(["verify", str(static)]) == 2
    assert main(["verify", str(static), "--source", str(moved)]) == 0
    other = write_family(tmp_path / "other", "llama", seed=4)
    capsys.readouterr()
    assert main(["verify", str(static), "--source", str(moved), "--base", str(other)]) == 2
    assert "is not what" in capsys.readouterr().err
    config = moved / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    assert main(["verify", str(static), "--source", str(moved)]) == 2
    assert f"{config}: is not what {static} was exported from" in capsys.readouterr().err


def test_deploy_writes_all_or_nothing(llama: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "deployed"
    assert main(["deploy", str(llama), "-o", str(target), "--precision", "fp16"]) == 2
    assert "--precision fp16: cpu has fp32, bf16, int8" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert main(["deploy", str(llama), "-o", str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == ["hf", "static"]
    assert read_manifest(target / "static").source == str(target / "hf")
    assert main(["verify", str(target)]) == 0
    said = []
    for engine in ("dynamic", "static"):
        capsys.readouterr()
        assert main(["generate", str(target), "--engine", engine, "--prompt", "Hello", "--max_new_tokens", "6"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert len(said[0]) > len("> Hello\n\n")
    assert main(["generate", str(target), "--engine", "static", "--decoding_loop", "--prompt", "Hello"]) == 2
    assert "has no decoding loop; export the model with --decoding_loop" in capsys.readouterr().err
    assert main(["deploy", str(llama), "-o", str(target)]) == 2
    assert "exists; choose another" in capsys.readouterr().err


def test_a_program_runs_where_no_kernel_of_ours_is_loaded(llama: Path, tmp_path: Path) -> None:
    assert main(["export", str(llama), "-o", str(tmp_path / "static"), "--decoding_loop"]) == 0
    code = f"""
import numpy as np
from pathlib import Path
from llmsuite.inference.predictor import Predictor
predictor = Predictor(Path({str(tmp_path / "static")!r}))
print(predictor.greedy([[5, 9]], 4)[0], predictor.forward(np.array([[5, 9]]), np.array([0]), None)[0].argmax())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = list(generate(live(llama), [5, 9], set(), Sampling(max_new_tokens=4)))
    assert done.stdout.split("\n")[-2] == f"{expected} {expected[0]}"


def test_what_is_no_exported_model_is_named(llama: Path, capsys: Any) -> None:
    assert main(["generate", str(llama), "--engine", "static", "--prompt", "Hi"]) == 2
    assert f"holds no exported model; make one with `llmsuite export {llama} -o DIR`" in capsys.readouterr().err
    assert main(["export", str(llama), "-o", str(llama / "x"), "--precision", "fp16"]) == 2
    assert "--precision fp16: cpu has fp32" in capsys.readouterr().err
