"""PaddleFormers' files become recipes: adapters unless `fine_tuning` says full, bf16, one epoch, 4096 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from tests.support.paddleformers import BARE, DPO, SFT
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-paddleformers"
OLD = {key: value for key, value in BARE.items() if key != "stage"}


def test_sft_becomes_a_recipe(converted: Converted) -> None:
    found = converted(ACTION, SFT, num_devices=8)
    assert "<|im_start|>" in found.recipe["data"].pop("chat_template")
    assert found.recipe == {
        "stage": "sft", "source": "PaddleFormers x.yaml",
        "model": {"family": "qwen", "weights": "Qwen/Qwen3-0.6B", "preset": "qwen3-0.6b"},
        "data": {
            "train": "train.jsonl", "eval": "eval.jsonl", "max_length": 8192, "packing": "best_fit",
            "end_of_answer": "template", "ignore_columns": ["*"],
        },
        "parallel": {
            "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sharding": "stage1", "sequence_parallel": True,
        },
        "engine": {"precision": "bf16", "recompute": "full"}, "launch": {"num_devices": 8},
        "train": {
            "num_epochs": 1, "global_batch_size": 8, "micro_batch_size": 1, "learning_rate": 1e-5,
            "lr_schedule": "linear", "warmup_steps": 20, "warmup_from_zero": True, "eval_steps": 100,
        },
        "checkpoint": {"save_steps": 50}, "device": "gpu", "seed": 23, "output_dir": "out",
    }  # fmt: skip


def test_defaults_of_the_suite(converted: Converted) -> None:
    """Adapters, though `lora` says no: `fine_tuning` decides, and is LoRA where it is not given."""
    recipe = converted(ACTION, {**BARE, "lora": False}).recipe
    assert (recipe["stage"], recipe["lora"]) == ("lora", {"rank": 8, "alpha": 16.0, "share_first": True})
    assert recipe["train"] == {
        "num_epochs": 1, "global_batch_size": 8, "micro_batch_size": 8, "learning_rate": 5e-5, "lr_schedule": "linear",
    }  # fmt: skip
    assert recipe["data"].pop("chat_template")
    assert recipe["data"] == {
        "train": "train.jsonl", "max_length": 4096, "end_of_answer": "template", "ignore_columns": ["*"],
    }  # fmt: skip
    assert recipe["engine"] == {"precision": "bf16"}  # whatever bf16 says
    assert converted(ACTION, {**BARE, "bf16": False}).recipe["engine"] == {"precision": "bf16"}
    assert converted(ACTION, {**BARE, "compute_type": "float32"}).recipe["engine"] == {"precision": "fp32"}


def test_files_from_before_there_was_a_stage(converted: Converted) -> None:
    """They tell neither stage nor `fine_tuning`. With `--stage` their `lora` says whether there are adapters."""
    with pytest.raises(UserError, match=r"has no stage: .*write stage \(SFT, DPO or PT\) and fine_tuning"):
        converted(ACTION, {**OLD, "lora": True, "lora_rank": 8})
    assert "lora" not in converted(ACTION, OLD, stage="dpo").recipe
    assert converted(ACTION, {**OLD, "lora": True}, stage="dpo").recipe["lora"]["rank"] == 8
    assert converted(ACTION, OLD, stage="sft").recipe["stage"] == "sft"
    assert converted(ACTION, OLD, stage="lora").recipe["lora"]["alpha"] == 16.0


def test_adapters_become_the_section_lora(converted: Converted) -> None:
    def lora(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["lora"]

    llama = {"model_name_or_path": "NousResearch/Meta-Llama-3-8B-Instruct", "template": "llama3"}
    assert lora(lora_rank=32, **llama) == {"rank": 32, "alpha": 64.0}
    assert lora(rslora=True, **llama) == {"rank": 8, "alpha": 4.0, "rslora": True}
    assert lora(rslora_plus=True, **llama) == {"rank": 8, "alpha": 4.0, "rslora": True, "lora_plus_ratio": 4.0}
    found = converted(ACTION, {**BARE, "lora_alpha": 99})
    assert ("lora_alpha", 99, "is not used by its trainers, which use 16") in found.left_out


def test_adapters_on_fused_matrices_share_a_factor(converted: Converted) -> None:
    """Qwen's queries, keys and values are one matrix there. Each tensor parallel rank starts its own rows of A."""
    recipe = converted(ACTION, {**SFT, "fine_tuning": "lora"}).recipe
    assert recipe["lora"] == {"rank": 8, "alpha": 16.0, "share_first": True, "init_shards": 2}


def test_notes_on_rows(converted: Converted) -> None:
    def notes(**values: Any) -> str:
        return " ".join(converted(ACTION, {**SFT, **values}).notes)

    assert "takes the last row again" in notes(packing=False)
    assert "takes the last row again" not in notes()
    assert "takes the last row again" not in notes(packing=False, dataset_type="map", num_train_epochs=2)
    assert "for a prompt with both" in " ".join(converted(ACTION, DPO).notes)


