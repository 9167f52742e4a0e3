"""Exported programs with stored matrices: they are the live model, and Paddle alone runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.export import export
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.verify import TOLERANCE, compare, compare_loop
from llmsuite.plugins.cpu_kernels import kernels
from tests.support.families import FAMILIES, LINEAR
from tests.support.written_family import write_family

PRECISIONS = ("bf16", "int8", "nf4", "fp4", "int4")
EVERY_EXPERT = {"qwen_moe": {"num_experts_per_tok": 8}, "ernie_moe": {"moe_k": 8}}


def live(directory: Path, precision: str) -> ModelDecoder:
    """The model of `generate --precision`, with a float32 cache."""
    model = load_model(open_model(directory, FAMILIES), CpuBackend(), packed=precision)
    fuse(model, CpuBackend().ops("fp32"))
    return ModelDecoder(model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a tied embedding, and its program in bf16."""
    place = tmp_path_factory.mktemp("stored")
    model = write_family(place / "model", "llama", tie_word_embeddings=True)
    assert main(["export", str(model), "-o", str(place / "static"), "--precision", "bf16", "--decoding_loop"]) == 0
    return model, place / "static"


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*LINEAR}))
def test_the_program_is_the_live_model(family: str, tmp_path: Path) -> None:
    source = open_model(write_family(tmp_path / "model", family), FAMILIES)
    for precision in PRECISIONS if family in ("llama", "qwen_moe") else ("bf16",):
        static = tmp_path / precision
        exported = export(source, static, CpuBackend(), source.path, precision, decoding_loop=True)
        assert (exported.has_kernels, exported.dtype) == (True, "float32")
        predictor = Predictor(static)
        trained = live(source.path, precision)
        logits, difference, tokens = compare(predictor, trained, "bf16", seed=5)
        assert (logits > 1000, tokens > 50) == (True, True)
        assert difference <= TOLERANCE["bf16"] / 2
        if family not in EVERY_EXPERT:
            assert compare_loop(predictor, trained, "bf16") > 50


@pytest.mark.parametrize("family", sorted(EVERY_EXPERT))
def test_the_decoding_loop_of_experts_is_the_live_model(family: str, tmp_path: Path) -> None:
    """All experts answer: a choice between two that are nearly alike is another one by another order of sums, which
    processors differ in, and no bound of rounding holds after it."""
    source = open_model(write_family(tmp_path / "model", family, **EVERY_EXPERT[family]), FAMILIES)
    for precision in ("bf16", "int4"):
        static = tmp_path / precision
        export(source, static, CpuBackend(), source.path, precision, decoding_loop=True)
        assert compare_loop(Predictor(static), live(source.path, precision), "bf16") > 50


def test_matrices_are_stored_and_nothing_else_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, static = pair
    assert main(["export", str(model), "-o", str(tmp_path / "fp32")]) == 0
    sizes = [(place / "model.pdiparams").stat().st_size for place in (static, tmp_path / "fp32")]
    assert sizes[0] < 0.6 * sizes[1]
    ops = re.findall(r'"#":"(?:1|3)\.(\w+)"', (static / "model.json").read_text())
    config = json.loads((model / "config.json").read_text())
    assert ops.count("llmsuite_stored_product") == 4 * config["num_hidden_layers"] + 1
    assert ops.count("llmsuite_stored_outputs") == 1
    assert {op for op in ops if op.startswith("llmsuite")} == {"llmsuite_stored_product", "llmsuite_stored_outputs"}


def test_commands_take_it(pair: tuple[Path, Path], capsys: Any) -> None:
    model, static = pair
    assert main(["verify", str(static)]) == 0
    assert "greedy tokens are the same" in capsys.readouterr().out
    message = []
    for words in (
        [str(model), "--precision", "bf16"],
        [str(static), "--engine", "static"],
        [str(static), "--engine", "static", "--decoding_loop"],
    ):
        assert main(["generate", *words, "--prompt", "Hello", "--max_new_tokens", "6"]) == 0
        message.append(capsys.readouterr().out)
    assert message[0] == message[1] == message[2]
    assert len(message[0]) > len("> Hello\n\n")


