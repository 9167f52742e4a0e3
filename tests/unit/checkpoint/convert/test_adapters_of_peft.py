"""Adapters that PEFT has written or read, of routed experts and of LoRA-GA: its logits, and the files that it read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.parameters import is_factor
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, SavedAdapters
from llmsuite.checkpoint.adapter_writer import write_adapters
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from llmsuite.models.head import EMBEDDING, OUTPUT, is_tied
from tests.support.adapter_models import section, write
from tests.support.families import FAMILIES
from tests.support.paths import REFERENCE

MODELS = REFERENCE / "peft" / "models"
CASES = sorted(path.name for path in MODELS.iterdir())
WRITTEN = [case for case in CASES if case.endswith(("-pairs", "-lora_ga"))]
FULL = [case for case in CASES if case.endswith("-full")]
STACKS = [case for case in CASES if case not in (*WRITTEN, *FULL)]
LIMIT = 1e-5
"""Tolerance relative to the largest logit: float32, and the sums of both libraries have other orders."""
TARGETS = {"pairs": ["self_attn.*", "experts.*"], "lora_ga": None}


def base_of(case: str) -> Path:
    family, name, _ = case.split("-")
    return REFERENCE / family / name


def ids_of(case: str) -> Any:
    with np.load(base_of(case) / "reference.npz") as stored:
        return paddle.to_tensor(stored["input_ids"])


def check_logits(model: Any, case: str) -> None:
    model.eval()
    with np.load(MODELS / case / "reference.npz") as stored, np.load(base_of(case) / "reference.npz") as own:
        expected = stored["logits"]
        plain = own["logits"]
    max_magnitude = np.abs(expected).max()
    np.testing.assert_allclose(model(ids_of(case)).numpy(), expected, rtol=0, atol=LIMIT * max_magnitude)
    assert np.abs(plain - expected).max() > 0.1 * max_magnitude, "the adapters change something"


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return config


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_has_the_logits_of_peft(case: str) -> None:
    merged = add_adapter(open_model(base_of(case), FAMILIES), MODELS / case)
    check_logits(load_model(merged, CpuBackend()), case)
    for name in merged.names:  # of a slice, too
        full = merged.read(name)
        index = [slice(size // 3, size) for size in full.shape]
        np.testing.assert_allclose(merged.read(name, index), full[tuple(index)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_live_model_has_the_logits_of_peft_and_writes_its_files(case: str, tmp_path: Path) -> None:
    family = case.partition("-")[0]
    kind = case.rpartition("-")[2]
    lora = section(target_modules=TARGETS[kind], **({"init": "lora_ga"} if kind == "lora_ga" else {}))
    opened = open_model(base_of(case), FAMILIES)
    model = load_model(opened, CpuBackend())
    modules = adapted_modules(model, FAMILIES[family].shard_plan, lora.target_modules)
    add_adapters(model, modules, lora.adapter_config)
    metadata = config_of(MODELS / case)
    stored = adapter_config(rank=metadata["r"], alpha=metadata["lora_alpha"])
    saved = SavedAdapters(MODELS / case, Adapters(modules, stored, Base(None, "")), FAMILIES[family], opened.config)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(_factor(saved, name, lora.rank if kind == "lora_ga" else None))
    check_logits(model, case)
    write(tmp_path / "adapter", model, modules, lora, base_of(case))
    ours, theirs = (
        safetensors.numpy.load_file(path / "adapter_model.safetensors")
        for path in (tmp_path / "adapter", MODELS / case)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    written = {**config_of(tmp_path / "adapter"), "base_model_name_or_path": None}
    assert written == metadata


@pytest.mark.parametrize("case", FULL)
def test_modules_that_are_trained_in_full_are_saved_as_by_peft(case: str, tmp_path: Path) -> None:
    """PEFT's names and shapes, with the values of its own file (`modules_to_save`)."""
    opened = open_model(base_of(case), FAMILIES)
    metadata = config_of(MODELS / case)
    lora = section(target_modules=["self_attn.*"])
    model = load_model(opened, CpuBackend())
    modules = adapted_modules(model, opened.family.shard_plan, lora.target_modules)
    in_full = [EMBEDDING] if is_tied(opened.config) else [EMBEDDING, OUTPUT]
    adapters = Adapters(modules, lora.adapter_config, Base(None, ""), in_full)
    saved = SavedAdapters(MODELS / case, adapters, opened.family, opened.config)
    add_adapters(model, modules, lora.adapter_config, full_modules=[name.removesuffix(".weight") for name in in_full])
    values = {}
    for name, parameter in model.named_parameters():
        if not parameter.stop_gradient:
            values[name] = saved.read(name)
            parameter.set_value(values[name])
    check_logits(model, case)

    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    write_adapters(tmp_path, adapters, opened.family, opened.config, values.__getitem__, specs)
    ours, theirs = (
        safetensors.numpy.load_file(path / "adapter_model.safetensors") for path in (tmp_path, MODELS / case)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    written = config_of(tmp_path)
    if is_tied(opened.config):
        assert (written["modules_to_save"], written["ensure_weight_tying"]) == (["embed_tokens"], True)
        assert "embed_tokens" in metadata["modules_to_save"]
        assert metadata["ensure_weight_tying"] is True
    else:
        assert written["modules_to_save"] == metadata["modules_to_save"] == ["embed_tokens", "lm_head"]


def _factor(saved: SavedAdapters, name: str, rank: int | None) -> np.ndarray:
    """A factor of the file; of twice the rank, the half that is trained or the one that is taken off."""
    value = saved.read(name.removesuffix("0"))
    if rank is None:
        return value
    half = slice(rank, None) if name.endswith("0") else slice(rank)
    return -value[half] if name.endswith("lora_B0") else value[half] if "lora_B" in name else value[:, half]


# stacks


def copied(case: str, directory: Path, tensors: Any, **changes: Any) -> Path:
    """Adapters of PEFT with other tensors or another configuration."""
    shutil.copytree(MODELS / case, directory)
    path = directory / "adapter_model.safetensors"
    found = tensors(safetensors.numpy.load_file(path))
    safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in found.items()}, path)
    config = {**config_of(directory), **changes}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def without(*ends: str) -> Any:
    """Leaves out tensors by the ends of their names."""
    return lambda found: {name: value for name, value in found.items() if not name.endswith(ends)}


