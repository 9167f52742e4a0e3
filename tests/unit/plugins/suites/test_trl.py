"""TRL's files become recipes: its defaults where nothing is said, and refusals where a recipe would be another job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from tests.support.trl import ADAPTERS, BARE, SFT
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-trl"


def test_sft_by_its_defaults(converted: Converted) -> None:
    """Batches of 8, 3 epochs, 2e-5 linearly, 1024 tokens, bf16 with float32 masters, activations recomputed."""
    found = converted(ACTION, SFT, stage="sft")
    assert found.recipe == {
        "stage": "sft", "source": "TRL x.yaml",
        "model": {"family": "qwen", "weights": "Qwen/Qwen2.5-0.5B", "preset": "qwen2.5-0.5b"},
        "data": {
            "train": "hf:org/rows?split=train", "max_length": 1024, "end_of_answer": "template",
            "ignore_columns": ["*"],
        },
        "engine": {"precision": "bf16", "recompute": "full"}, "launch": {"num_devices": 1},
        "train": {
            "num_epochs": 3, "global_batch_size": 8, "micro_batch_size": 8, "learning_rate": 2e-5,
            "lr_schedule": "linear",
        },
        "sft": {"truncate": True}, "checkpoint": {"save_steps": 500},
        "device": "gpu", "seed": 42, "output_dir": "runs/x",
    }  # fmt: skip


def test_answers_end_as_the_template_ends_them(converted: Converted) -> None:
    """With the line break after `<|im_end|>`, which its templates for training mark too. Prompts have no answers."""
    for stage in ("dpo", "kto", "rm"):
        assert converted(ACTION, BARE, stage=stage).recipe["data"]["end_of_answer"] == "template"
    prompts = converted(ACTION, {**BARE, "reward_funcs": ["accuracy_reward"]}, stage="grpo").recipe["data"]
    assert "end_of_answer" not in prompts


def test_trainers_of_preferences_turn_dropout_off(converted: Converted) -> None:
    """`disable_dropout` is true by default, and is for adapters too."""
    for stage in ("dpo", "kto"):
        found = converted(ACTION, {**BARE, "use_peft": True, "lora_dropout": 0.1}, stage=stage)
        assert "dropout" not in found.recipe["lora"]


def test_the_name_of_the_file_determines_the_command(converted: Converted) -> None:
    for name, stage, rate in (
        ("sft_config.yaml", "sft", 2e-5),
        ("my-dpo.yaml", "dpo", 1e-6),
        ("kto.yaml", "kto", 1e-6),
        ("reward_config.yaml", "rm", 1e-4),
    ):
        recipe = converted(ACTION, SFT if stage == "sft" else BARE, name=name).recipe
        assert (recipe["stage"], recipe["train"]["learning_rate"]) == (stage, rate)
    with pytest.raises(UserError, match="add --stage, one of sft, dpo, kto, rm and grpo"):
        converted(ACTION, SFT)


def test_adapters_become_the_section_lora(converted: Converted) -> None:
    """Rank 16, alpha 32, dropout 0.05, on queries and values: PEFT's default for these models."""
    recipe = converted(ACTION, ADAPTERS, stage="sft").recipe
    assert recipe["stage"] == "lora"
    assert recipe["lora"] == {"rank": 16, "alpha": 32.0, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}

    def lora(**values: Any) -> Any:
        return converted(ACTION, {**ADAPTERS, "lora_dropout": 0, **values}, stage="sft").recipe["lora"]

    assert lora(lora_target_modules="all-linear") == {"rank": 16, "alpha": 32.0}
    assert lora(lora_target_modules=["q_proj", "o_proj"])["target_modules"] == ["q_proj", "o_proj"]
    assert lora(load_in_4bit=True)["base_dtype"] == "nf4"  # its scales are not rounded by default
    assert lora(load_in_4bit=True, use_bnb_nested_quant=True)["base_double_quant"] is True
    assert lora(lora_r=8, use_rslora=True, use_dora=True)["method"] == "dora"


