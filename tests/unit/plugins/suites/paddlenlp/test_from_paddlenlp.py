"""PaddleNLP's argument files become recipes: the same numbers, and nothing of them is lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.learning_rate import LearningRate
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text
from tests.support.paddlenlp_arguments import DPO, LORA, PRETRAIN, SFT, Convert


def test_pretrain_becomes_a_recipe(converted: Convert) -> None:
    recipe = converted(PRETRAIN).recipe
    assert recipe["stage"] == "pretrain"
    assert recipe["model"] == {
        "family": "llama", "tokenizer": "facebook/llama-13b", "preset": "llama-13b",
        "config": {"num_hidden_layers": 10},
    }  # fmt: skip
    assert recipe["pretrain"] == {"split": "949,50,1", "max_eval_samples": 10 * 8 * 2}  # of two data ranks
    assert recipe["parallel"] == {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline_schedule": "1F1B", "sharding": "stage1",
        "sequence_parallel": True, "fuse_projections": True,
    }  # fmt: skip
    assert recipe["engine"] == {"mode": "dynamic", "precision": "bf16", "recompute": "selective"}
    assert recipe["train"] == {
        "max_steps": 1000, "global_batch_size": 16, "micro_batch_size": 2, "learning_rate": 3e-5,
        "lr_schedule": "cosine", "warmup_steps": 30, "min_lr_ratio": 0.1,
        "weight_decay": 0.01, "adam_beta2": 0.95, "max_grad_norm": 1.0, "eval_steps": 250,
    }  # fmt: skip
    assert recipe["checkpoint"] == {"save_steps": 500, "keep_last": 3}
    assert (recipe["launch"], recipe["device"], recipe["seed"]) == ({"num_devices": 8}, "gpu", 1234)


def test_continued_pretraining_begins_with_the_weights(converted: Convert) -> None:
    model = converted({**PRETRAIN, "continue_training": True}).recipe["model"]
    assert model["weights"] == "facebook/llama-13b"
    assert "tokenizer" not in model


def test_several_corpora(converted: Convert) -> None:
    recipe = converted({**PRETRAIN, "input_dir": "0.6 corpora/a 0.3 corpora/b 0.1 corpora/c"}).recipe
    assert recipe["data"]["train"] == "corpora/a"
    assert recipe["pretrain"]["mix"] == pytest.approx({"corpora/b": 0.5, "corpora/c": 1 / 6})


def test_the_corpus_of_a_directory(converted: Convert, tmp_path: Path) -> None:
    (tmp_path / "text.idx").touch()
    found = converted({**PRETRAIN, "input_dir": str(tmp_path)})
    assert found.recipe["data"]["train"] == str(tmp_path / "text")
    assert found.notes == [note for note in found.notes if not note.startswith("data.train")]
    (tmp_path / "code.idx").touch()  # all of them count alike then
    both = converted({**PRETRAIN, "input_dir": str(tmp_path)}).recipe
    assert (both["data"]["train"], both["pretrain"]["mix"]) == (str(tmp_path / "code"), {str(tmp_path / "text"): 1.0})


def test_fused_matrices_are_fused_projections_where_that_changes_something(converted: Convert) -> None:
    """Under tensor parallel, unless layers are compiled or there are adapters."""
    both = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
    for values, fuses in (
        ({**SFT, **both}, True),
        ({**SFT, "fuse_attention_ffn": True}, True),
        ({**SFT, "fuse_attention_ffn": False}, False),
        ({**SFT, **both, "tensor_parallel_degree": 1}, False),
        ({**SFT, **both, "to_static": True}, False),
        ({**LORA, **both}, False),
    ):
        found = converted(values)
        assert found.recipe["parallel"].get("fuse_projections", False) is fuses
        ignored = {key: why for key, _, why in found.left_out if key.startswith("fuse_")}
        assert all("parallel.fuse_projections" in why for why in ignored.values())
        assert (ignored != {}) is (not fuses)
        assert any(note.startswith("parallel.fuse_projections") for note in found.notes) is fuses


def test_sft_becomes_a_recipe(converted: Convert) -> None:
    found = converted(SFT)
    recipe = found.recipe
    left = {key: why for key, _, why in found.left_out}
    assert recipe["stage"] == "sft"
    assert recipe["model"]["weights"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert recipe["model"]["preset"] == "llama-3.1-8b"
    assert recipe["data"] == {
        "train": "./data/train.json", "eval": "./data/dev.json", "max_length": 3072, "packing": "best_fit",
        "ignore_columns": ["*"],
    }  # fmt: skip
    assert recipe["train"]["num_epochs"] == 3
    assert recipe["train"]["global_batch_size"] == 2 * 4 * 4
    assert recipe["sft"] == {"truncate": True}
    assert recipe["train"]["eval_steps"] == recipe["checkpoint"]["save_steps"] == "epoch"
    best = {"best_metric": "eval/tokens/accuracy", "best_is": "highest"}
    assert recipe["checkpoint"] == {"save_steps": "epoch", "keep_last": 2, **best}
    assert (recipe["train"]["warmup_steps"], recipe["train"]["warmup_from_zero"]) == (30, True)
    assert not any("best_metric" in note for note in found.notes)
    assert "data.max_length" in left["src_length"]


def test_chat_template(converted: Convert) -> None:
    for own in ({}, {"chat_template": ""}, {"chat_template": SFT["model_name_or_path"]}):
        found = converted({**SFT, **own})
        assert "chat_template" not in found.recipe["data"]
        assert any(note.startswith("data.chat_template: the tokenizer's") for note in found.notes)
    with pytest.raises(UserError, match="--stage grpo: cannot be converted to"):
        converted(SFT, stage="grpo")
    for given, why in (("none", "src and tgt are concatenated"), ("./chat_template.json", "is a file in Paddle")):
        with pytest.raises(UserError, match=f"chat_template = {given}: {why}"):
            converted({**SFT, "chat_template": given})
    assert not any("chat_template" in note for note in converted(PRETRAIN).notes)


def test_generated_answers(converted: Convert) -> None:
    asks = {**SFT, "eval_with_do_generation": True}
    found = converted({**asks, "metric_for_best_model": "rougel"})
    assert found.recipe["generation"] == {"max_new_tokens": 3071}  # top_k 1 takes the most likely token
    assert found.recipe["checkpoint"]["best_metric"] == "eval/rougel"
    assert found.recipe["checkpoint"]["best_is"] == "highest"
    sampled = converted({**asks, "top_k": 5, "top_p": 0.7, "save_generation_output": True}).recipe
    assert sampled["generation"] == {"max_new_tokens": 3071, "temperature": 1.0, "top_k": 5, "top_p": 0.7, "save": True}
    assert sampled["checkpoint"]["best_metric"] == "eval/loss"
    assert any("eval/loss, for accuracy" in note for note in converted(asks).notes)
    plain = converted({**SFT, "top_p": 0.7})
    assert "generation" not in plain.recipe
    assert ("top_p", 0.7, "belongs to eval_with_do_generation") in plain.left_out
    with_prefix = converted({**asks, "prefix_tuning": True})
    assert "generation" not in with_prefix.recipe
    assert any(key == "eval_with_do_generation" and "prefix" in why for key, _, why in with_prefix.left_out)


def test_dpo_with_adapters(converted: Convert) -> None:
    recipe = converted(DPO, num_devices=16).recipe
    assert recipe["stage"] == "dpo"
    assert recipe["dpo"] == {"loss": "hinge", "beta": 0.2}
    assert recipe["lora"] == {
        "rank": 64, "alpha": 4.0, "rslora": True, "lora_plus_ratio": 4.0,
        "target_modules": [
            "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        ],
    }  # fmt: skip
    assert (recipe["data"]["train"], recipe["data"]["eval"]) == ("./data/train.jsonl", "./data/dev.jsonl")
    assert recipe["data"]["packing"] == "best_fit"  # run_dpo.py packs always
    assert recipe["train"]["expert_balance_loss"] == 0.001  # aux_loss_alpha of its config.json
    assert recipe["engine"]["offload_optimizer"] is True
    assert recipe["launch"] == {"num_devices": 8, "nnodes": 2}
    assert recipe["parallel"] == {"tensor_parallel_degree": 4, "sharding": "stage1", "expert_parallel_degree": 2}
    assert recipe["checkpoint"]["best_metric"] == "eval/loss"
    assert recipe["train"]["max_steps"] == 100
    assert recipe["train"]["warmup_steps"] == 10


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"warmup_steps": 30, "warmup_ratio": 0.1}, {"warmup_steps": 30, "warmup_from_zero": True}),
        ({"warmup_steps": 0, "warmup_ratio": 0.07}, {"warmup_steps": 8, "warmup_from_zero": True}),  # ceil, unrounded
        ({"warmup_steps": 0, "warmup_ratio": 0.07, "max_steps": -1}, {"warmup_ratio": 0.07, "warmup_from_zero": True}),
        ({"warmup_steps": 0}, {}),
        ({"lr_scheduler_type": "constant"}, {}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"warmup_steps": 10, "warmup_from_zero": True}),
    ],
)
def test_warm_up(values: dict[str, Any], expected: dict[str, Any], converted: Convert) -> None:
    train = converted({**DPO, **values}).recipe["train"]
    assert {key: value for key, value in train.items() if key.startswith("warmup")} == expected


def test_the_schedule_of_run_pretrain(converted: Convert) -> None:
    """Its LinearAnnealingWithWarmupDecay and its like begin at step 1: the first of W steps has 1/W of the rate, and
    they decay to 1e-5 unless set otherwise. A share of the steps is not rounded up there."""
    values = {"lr_scheduler_type": "linear", "max_steps": 100, "warmup_steps": 0, "warmup_ratio": 0.07}
    bare = {key: value for key, value in {**PRETRAIN, **values}.items() if key != "min_learning_rate"}
    found = converted(bare)
    train = found.recipe["train"]
    assert (train["warmup_steps"], train.get("warmup_from_zero"), train["min_lr_ratio"]) == (7, None, 0.333333)
    assert any("one step later" in note for note in found.notes)
    section = TrainSection(**{**train, "eval_steps": None})
    rates = [LearningRate(section, 100).at(step) for step in range(1, 101)]
    peak = 3e-5
    least = 1e-5
    warm = 0.07 * 100
    theirs = [
        peak * step / warm if step <= warm else least + (peak - least) * (1 - (step - warm) / (100 - warm))
        for step in range(1, 101)
    ]
    assert rates[:6] == pytest.approx(theirs[:6])
    assert rates[8:] == pytest.approx(theirs[7:-1])  # from the peak on one step later
    kept = converted({**PRETRAIN, "lr_scheduler_type": "constant_with_warmup"}).recipe["train"]
    assert (kept["warmup_from_zero"], kept.get("min_lr_ratio")) == (True, None)  # the trainer's
    with pytest.raises(UserError, match="min_learning_rate = 1e-05, the default: is above learning_rate 5e-06"):
        converted({**bare, "learning_rate": 5e-6})


def test_defaults_of_the_scripts(converted: Convert) -> None:
    """`warmup_ratio` aside, an argument that is not given has PaddleNLP's value, not ours."""
    simpo = converted({**DPO, "loss_type": "simpo"}).recipe["dpo"]
    assert simpo == {"loss": "simpo", "beta": 0.2, "gamma": 0.5}
    assert converted({**DPO, "loss_type": "ipo"}).recipe["dpo"]["loss"] == "ipo_mean"
    fewer = {key: value for key, value in PRETRAIN.items() if key not in ("split", "save_steps", "max_seq_length")}
    recipe = converted(fewer).recipe
    assert (recipe["pretrain"]["split"], recipe["checkpoint"]["save_steps"]) == ("949,50,1", 500)
    assert recipe["data"]["max_length"] == 1024
    epochs = {key: value for key, value in SFT.items() if key not in ("num_train_epochs", "evaluation_strategy")}
    assert converted(epochs).recipe["train"]["num_epochs"] == 1
    assert converted(epochs).recipe["train"]["eval_steps"] == 1  # logging_steps, as do_eval means steps
    bare = {key: value for key, value in DPO.items() if key not in ("eval_steps", "logging_steps")}
    assert converted(bare).recipe["train"]["eval_steps"] == 500
    del bare["per_device_train_batch_size"]
    assert converted(bare).recipe["train"]["micro_batch_size"] == 8
    assert not any("keep_last" in note for note in converted(PRETRAIN).notes)
    assert any("the 2 newest are kept" in note for note in converted(bare).notes)
    longer = converted({**PRETRAIN, "model_name_or_path": "facebook/llama-7b", "max_seq_length": 4096}).recipe
    assert longer["model"]["config"]["max_position_embeddings"] == 4096


