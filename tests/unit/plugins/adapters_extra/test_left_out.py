"""Recipes and adapters in files whose method --no-plugins leaves out: refused, with the name of the plugin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.adapters.methods import BUILT_IN, METHODS
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.cli.main import main
from llmsuite.plugins.adapters_extra import methods
from tests.support.adapter_models import base_of

LEFT_OUT = "adapter method {!r} is in the plugin adapters_extra, which --no-plugins leaves out"
MODULE = "model.layers.0.self_attn.q_proj"

EXTRA = methods()


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The methods that a process with --no-plugins knows."""
    with monkeypatch.context() as patch:
        for method in EXTRA:
            patch.delitem(METHODS, method.name)
        yield


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--no-plugins", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("method", [method.name for method in EXTRA])
def test_a_recipe_with_such_a_method_is_refused(
    method: str, write_recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe({"lora": {"rank": 2, "method": method}})
    said = refused(capsys, "validate", str(recipe))
    assert f"lora.method: {LEFT_OUT.format(method)}\n" in said
    assert len(said.splitlines()) == 1


def test_other_value_is_said_to_be_none_of_those_that_are_left(
    write_recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe({"lora": {"rank": 2, "method": "veras"}})
    assert 'expected one of: lora, dora, found "veras"\n' in refused(capsys, "validate", str(recipe))
    assert set(METHODS.values()) == set(BUILT_IN)


FILES: Mapping[str, tuple[str, dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    "vera": (
        "vera_config.json",
        {"r": 2, "vera_alpha": 4},
        "vera_model_state.pdparams",
        {"vera_A": (64, 2), "vera_B": (2, 64), "vera_d": (2,), "vera_b": (64,)},
    ),
    "lokr": (
        "adapter_config.json",
        {"peft_type": "LOKR", "r": 2, "alpha": 4},
        "adapter_model.safetensors",
        {"lokr_w1": (8, 8), "lokr_w2": (8, 8)},
    ),
    "mora": (
        "adapter_config.json",
        {"peft_type": "MORA", "use_mora": True, "r": 2},
        "adapter_model.safetensors",
        {"lora_square": (16, 16)},
    ),
    "mixer": (
        "lora_config.json",
        {"r": 2, "lora_alpha": 4, "lora_use_mixer": True},
        "lora_model_state.pdparams",
        {"lora_A": (64, 2), "lora_AB": (2, 2), "lora_B": (2, 64)},
    ),
}
"""Of each method the file with its configuration, what is in it, that with its parameters, and their shapes."""


@pytest.mark.parametrize("command", ["merge", "convert"])
@pytest.mark.parametrize("method", FILES)
def test_files_of_such_a_method_are_refused(
    method: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_of("llama", tmp_path / "base")
    config_name, config, tensors_name, shapes = FILES[method]
    directory = tmp_path / "adapter"
    directory.mkdir()
    named = {**config, "base_model_name_or_path": str(tmp_path / "base")}
    (directory / config_name).write_text(json.dumps(named))
    values = {f"{MODULE}.{kind}": np.ones(shape, "float32") for kind, shape in shapes.items()}
    if tensors_name.endswith(".safetensors"):
        safetensors.numpy.save_file(values, directory / tensors_name)
    else:
        write_pickle(directory / tensors_name, values)
    words = ["--allow-pickle"] if command == "merge" else ["--layout", "hf"]
    said = refused(capsys, command, str(directory), "-o", str(tmp_path / "out"), *words)
    assert said == f"{directory / config_name}: {LEFT_OUT.format(method)}\n"
    assert not (tmp_path / "out").exists()
