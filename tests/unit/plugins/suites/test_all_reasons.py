"""All reasons of a refusal come at once, by the keys of the file, and a wrong name in --leave_out comes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from tests.support import axolotl, llamafactory, swift, trl
from tests.unit.plugins.suites.conftest import Converted

AXOLOTL: dict[str, Any] = {
    **axolotl.BARE, "datasets": [{"path": "a", "type": "alpaca:chat"}], "train_on_inputs": True,
    "optimizer": "lion_8bit", "sample_packing": True, "warmup_steps": None,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("from-axolotl", AXOLOTL, ["train_on_inputs", "datasets", "sample_packing", "warmup_steps", "optimizer"]),
    (
        "from-llamafactory",
        {**llamafactory.DPO, "pref_ftx": 0.1, "mask_history": True, "pref_loss": "orpo", "learning_rat": 1},
        ["pref_ftx", "mask_history", "pref_loss", "learning_rat"],
    ),
    ("from-trl", {**trl.BARE, "eos_token": "<end>"}, ["eos_token", "assistant_only_loss"]),
]


def keys_of(error: UserError) -> list[str]:
    """The keys of the reasons, in their order."""
    return [line.split(" = ")[0].strip() for line in str(error).splitlines() if line.startswith("  ")]


@pytest.mark.parametrize(("action", "values", "keys"), CASES, ids=[action for action, _, _ in CASES])
def test_all_reasons_come_at_once(action: str, values: dict[str, Any], keys: list[str], converted: Converted) -> None:
    """Those that a key determines alone first, then those of reading the file, each once; waiving them is enough."""
    with pytest.raises(UserError) as refused:
        converted(action, values, stage="dpo" if "pref_loss" in values else "sft")
    assert keys_of(refused.value) == keys
    assert str(refused.value).endswith(f"add --leave_out {','.join(keys)}")
    with pytest.raises(UserError) as fewer:
        converted(action, values, stage="dpo" if "pref_loss" in values else "sft", leave_out=keys[:1])
    assert keys_of(fewer.value) == keys[1:]
    found = converted(action, values, stage="dpo" if "pref_loss" in values else "sft", leave_out=keys)
    assert [key for key, _, _ in found.refused] == keys


@pytest.mark.parametrize(
    "unreadable",
    [{"base_model": "mymodel-7b"}, {"datasets": None}, {"learning_rate": "fast"}],
    ids=["family", "data", "number"],
)
def test_unreadable_values_keep_the_reasons_of_keys(unreadable: dict[str, Any], converted: Converted) -> None:
    values = {**AXOLOTL, **unreadable}
    with pytest.raises(UserError) as refused:
        converted("from-axolotl", values)
    assert keys_of(refused.value) == ["train_on_inputs"]
    (key,) = unreadable
    with pytest.raises(UserError, match=f"{key} is '|has no {key}"):
        converted("from-axolotl", values, leave_out=["train_on_inputs"])


def test_wrong_names_to_leave_out_are_reported_with_the_reasons(converted: Converted) -> None:
    typo = r"--leave_out: x\.yaml has no val_set_syze, zzz$"
    with pytest.raises(UserError, match=typo) as refused:
        converted("from-axolotl", AXOLOTL, leave_out=["val_set_syze", "optimizer", "zzz"])
    assert keys_of(refused.value) == ["train_on_inputs", "datasets", "sample_packing", "warmup_steps"]
    for values, reason in (
        ({**AXOLOTL, "base_model": "mymodel-7b"}, "train_on_inputs = "),
        ({**axolotl.BARE, "base_model": "mymodel-7b"}, "whose family is not known"),
        ({**axolotl.BARE, "rl": "dpo"}, "recipe new --stage dpo"),
        (axolotl.BARE, ""),
    ):
        with pytest.raises(UserError, match=typo) as refused:
            converted("from-axolotl", values, leave_out=["val_set_syze", "zzz"])
        assert reason in str(refused.value)
    # a default that is refused is in no file, and may be left out
    made = converted("from-axolotl", {**axolotl.BARE, "warmup_steps": None}, leave_out=["warmup_steps"])
    assert [key for key, _, _ in made.refused] == ["warmup_steps"]


def test_arguments_that_axolotl_renames(converted: Converted) -> None:
    """The Trainer's words are its own only where they are written."""
    values = {**axolotl.BARE, "optimizer": "lion_8bit", "num_epochs": 0.5, "lr_scheduler": "rex"}
    with pytest.raises(UserError) as refused:
        converted("from-axolotl", values)
    assert keys_of(refused.value) == ["num_epochs", "lr_scheduler", "optimizer"]
    made = converted("from-axolotl", values, leave_out=["num_epochs", "lr_scheduler", "optimizer"])
    assert not {"num_epochs", "lr_scheduler", "optimizer"} & {key for key, *_ in (*made.same, *made.translated)}
    with pytest.raises(UserError, match="micro_batch_size is 'many'; expected a number"):
        converted("from-axolotl", {**axolotl.BARE, "micro_batch_size": "many"})
    with pytest.raises(UserError, match="optim = adamw_torch: is not known"):
        converted("from-axolotl", {**axolotl.BARE, "optim": "adamw_torch"})
    steps = converted("from-axolotl", {**axolotl.BARE, "max_steps": 10, "num_epochs": 2})
    assert ("num_epochs", 2, "max_steps takes precedence") in steps.left_out


@pytest.mark.parametrize(
    ("action", "values", "reason"),
    [
        ("from-axolotl", {**axolotl.FULL, "bf16": None, "fp16": True}, "fp16 = True: trains parameters in fp16"),
        (
            "from-axolotl",
            {**axolotl.BARE, "base_model": "Qwen/Qwen3-30B-A3B"},
            "lora_target_linear = True: includes routed experts",
        ),
        (
            "from-axolotl",
            {**axolotl.BARE, "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_type": "int4"}},
            r"bnb_config_kwargs\.bnb_4bit_quant_type = int4: lora\.base_dtype has",
        ),
        (
            "from-llamafactory",
            {**llamafactory.SFT, "quantization_bit": 4, "quantization_type": "int4"},
            r"quantization_type = int4: lora\.base_dtype has",
        ),
        ("from-swift", {**swift.BARE, "quant_bits": 3, "quant_method": "bnb"}, "quant_method = bnb: with 3 bits"),
        ("from-swift", {**swift.BARE, "train_type": "adalora"}, "train_type = adalora: supported are"),
    ],
)
def test_reasons_have_the_keys_of_the_file(
    action: str, values: dict[str, Any], reason: str, converted: Converted
) -> None:
    with pytest.raises(UserError, match=reason):
        converted(action, values)


def test_the_command_reports_all_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lora.yml"
    lines = ["base_model: Qwen/Qwen2.5-0.5B-Instruct", "train_on_inputs: true", "datasets: [{path: a, type: oasst}]",
             "optimizer: lion_8bit", "warmup_steps: 1"]  # fmt: skip
    path.write_text("\n".join(lines))
    assert main(["recipe", "from-axolotl", str(path), "--leave_out", "train_on_inputs,optimiser"]) == 2
    err = capsys.readouterr().err
    assert "add --leave_out datasets,optimizer\n--leave_out: lora.yml has no optimiser" in err