def test_paddle_alone_runs_it_as_its_readme_says(pair: tuple[Path, Path], tmp_path: Path) -> None:
    static = pair[1]
    (code,) = re.findall(r"```python\n(.*?)```", (static / "README.md").read_text(), re.DOTALL)
    assert "program_kernels.register()" in code
    assert f"np.isin(token.numpy(), {sorted(TextTokenizer(static).stop_token_ids())})" in code
    path = tmp_path / "run.py"
    path.write_text(code + 'print("SAID", *logits.numpy()[0], *("llmsuite" in name for name in sys.modules))\n')
    extensions = {"PADDLE_EXTENSION_DIR": str(tmp_path / "extensions"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=static, env=os.environ | extensions, capture_output=True, text=True, check=True
    )
    (message,) = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    numbers = [word for word in message.split()[1:] if word not in ("True", "False")]
    wanted, _ = Predictor(static).forward(np.array([[5, 6, 7]]), np.zeros(1, "int64"), None)
    assert np.abs(np.asarray(numbers, "float32") - wanted[0]).max() <= 1e-5 * np.abs(wanted).max()
    modules = "import sys, program_kernels; print([n for n in sys.modules if n.partition('.')[0] == 'llmsuite'])"
    done = subprocess.run(
        [sys.executable, "-c", modules], cwd=static / "kernels", capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_readme_of_a_plain_program_needs_no_kernels(pair: tuple[Path, Path], tmp_path: Path) -> None:
    static = tmp_path / "static"
    assert main(["export", str(pair[0]), "-o", str(static)]) == 0
    assert not (static / "kernels").exists()
    (code,) = re.findall(r"```python\n(.*?)```", (static / "README.md").read_text(), re.DOTALL)
    assert "program_kernels" not in code
    done = subprocess.run(
        [sys.executable, "-c", code + "print(int(token[0, 0]), cache[0].shape)"],
        cwd=static,
        capture_output=True,
        text=True,
        check=True,
    )
    logits, cache = Predictor(static).forward(np.array([[5, 6, 7]]), np.zeros(1, "int64"), None)
    assert done.stdout.splitlines()[-1] == f"{logits.argmax()} {cache[0].shape}"


def test_another_model_is_noticed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = live(write_family(tmp_path / "other", "llama", seed=4, tie_word_embeddings=True), "bf16")
    with pytest.raises(UserError, match="logits are off by"):
        compare(Predictor(pair[1]), other, "bf16")
    with pytest.raises(UserError, match="greedy tokens differ after"):
        compare_loop(Predictor(pair[1]), other, "bf16")


def test_what_cannot_be_stored_is_refused_by_name(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(pair[0], FAMILIES)
    target = tmp_path / "static"

    def refused(*args: Any, **named: Any) -> str:
        with pytest.raises(UserError) as error:
            export(*args, **named)
        assert not target.exists()
        return str(error.value)

    message = refused(source, target, CpuBackend(), source.path, "bf16", degrees=Degrees(1, 1, 1, 2))
    assert "--precision bf16: on cpu for one device; leave out --tensor_parallel_degree" in message
    message = "its matrices are stored for kernels that gpu does not have; export the model again with --device gpu"
    with pytest.raises(UserError, match=message):
        Predictor(pair[1], GpuBackend())
    monkeypatch.setattr(kernels, "load", lambda: False)
    with pytest.raises(UserError, match=r"kernels that are built by g\+\+; install it, or export"):
        Predictor(pair[1])
    monkeypatch.setattr("llmsuite.plugins.cpu_kernels.libraries.shutil.which", lambda name: None)
    assert "needs kernels that are built by g++; install it, or use fp32" in refused(
        source, target, CpuBackend(), source.path, "bf16"
    )