def test_a_strategy_becomes_degrees(converted: Convert) -> None:
    names = {"pipeline_schedule_mode": "FThenB", "sharding_offload": True, "enable_auto_parallel": 1}
    found = converted({**PRETRAIN, **names, "data_parallel_degree": 4})
    assert found.recipe["parallel"]["pipeline_schedule"] == "FThenB"
    assert found.recipe["engine"]["offload_optimizer"] is True
    assert found.recipe["launch"] == {"num_devices": 8, "nnodes": 4}
    left = {key: why for key, _, why in found.left_out}
    assert "section parallel" in left["enable_auto_parallel"]
    assert not {"pipeline_schedule_mode", "sharding_offload", "data_parallel_degree"} & left.keys()


def test_packing_becomes_a_key(converted: Convert) -> None:
    """A sample of theirs is a pack with zero_padding, which flash_mask sets, and always for preferences."""
    plain = {**SFT, "zero_padding": False}
    assert "packing" not in converted(plain).recipe["data"]
    assert converted({**plain, "flash_mask": True}).recipe["data"]["packing"] == "best_fit"
    assert "packing" not in converted({**plain, "greedy_zero_padding": True}).recipe["data"]
    found = converted({**DPO, "expert_parallel_degree": 1})
    assert found.recipe["data"]["packing"] == "best_fit"
    assert any("twice as many pairs" in note for note in found.notes)
    with pytest.raises(UserError, match="counts packs of rows there; rows are not packed in stage kto"):
        converted({**DPO, "loss_type": None}, stage="kto")
    rows = converted({**DPO, "loss_type": None}, stage="kto", leave_out=["per_device_train_batch_size"])
    assert rows.recipe["train"]["micro_batch_size"] == 2
    assert "packing" not in rows.recipe["data"]