def test_preference_losses_become_a_stage_and_its_section(converted: Converted) -> None:
    assert converted(ACTION, BARE, stage="dpo").recipe["dpo"] == {"beta": 0.1, "loss": "sigmoid"}
    ipo = {**BARE, "loss_type": ["ipo"], "beta": 0.2}
    assert converted(ACTION, ipo, stage="dpo").recipe["dpo"] == {"beta": 0.2, "loss": "ipo_mean"}
    kto = converted(ACTION, {**BARE, "undesirable_weight": 1.2, "loss_type": "apo_zero_unpaired"}, stage="kto").recipe
    assert kto["kto"] == {"beta": 0.1, "loss": "apo_zero", "undesirable_weight": 1.2}
    assert kto["data"]["shuffle"] is False  # its sampler for KTO
    rm = {**BARE, "center_rewards_coefficient": 0.01, "use_peft": True, "lora_task_type": "SEQ_CLS"}
    recipe = converted(ACTION, rm, stage="rm").recipe
    assert (recipe["rm"], recipe["lora"]["rank"]) == ({"center_rewards": 0.01}, 16)


def test_data_sets_become_the_section_data(converted: Converted, tmp_path: Path) -> None:
    def data(**values: Any) -> Any:
        return converted(ACTION, {**SFT, **values}, stage="sft").recipe["data"]

    evaluated = data(eval_strategy="epoch", dataset_config="en", dataset_test_split="held")
    assert (evaluated["train"], evaluated["eval"]) == (
        "hf:org/rows?split=train&config=en", "hf:org/rows?split=held&config=en",
    )  # fmt: skip
    (tmp_path / "mine").mkdir()
    assert data(dataset_name="mine")["train"] == "mine"
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / "mine" / name).touch()
    assert data(dataset_name="mine")["train"] == "mine/train.jsonl"
    assert data(dataset_name="mine", eval_strategy="steps")["eval"] == "mine/test.jsonl"
    listed = [{"path": "json", "data_files": "mine.jsonl"}]
    assert data(dataset_name=None, datasets=listed)["train"] == "mine.jsonl"
    assert data(dataset_name=None, datasets=[{"path": "o/r", "split": "a"}])["train"] == "hf:o/r?split=a"
    several = data(dataset_name=None, datasets=[{"path": "o/a", "columns": ["messages"]},
                                                {"path": "o/b", "name": "en", "columns": ["messages"]}])  # fmt: skip
    assert several["mix"] == {"hf:o/b?split=train&config=en": None}  # each row once
    assert several["columns"] == {"messages": "messages"}
    files = data(dataset_name=None, datasets=[{"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}])
    assert (files["train"], files["mix"]) == ("a.jsonl", {"b.jsonl": None})
    assert data(packing=True)["packing"] == "best_fit"


def test_dynamic_fine_tuning(converted: Converted) -> None:
    recipe = converted(ACTION, {**SFT, "loss_type": "dft"}, stage="sft").recipe
    assert recipe["sft"] == {"truncate": True, "loss": "dft"}


def test_parameters_in_16_bits(converted: Converted) -> None:
    train = converted(ACTION, {**SFT, "dtype": "bfloat16"}, stage="sft").recipe["train"]
    assert train["master_weights"] is False
    adapters = converted(ACTION, {**SFT, "dtype": "bfloat16", "use_peft": True}, stage="sft").recipe["train"]
    assert "master_weights" not in adapters


def test_trainers_of_preferences_turn_the_dropout_of_the_model_off(converted: Converted) -> None:
    given = {**BARE, "model_name_or_path": "ByteDance-Seed/Seed-OSS-36B-Instruct"}
    assert converted(ACTION, given, stage="dpo").recipe["model"]["family"] == "seed_oss"


def test_a_strategy_becomes_degrees(converted: Converted) -> None:
    recipe = converted(ACTION, {**SFT, "accelerate_config": "zero3", "num_processes": 4}, stage="sft").recipe
    assert (recipe["parallel"], recipe["launch"]) == ({"sharding": "stage3"}, {"num_devices": 4})
    assert recipe["train"]["global_batch_size"] == 32
    plain = converted(ACTION, {**SFT, "bf16": False, "gradient_checkpointing": False}, stage="sft").recipe
    assert plain["engine"] == {"precision": "fp32"}


@pytest.mark.parametrize(
    ("values", "stage", "message"),
    [
        (BARE, "sft", "assistant_only_loss = not given: all tokens are supervised"),
        (
            {**BARE, "completion_only_loss": True},
            "sft",
            "completion_only_loss = True: prompt and completion",
        ),
        ({**SFT, "loss_type": "other"}, "sft", "loss_type = other: of TRL's losses, sft.loss has"),
        ({**SFT, "packing": True, "packing_strategy": "wrapped"}, "sft", "packing_strategy = wrapped"),
        ({**SFT, "truncation_mode": "keep_end"}, "sft", "truncation_mode = keep_end"),
        ({**SFT, "max_length": None}, "sft", "max_length = null"),
        ({**SFT, "dtype": "float16"}, "sft", "dtype = float16: train.master_weights: false is for bfloat16"),
        ({**SFT, "dtype": "bfloat16", "accelerate_config": "zero2"}, "sft", "dtype = bfloat16: with DeepSpeed or FSDP"),
        ({**SFT, "chat_template_path": "x"}, "sft", "chat_template_path = x"),
        ({**SFT, "datasets": [{"path": "a", "fraction": 0.5}]}, "sft", "datasets = fraction: data.train and data.mix"),
        ({**SFT, "datasets": [{"path": "a"}, {"path": "a"}]}, "sft", "data.mix has each file once"),
        (
            {**SFT, "datasets": [{"path": "a", "columns": ["b"]}, {"path": "c"}]},
            "sft",
            "data.columns is the same for all",
        ),
        ({**SFT, "datasets": [{"path": "a", "data_files": {"train": "x"}}]}, "sft", "name files without splits"),
        (
            {**SFT, "datasets": [{"path": "a"}], "eval_strategy": "steps"},
            "sft",
            "a mixture of datasets has no evaluation data",
        ),
        ({**SFT, "dataset_name": ".", "eval_strategy": "steps"}, "sft", "dataset_test_split = test: . has no file"),
        ({**SFT, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "sft", r"router_aux_loss_coef = 0\.001"),
        ({**SFT, "model_name_or_path": "ByteDance-Seed/Seed-OSS-36B-Instruct"}, "sft", "these models has dropout"),
        ({**SFT, "model_name_or_path": "bigcode/starcoder2-3b"}, "sft", "these models has dropout"),
        ({**ADAPTERS, "lora_task_type": "SEQ_CLS"}, "sft", "lora_task_type = SEQ_CLS"),
        ({**ADAPTERS, "load_in_8bit": True, "load_in_4bit": True}, "sft", "load_in_8bit = True: is given with 4"),
        ({**BARE, "loss_type": ["sigmoid", "sft"]}, "dpo", "loss_type = "),
        ({**BARE, "loss_type": "robust"}, "dpo", "loss_type = robust"),
        ({**BARE, "loss_type": "hinge", "label_smoothing": 0.1}, "dpo", "label_smoothing = 0.1"),
        ({**BARE, "sync_ref_model": True}, "dpo", "sync_ref_model = True"),
        ({**BARE, "use_peft": True}, "rm", "lora_task_type = CAUSAL_LM"),
        ({**BARE, "reward_funcs": ["a"]}, "grpo", "reward_funcs = "),
        (BARE, "grpo", "reward_funcs = not given"),
        (BARE, "ppo", "add --stage, one of sft, dpo, kto, rm and grpo"),
        ({"dataset_name": "x"}, "dpo", "has no model_name_or_path"),
        ({"model_name_or_path": "Qwen/Qwen2.5-0.5B"}, "dpo", "has no dataset_name and no datasets"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    values: dict[str, Any], stage: str, message: str, converted: Converted
) -> None:
    with pytest.raises(UserError, match=message):
        converted(ACTION, values, stage=stage)
