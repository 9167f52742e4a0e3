"""ms-swift's megatron commands become recipes: Megatron's arguments of batches, schedules and degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites.swift import read_shell
from tests.support.swift import MEGATRON, MEGATRON_DPO
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-swift"


def test_sft_by_its_defaults(converted: Converted) -> None:
    """Full fine-tuning in bf16 with float32 main parameters, cosine, decay 0.1, steps of 16 samples."""
    found = converted(ACTION, MEGATRON)
    assert "You are Qwen" in found.recipe["data"].pop("chat_template")
    assert found.recipe == {
        "stage": "sft", "source": "ms-swift x.yaml",
        "model": {"family": "qwen", "weights": "ms:Qwen/Qwen2.5-7B-Instruct", "preset": "qwen2.5-7b"},
        "data": {
            "train": "rows.jsonl", "max_length": 2048, "end_of_answer": "template", "ignore_columns": ["*"],
        },
        "engine": {"precision": "bf16"}, "launch": {"num_devices": 1},
        "train": {
            "num_epochs": 2, "global_batch_size": 16, "micro_batch_size": 1, "learning_rate": 1e-5,
            "lr_schedule": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95,
        },
        "checkpoint": {"save_steps": 500}, "device": "gpu", "seed": 42, "output_dir": "runs/x",
    }  # fmt: skip


def test_batches_degrees_and_schedule(converted: Converted) -> None:
    values = {
        **MEGATRON, "NPROC_PER_NODE": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "sequence_parallel": True, "micro_batch_size": 4, "global_batch_size": 32, "lr": 2e-5, "min_lr": 2e-6,
        "lr_warmup_fraction": 0.05, "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 1, "optimizer_cpu_offload": True, "clip_grad": 0.5, "adam_eps": 1e-6,
        "cross_entropy_loss_fusion": True, "finetune": True, "no_save_optim": True, "packing": True,
    }  # fmt: skip
    recipe = converted(ACTION, values).recipe
    assert recipe["parallel"] == {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": True, "sharding": "stage1",
    }  # fmt: skip
    train = recipe["train"]
    assert (train["global_batch_size"], train["micro_batch_size"]) == (32, 4)
    assert (train["learning_rate"], train["min_lr_ratio"], train["warmup_ratio"]) == (2e-5, 0.1, 0.05)
    assert (train["warmup_from_zero"], train["max_grad_norm"], train["adam_epsilon"]) == (True, 0.5, 1e-6)
    assert recipe["engine"] == {"precision": "bf16", "recompute": "full", "offload_optimizer": True}
    assert recipe["data"]["packing"] == "best_fit"


def test_adapters_on_fused_matrices_share_a_factor(converted: Converted) -> None:
    """Queries, keys and values are one matrix there, gate and up too. Each tensor parallel rank starts its own rows of
    A."""
    one = converted(ACTION, {**MEGATRON, "tuner_type": "lora", "lora_dropout": 0}).recipe
    assert (one["stage"], one["lora"]) == ("lora", {"rank": 8, "alpha": 32.0, "share_first": True})
    values = {**MEGATRON, "tuner_type": "lora", "NPROC_PER_NODE": 2, "tensor_model_parallel_size": 2, "lora_rank": 16}
    recipe = converted(ACTION, values | {"target_modules": "all-linear", "use_rslora": True}).recipe
    assert recipe["lora"] == {
        "rank": 16, "alpha": 32.0, "dropout": 0.05, "rslora": True, "share_first": True, "init_shards": 2,
    }  # fmt: skip
    experts = {**MEGATRON, "model": "Qwen/Qwen3-30B-A3B-Instruct-2507", "tuner_type": "lora"}
    assert converted(ACTION, experts).recipe["lora"]["target_modules"] == ["*_proj"]


def test_constant_rates_have_a_warm_up(converted: Converted) -> None:
    """Unlike those of the Trainer of transformers."""
    found = converted(ACTION, {**MEGATRON, "lr_decay_style": "constant", "lr_warmup_iters": 7, "min_lr": 1e-6})
    assert (found.recipe["train"]["lr_schedule"], found.recipe["train"]["warmup_steps"]) == ("constant", 7)
    assert "min_lr_ratio" not in found.recipe["train"]
    assert ("min_lr", 1e-6, "the learning rate is constant") in found.left_out


def test_the_longer_of_two_lengths_that_counts(converted: Converted) -> None:
    steps = {**MEGATRON, "num_train_epochs": None, "train_iters": 30, "lr_decay_iters": 30}
    assert converted(ACTION, steps).recipe["train"]["max_steps"] == 30
    both = converted(ACTION, {**MEGATRON, "train_iters": 30, "lr_warmup_iters": 2, "lr_warmup_fraction": 0.1})
    assert both.recipe["train"]["num_epochs"] == 2
    assert ("train_iters", 30, "num_train_epochs takes precedence") in both.left_out
    assert ("lr_warmup_iters", 2, "lr_warmup_fraction takes precedence") in both.left_out


def test_samples_that_do_not_fill_a_step(converted: Converted) -> None:
    """Megatron rounds the number of steps down, over all epochs."""
    one = converted(ACTION, {**MEGATRON, "num_train_epochs": 1})
    assert one.recipe["data"]["drop_last"] is True
    several = converted(ACTION, MEGATRON)
    assert "drop_last" not in several.recipe["data"]
    assert any("at the end of the run those that do not fill a step" in note for note in several.notes)


def test_context_parallelism_changes_no_batch(converted: Converted) -> None:
    """Global batches are given, whatever the number of data ranks."""
    found = converted(ACTION, {**MEGATRON, "NPROC_PER_NODE": 4, "context_parallel_size": 2})
    assert found.recipe["train"]["global_batch_size"] == 16
    assert ("context_parallel_size", 2) in [(key, value) for key, value, _ in found.left_out]


def test_preference_losses_become_a_stage_and_its_section(converted: Converted) -> None:
    dpo = converted(ACTION, {**MEGATRON_DPO, "beta": 0.2, "label_smoothing": 0.1}).recipe
    assert (dpo["stage"], dpo["dpo"]) == ("dpo", {"beta": 0.2, "loss": "sigmoid", "label_smoothing": 0.1})
    kto = converted(ACTION, {**MEGATRON_DPO, "rlhf_type": "kto", "desirable_weight": 1.5}).recipe
    assert (kto["stage"], kto["kto"]) == ("kto", {"beta": 0.1, "desirable_weight": 1.5})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MEGATRON_DPO, "tuner_type": "lora"}, "tuner_type = lora: adapters have dropout there; with adapters only"),
        ({**MEGATRON, "tuner_type": "lora_llm"}, "tuner_type = lora_llm: supported are full fine-tuning"),
        (
            {**MEGATRON, "tuner_type": "lora", "target_modules": ["linear_qkv", "linear_proj"]},
            "target_modules = linear_qkv, linear_proj: names matrices of Megatron's model",
        ),
        ({**MEGATRON, "num_train_epochs": None}, "neither num_train_epochs nor train_iters"),
        ({**MEGATRON, "global_batch_size": 10, "micro_batch_size": 4}, "global_batch_size is 10; expected a multiple"),
        ({**MEGATRON, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2: is no argument of megatron"),
        ({**MEGATRON, "optimizer": "muon"}, "optimizer = muon"),
        ({**MEGATRON, "exp_avg_dtype": "bf16"}, "exp_avg_dtype = bf16: optimizer states"),
        ({**MEGATRON, "calculate_per_token_loss": False}, "calculate_per_token_loss = False"),
        ({**MEGATRON, "lr_decay_style": "WSD"}, "lr_decay_style = WSD"),
        ({**MEGATRON, "train_iters": 9, "num_train_epochs": None, "lr_decay_iters": 5}, "lr_decay_iters = 5"),
        ({**MEGATRON, "lr_warmup_init": 1e-7}, "lr_warmup_init = 1e-07"),
        ({**MEGATRON, "moe_aux_loss_coeff": 1e-3}, "moe_aux_loss_coeff = 0.001: is a load-balancing loss"),
        ({**MEGATRON, "fp8_format": "hybrid"}, "fp8_format = hybrid"),
        ({**MEGATRON, "mcore_model": "there"}, "mcore_model = there"),
        ({**MEGATRON, "finetune": False}, "finetune = False: continues a run"),
        ({**MEGATRON, "per_device_train_batch_size": 2}, "per_device_train_batch_size = 2: is not known"),
        ({**MEGATRON_DPO, "loss_type": "ipo"}, "loss_type = ipo: sums the log-probabilities"),
        ({**MEGATRON_DPO, "rlhf_type": "rm"}, "rlhf_type rm has a head whose initial values"),
        ({**MEGATRON_DPO, "rlhf_type": "gkd"}, "rlhf_type gkd is only converted from swift rlhf"),
    ],
)
def test_other_jobs_are_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError) as refused:
        converted(ACTION, values)
    assert message in str(refused.value)


def test_a_script_is_read_as_its_arguments(tmp_path: Path, converted: Converted) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen2.5-7B-Instruct --dataset rows.jsonl --max_length 512 \\\n"
        "  --train_iters 20 --tensor_model_parallel_size 2 --global_batch_size $(expr 64 / 4 / 2)\n",
        encoding="utf-8",
    )
    values = read_shell(file)
    assert (values["command"], values["global_batch_size"]) == ("megatron sft", 8)
    recipe = converted(ACTION, values).recipe
    assert (recipe["launch"], recipe["train"]["global_batch_size"]) == ({"num_devices": 4}, 8)