def test_dpo_and_pretraining(converted: Converted) -> None:
    assert converted(ACTION, DPO).recipe["dpo"] == {"beta": 0.1, "loss": "sigmoid"}
    simpo = converted(ACTION, {**DPO, "loss_type": "simpo"}).recipe["dpo"]
    assert simpo == {"beta": 0.1, "loss": "simpo", "gamma": 0.5}
    assert converted(ACTION, {**DPO, "sft_loss_ratio": 0.2}).recipe["dpo"]["sft_weight"] == 0.2
    recipe = converted(ACTION, {**SFT, "stage": "PT"}).recipe
    assert (recipe["stage"], recipe["pretrain"]) == ("pretrain", {"document_mask": True})
    assert "packing" not in recipe["data"]
    causal = converted(ACTION, {**SFT, "stage": "PT", "use_global_causal_attn": True}).recipe
    assert "pretrain" not in causal


def test_devices_follow_from_the_degrees(converted: Converted) -> None:
    recipe = converted(ACTION, {**SFT, "sharding_parallel_size": 4}).recipe
    assert recipe["launch"] == {"num_devices": 8, "nnodes": 2}
    assert recipe["parallel"] == {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sharding": "stage1", "sequence_parallel": True,
    }  # fmt: skip
    assert recipe["train"]["global_batch_size"] == 16
    experts = converted(ACTION, SFT)
    assert experts.recipe["launch"] == {"num_devices": 8}  # 2 stages of 4 ranks over which there would be experts
    assert experts.recipe["train"]["global_batch_size"] == 8
    assert ("expert_model_parallel_size", 4, "belongs to models with experts") in experts.left_out
    dense = converted(ACTION, {**SFT, "expert_model_parallel_size": 1}).recipe
    assert (dense["launch"], dense["train"]["global_batch_size"]) == ({"num_devices": 4}, 4)
    cosine = converted(ACTION, {**SFT, "lr_scheduler_type": "cosine", "min_lr": 1e-6}).recipe["train"]
    assert cosine["min_lr_ratio"] == 0.1
    assert converted(ACTION, {**SFT, "truncation_strategy": "right"}).recipe["sft"] == {"truncate": True}


@pytest.mark.parametrize("key", ["tensorwise_offload_optimizer", "optimizer_cpu_offload", "offload_optim"])
def test_moments_in_host_memory(key: str, converted: Converted) -> None:
    found = converted(ACTION, {**BARE, key: True})
    assert found.recipe["engine"] == {"precision": "bf16", "offload_optimizer": True}
    assert (key, True, "engine.offload_optimizer") in found.translated
    assert "offload_optimizer" not in converted(ACTION, {**BARE, key: False}).recipe["engine"]


def test_arguments_for_experts(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "router_aux_loss_coef": 0.01})
    assert ("router_aux_loss_coef", 0.01, "belongs to models with experts") in found.left_out
    with pytest.raises(UserError, match=r"router_aux_loss_coef = 0\.01: .*train\.expert_balance_loss"):
        converted(ACTION, {**BARE, "model_name_or_path": "Qwen/Qwen3-30B-A3B", "router_aux_loss_coef": 0.01})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**SFT, "template": "ernie"}, "template = ernie: is a template of PaddleFormers"),
        ({**SFT, "template": None}, "template = not given: PaddleFormers makes one of the tokenizer's by rules of"),
        ({**SFT, "template_backend": "jinja"}, "template_backend = jinja: adds the end-of-sequence token to what"),
        ({**SFT, "template": "llama3"}, "template = llama3: writes <|start_header_id|>, which is not a token of"),
        ({**SFT, "train_dataset_type": "messages"}, "train_dataset_type = messages: its rows may have tools"),
        ({**SFT, "packing": False, "num_train_epochs": 2}, "num_train_epochs = 2: the last row of each epoch is read"),
        ({**DPO, "packing": True}, "packing = True: a pack has prompts with both answers"),
        ({**SFT, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "there, the config of the model balances its experts"),
        ({**SFT, "model_name_or_path": "baidu/ERNIE-4.5-0.3B-PT", "fine_tuning": "lora"}, "fine_tuning = LoRA"),
        ({**SFT, "train_dataset_path": "a,b"}, "train_dataset_path = a, b: files are mixed by probability"),
        ({**SFT, "convert_from_hf": False}, "convert_from_hf = False: model.weights are in the format"),
        ({**SFT, "mix_strategy": "random"}, "mix_strategy = random"),
        ({**SFT, "truncation_strategy": "oral"}, "truncation_strategy = oral"),
        ({**SFT, "stage": "PT", "packing": False}, "packing = False: samples are cut"),
        ({**SFT, "compute_type": "wint4"}, "compute_type = wint4"),
        ({**SFT, "context_parallel_size": 2}, "context_parallel_size = 2"),
        ({**SFT, "num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ({**DPO, "loss_type": "orpo"}, "loss_type = orpo"),
        ({**DPO, "reference_free": True}, "reference_free = True"),
        ({**DPO, "pref_loss_ratio": 0.5}, "pref_loss_ratio = 0.5"),
        ({**SFT, "stage": "VL-SFT"}, "stage VL-SFT is no job of a recipe"),
        ({**SFT, "model_name_or_path": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, "of type qwen3_5 or qwen3_next"),
        ({**SFT, "do_train": False}, "do_train is not true"),
        ({**SFT, "train_dataset_path": None}, "has no train_dataset_path; set it to the file"),
        ({**SFT, "dataset_type": "pretrain", "input_dir": "1.0 x"}, "input_dir = 1.0 x: nearest key: data.train"),
        ({**SFT, "learning_rat": 1}, "learning_rat = 1: is not known"),
    ],
)
def test_what_has_no_counterpart_is_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError, match=message):
        converted(ACTION, values)