def fewer(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of seven experts."""
    cut = {name: value[:21] for name, value in found.items() if ".experts.lora_A" in name}
    return {**found, **cut, **{name: value[:, :21] for name, value in found.items() if ".experts.lora_B" in name}}


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (without("1.mlp.experts.lora_B.weight"), {}, "layers.1.mlp.experts.lora_A.weight' lacks the other factor"),
        (
            fewer,
            {},
            r"experts.lora_A.weight' \[21, 10\] and .* are no factors of the 8 experts of the base, whose gate",
        ),
        (without(), {"rank_pattern": {r".*\.gate_up_proj": 4}}, "1.mlp.experts.gate_up_proj rank 4, its factors have"),
        (without(), {"kasa_config": {"beta": 1.0}}, "kasa_config is on"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(tmp_path: Path, tensors: Any, changes: Any, message: str) -> None:
    adapter = copied(STACKS[0], tmp_path / "adapter", tensors, **changes)
    with pytest.raises(UserError, match=message):
        add_adapter(open_model(base_of(STACKS[0]), FAMILIES), adapter)


def test_stacks_without_experts_in_the_base_are_refused(tmp_path: Path) -> None:
    adapter = copied(
        STACKS[0],
        tmp_path / "adapter",
        lambda found: {name: value for name, value in found.items() if ".experts." in name},
    )
    with pytest.raises(UserError, match=r"8 tensors match no tensor of .*: base_model.model.model.layers.1.mlp.exp"):
        add_adapter(open_model(REFERENCE / "llama/grouped_query", FAMILIES), adapter)


def test_stacks_are_merged_by_the_command_and_in_no_other_layout(tmp_path: Path, capsys: Any) -> None:
    base = str(base_of("qwen_moe-qwen3-stacks"))
    adapter = str(MODELS / "qwen_moe-qwen3-stacks")
    assert main(["merge", adapter, "--base", base, "-o", str(tmp_path / "merged")]) == 0
    check_logits(load_model(open_model(tmp_path / "merged", FAMILIES), CpuBackend()), "qwen_moe-qwen3-stacks")
    capsys.readouterr()
    assert main(["convert", adapter, "--config", base, "-o", str(tmp_path / "other"), "--layout", "paddlenlp"]) == 2
    assert "target_parameters: without a counterpart in another layout; merge them" in capsys.readouterr().err