@pytest.mark.parametrize("values", [PRETRAIN, SFT, DPO], ids=["pretrain", "sft", "dpo"])
def test_converted_recipes_are_valid(
    values: dict[str, Any], converted: Convert, registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(recipe_text(converted(values).recipe))
    plan = plan_run(path, [], registry)
    assert plan.parallel.accumulate_steps == values["gradient_accumulation_steps"]


@pytest.mark.parametrize("values", [PRETRAIN, SFT, LORA, DPO], ids=["pretrain", "sft", "lora", "dpo"])
def test_no_argument_is_lost(values: dict[str, Any], converted: Convert) -> None:
    """Taking one away changes the recipe or the list, or it says what is so anyway."""
    anyway = {"logging_steps", "virtual_pp_degree", "seed", "eval_steps", "fp16_opt_level", "device", "lora_rank"}
    anyway |= {"sharding_parallel_degree", "recompute_granularity", "to_static", "max_grad_norm", "label_smoothing"}
    anyway |= {"continue_training", "warmup_ratio", "do_eval", "save_strategy", "evaluation_strategy", "recompute"}
    anyway |= {"num_train_epochs", "save_steps", "lora", "tokenizer_name_or_path", "do_train", "split"}
    anyway |= {"per_device_eval_batch_size", "pissa"}
    full = converted(values)
    for key in values.keys() - anyway - {"model_name_or_path", "input_dir", "train_dataset_path", "learning_rate"}:
        if key == "dataset_name_or_path":
            continue
        assert converted({k: v for k, v in values.items() if k != key}, stage=full.recipe["stage"]) != full, key


@pytest.mark.parametrize(("device", "schedule"), [("cpu", "interleaved"), ("gpu", "interleaved"), ("xpu", "1F1B")])
def test_chunks_where_the_device_runs_them(
    device: str, schedule: str, converted: Convert, registry: Registry, tmp_path: Path
) -> None:
    values = {**PRETRAIN, "virtual_pp_degree": 2, "pipeline_schedule_mode": "VPP", "device": device, "bf16": False}
    found = converted(values)
    parallel = found.recipe["parallel"]
    assert (parallel["pipeline_schedule"], parallel.get("virtual_pipeline_degree", 1)) == (
        schedule,
        1 if device == "xpu" else 2,
    )
    said = [why for key, _, why in found.left_out if key == "virtual_pp_degree"]
    assert said == (
        ["the device does not support interleaved pipelines; 1F1B gives the same numbers"] if device == "xpu" else []
    )
    path = tmp_path / "recipe.json"
    path.write_text(recipe_text(found.recipe))
    plan_run(path, [], registry)
