"""`llmsuite align` of two models, in this process; two strategies are in tests/multi/test_align.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST
from tests.support.tiny_llama import CONFIG, write

CONFIG_4 = dataclasses.replace(CONFIG, num_hidden_layers=4)
WEIGHT = "model.layers.3.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two layouts, one with a weight scaled, one that is smaller."""
    directory = tmp_path_factory.mktemp("models")
    write(directory / "hf", CONFIG_4)
    write(directory / "paddlenlp", CONFIG_4, layout="paddlenlp")
    write(directory / "scaled", CONFIG_4)
    write(directory / "small", CONFIG)
    (path,) = (p for p in (directory / "scaled").glob("*.safetensors") if WEIGHT in safetensors.numpy.load_file(p))
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({**tensors, WEIGHT: tensors[WEIGHT] * np.float32(1.001)}, path, {"format": "pt"})
    return directory


@pytest.fixture
def align(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv(ALLOW_LIST, "")
    monkeypatch.chdir(models)

    def run(*words: str) -> tuple[int, str]:
        code = main(["align", *words])
        return code, "".join(capsys.readouterr())

    return run


def test_another_layout_is_the_same_model(align: Callable[..., tuple[int, str]]) -> None:
    code, output = align("hf", "paddlenlp")
    assert code == 0, output
    assert "no difference above 1e-05 (relative)\n" in output


def test_a_weight_that_was_scaled_is_named(align: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    code, output = align("hf", "scaled", f"--plot={plot}")
    assert code == 3
    assert f"first difference in the forward pass: the parameter {WEIGHT}, by 1.0e-03 (relative)" in output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith("model.")}
    assert "*" not in rows["model.layers.2"][:2]
    assert "model.layers.2.mlp" not in rows, "only the layer that differs is opened"
    assert rows["model.layers.3.mlp.gate_proj"][0] == "0.0e+00"
    assert rows["model.layers.3.mlp.up_proj"][:2] == ["1.0e-03", "*"]
    assert WEIGHT.removesuffix(".weight") in plot.read_text()


def test_the_comparison_as_json(align: Callable[..., tuple[int, str]]) -> None:
    code, output = align("hf", "scaled", "--json")
    found: Any = json.loads(output)
    assert code == 3
    assert found["names"] == ["hf", "scaled"]
    assert found["first_forward"] == {"kind": "parameter", "name": WEIGHT, "relative": pytest.approx(1e-3, rel=0.01)}
    assert found["first_backward"]["name"] == "lm_head.weight"
    assert not found["is_equal"]
    assert [row["module"] for row in found["rows"]][:3] == [
        "model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj",
    ]  # fmt: skip
    assert align("hf", "scaled", "--tolerance=0.5")[0] == 0


def test_models_of_other_shapes(align: Callable[..., tuple[int, str]]) -> None:
    code, output = align("hf", "small")
    assert code == 3
    assert "not on both sides, or of another shape: " in output
    assert WEIGHT in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hf",), "A is a directory; name another as B"),
        (("hf", "scaled", "--seed=1"), "name another as B, without recipe keys"),
        (("hf", "scaled", "--precision=bf16"), "--precision bf16: cpu has fp32"),
        (("hf", "scaled", "--device=tpu"), "no device is called 'tpu'"),
        (("hf", "scaled", "--plot=a.pdf"), "has to end in .png or .svg"),
        (("hf", "scaled", "--smoke"), "without recipe keys and --smoke"),
        (("recipe.json",), "recipe.json"),
    ],
)
def test_contradicting_options_are_refused(
    align: Callable[..., tuple[int, str]], words: tuple[str, ...], message: str
) -> None:
    code, output = align(*words)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{recipe}", "hf"), "hf is a directory and"),
        (("{recipe}", "{recipe}", "--against={{}}"), "give B or --against, not both"),
        (("{recipe}", "--against=[1]"), "--against: expected an object of recipe keys"),
        (("{recipe}", "--against=x"), "--against"),
        (("{recipe}", '--against={{"train.max_stepps": 1}}'), "unknown key; did you mean 'max_steps'?"),
        (("{recipe}", "--launch.nnodes=2"), "runs on several machines; add --smoke"),
        (("{recipe}", "--smoke", "--plot=a.pdf"), "a.pdf has to end in .png or .svg"),
        (("{recipe}", "--smoke", "--plot=none/a.png"), "none/a.png cannot be written: none is no directory"),
        (("{recipe}", "--device=tpu"), "--device=tpu: device: no device is called 'tpu'"),
        (("{recipe}", "--precision=bf16"), "--precision is for two models; for recipes set --engine.precision"),
    ],
)
def test_recipes_that_cannot_be_compared_are_refused(
    align: Callable[..., tuple[int, str]],
    write_recipe: Callable[..., Path],
    words: tuple[str, ...],
    message: str,
) -> None:
    code, output = align(*(word.format(recipe=write_recipe()) for word in words))
    assert code == 2
    assert message in output
