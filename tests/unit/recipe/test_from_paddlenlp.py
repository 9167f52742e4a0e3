"""PaddleNLP's argument files become recipes: the same numbers, and nothing of them is lost without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.cli.main import main
from llmsuite.errors import UserError
from llmsuite.plugins.manager import ALLOW_LIST, Registry
from llmsuite.recipe.paddlenlp.arguments import Arguments, read_arguments
from llmsuite.recipe.paddlenlp.convert import Converted, convert
from llmsuite.recipe.paddlenlp.family import family_of
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text

# keys as in llm/config/*/*_argument.json and llm/auto_parallel; the values are ours
COMMON: dict[str, Any] = {
    "output_dir": "./checkpoints/x", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 8, "logging_steps": 1, "bf16": True, "fp16_opt_level": "O2", "do_train": True,
    "do_eval": True, "disable_tqdm": True, "unified_checkpoint": True, "use_flash_attention": True,
}  # fmt: skip
PRETRAIN: dict[str, Any] = {
    **COMMON, "model_name_or_path": "facebook/llama-13b", "tokenizer_name_or_path": "facebook/llama-13b",
    "input_dir": "./data", "split": "949,50,1", "max_seq_length": 2048, "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 2, "virtual_pp_degree": 1, "sharding": "stage1", "sharding_parallel_degree": 2,
    "sequence_parallel": 1, "learning_rate": 3e-05, "min_learning_rate": 3e-06, "lr_scheduler_type": "cosine",
    "warmup_steps": 30, "warmup_ratio": 0.01, "max_steps": 1000, "save_steps": 500, "eval_steps": 250,
    "weight_decay": 0.01, "max_grad_norm": 1.0, "adam_beta2": 0.95, "continue_training": 0, "do_predict": False,
    "recompute": True, "recompute_granularity": "core_attn", "distributed_dataloader": 1, "save_total_limit": 3,
    "dataloader_num_workers": 1, "amp_master_grad": True, "fuse_attention_qkv": True, "device": "gpu", "seed": 1234,
    "to_static": False, "sharding_parallel_config": "enable_overlap", "num_hidden_layers": 10, "model_type": "llama",
}  # fmt: skip
SFT: dict[str, Any] = {
    **COMMON, "model_name_or_path": "meta-llama/Meta-Llama-3.1-8B-Instruct", "dataset_name_or_path": "./data",
    "num_train_epochs": 3, "learning_rate": 3e-05, "warmup_steps": 30, "evaluation_strategy": "epoch",
    "save_strategy": "epoch", "src_length": 1024, "max_length": 3072, "load_best_model_at_end": True,
    "eval_with_do_generation": False, "metric_for_best_model": "accuracy", "recompute": True, "save_total_limit": 1,
    "tensor_parallel_degree": 2, "sharding": "stage2", "zero_padding": True, "eval_accumulation_steps": 16,
}  # fmt: skip
LORA = {
    **SFT,
    "model_name_or_path": "Qwen/Qwen2-7B",
    "lora": True,
    "lora_rank": 16,
    "sharding": "stage1",
    "pissa": False,
}
DPO: dict[str, Any] = {
    **COMMON, "model_name_or_path": "deepseek-ai/DeepSeek-V2-Lite", "train_dataset_path": "./data/train.jsonl",
    "dev_dataset_path": "./data/dev.jsonl", "num_train_epochs": 1, "max_steps": 100, "learning_rate": 1e-06,
    "warmup_steps": 10, "evaluation_strategy": "steps", "save_strategy": "steps", "eval_steps": 50, "save_steps": 500,
    "max_seq_len": 3072, "max_prompt_len": 2048, "load_best_model_at_end": True, "tensor_parallel_degree": 4,
    "sharding": "stage1 offload", "recompute": False, "beta": 0.2, "loss_type": "hinge", "label_smoothing": 0.0,
    "flash_mask": True, "lora": True, "lora_rank": 64, "rslora_plus": True, "expert_parallel_degree": 2,
}  # fmt: skip
Convert = Callable[..., Converted]


@pytest.fixture
def converted(registry: Registry) -> Convert:
    def run(values: dict[str, Any], name: str = "x_argument.json", **options: Any) -> Converted:
        return convert(Arguments(dict(values)), name, registry, **options)

    return run


def test_pretrain(converted: Convert) -> None:
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
        "lr_schedule": "cosine", "warmup_steps": 30, "warmup_from_zero": True, "min_lr_ratio": 0.1,
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
        told = {key: why for key, _, why in found.left_out if key.startswith("fuse_")}
        assert all("see parallel.fuse_projections" in why for why in told.values())
        assert (told != {}) is (not fuses)
        assert any(note.startswith("parallel.fuse_projections") for note in found.notes) is fuses


def test_sft(converted: Convert) -> None:
    found = converted(SFT)
    recipe, left = found.recipe, {key: why for key, _, why in found.left_out}
    assert recipe["stage"] == "sft"
    assert recipe["model"]["weights"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert recipe["model"]["preset"] == "llama-3.1-8b"
    assert recipe["data"] == {
        "train": "./data/train.json", "eval": "./data/dev.json", "max_length": 3072, "packing": "best_fit",
    }  # fmt: skip
    assert recipe["train"]["num_epochs"] == 3
    assert recipe["train"]["global_batch_size"] == 2 * 4 * 4
    assert recipe["sft"] == {"truncate": True}
    assert recipe["train"]["eval_steps"] == recipe["checkpoint"]["save_steps"] == "epoch"
    assert recipe["checkpoint"] == {"save_steps": "epoch", "keep_last": 2, "best_metric": "eval/loss"}
    assert (recipe["train"]["warmup_steps"], recipe["train"]["warmup_from_zero"]) == (30, True)
    assert any("eval/loss, for accuracy" in note for note in found.notes)
    assert "data.max_length" in left["src_length"]


def test_generated_answers(converted: Convert) -> None:
    asks = {**SFT, "eval_with_do_generation": True}
    found = converted({**asks, "metric_for_best_model": "rougel"})
    assert found.recipe["generation"] == {"max_new_tokens": 3071}  # top_k 1 takes the most likely token
    assert found.recipe["checkpoint"]["best_metric"] == "eval/rougel"
    assert found.recipe["checkpoint"]["best_is"] == "highest"
    drawn = converted({**asks, "top_k": 5, "top_p": 0.7, "save_generation_output": True}).recipe
    assert drawn["generation"] == {"max_new_tokens": 3071, "temperature": 1.0, "top_k": 5, "top_p": 0.7, "save": True}
    assert drawn["checkpoint"]["best_metric"] == "eval/loss"
    plain = converted({**SFT, "top_p": 0.7})
    assert "generation" not in plain.recipe
    assert ("top_p", 0.7, "belongs to eval_with_do_generation") in plain.left_out
    behind = converted({**asks, "prefix_tuning": True})
    assert "generation" not in behind.recipe
    assert any(key == "eval_with_do_generation" and "prefix" in why for key, _, why in behind.left_out)


def test_prefix_tuning(converted: Convert) -> None:
    found = converted({**SFT, "prefix_tuning": True, "num_prefix_tokens": 16})
    assert (found.recipe["stage"], found.recipe["prefix"]) == ("sft", {"tokens": 16})
    assert any("positions begin behind the prefix" in note for note in found.notes)
    assert converted({**SFT, "prefix_tuning": True}).recipe["prefix"] == {"tokens": 128}
    made = converted({**SFT, "prefix_tuning": True, "prefix_projection": True})
    assert made.recipe["prefix"] == {"tokens": 128, "projection": True}
    wide = converted({**SFT, "prefix_tuning": True, "prefix_projection": True, "prefix_projection_hidden_size": 64})
    assert wide.recipe["prefix"] == {"tokens": 128, "projection": True, "projection_hidden_size": 64}
    plain = converted({**SFT, "prefix_tuning": False, "num_prefix_tokens": 16})
    assert "prefix" not in plain.recipe
    assert ("num_prefix_tokens", 16, "belongs to prefix_tuning") in plain.left_out


def test_lora(converted: Convert) -> None:
    recipe = converted(LORA).recipe
    assert recipe["stage"] == "lora"
    assert recipe["lora"] == {"rank": 16, "alpha": 32.0}
    assert recipe["model"]["family"] == "qwen"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lora_dropout": 0.05}, {"dropout": 0.05}),
        ({"lora_dropout": 0}, {}),
        ({"pissa": True, "rslora": True}, {"init": "pissa", "alpha": 16.0}),
        ({"loraga": True}, {"init": "lora_ga", "init_batches": 8}),
        (
            {"loraga": True, "loraga_init_iters": 9, "loraga_stable_gamma": 16, "loraga_gradient_offload": True},
            {"init": "lora_ga", "init_batches": 3, "init_gamma": 16.0},
        ),
        ({"loraga": False, "loraga_init_iters": 9}, {}),
    ],
)
def test_kinds_of_adapters(converted: Convert, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert converted({**LORA, **given}).recipe["lora"] == {"rank": 16, "alpha": 32.0, **expected}


def test_mora_has_no_scale(converted: Convert) -> None:
    recipe = converted({**LORA, "use_mora": True, "rslora": True, "lora_plus_scale": 4.0}).recipe
    assert recipe["lora"] == {"rank": 16, "method": "mora"}


def test_lokr_gets_its_rank_alone(converted: Convert) -> None:
    found = converted({**SFT, "lokr": True, "lokr_dim": 4, "lora_rank": 16})
    assert found.recipe["stage"] == "lora"
    assert found.recipe["lora"] == {"rank": 4, "alpha": 4.0, "method": "lokr"}
    assert converted({**SFT, "lokr": True}).recipe["lora"]["rank"] == 8
    assert "lora" not in converted({**SFT, "lokr": False, "lokr_dim": 4}).recipe


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


def test_what_their_scripts_do_by_default(converted: Convert) -> None:
    """`warmup_ratio` aside, an argument that is not given has PaddleNLP's value, not ours."""
    simpo = converted({**DPO, "loss_type": "simpo"}).recipe["dpo"]
    assert simpo == {"loss": "simpo", "beta": 0.2, "gamma": 0.5}
    assert converted({**DPO, "loss_type": "ipo"}).recipe["dpo"]["loss"] == "ipo_mean"
    without = {key: value for key, value in PRETRAIN.items() if key not in ("split", "save_steps", "max_seq_length")}
    recipe = converted(without).recipe
    assert (recipe["pretrain"]["split"], recipe["checkpoint"]["save_steps"]) == ("949,50,1", 500)
    assert recipe["data"]["max_length"] == 1024
    epochs = {key: value for key, value in SFT.items() if key not in ("num_train_epochs", "evaluation_strategy")}
    assert converted(epochs).recipe["train"]["num_epochs"] == 1
    assert converted(epochs).recipe["train"]["eval_steps"] == 1  # logging_steps, as do_eval means steps
    longer = converted({**PRETRAIN, "model_name_or_path": "facebook/llama-7b", "max_seq_length": 4096}).recipe
    assert longer["model"]["config"]["max_position_embeddings"] == 4096


def test_strategy(converted: Convert) -> None:
    names = {"pipeline_schedule_mode": "FThenB", "sharding_offload": True, "enable_auto_parallel": 1}
    found = converted({**PRETRAIN, **names, "data_parallel_degree": 4})
    assert found.recipe["parallel"]["pipeline_schedule"] == "FThenB"
    assert found.recipe["engine"]["offload_optimizer"] is True
    assert found.recipe["launch"] == {"num_devices": 8, "nnodes": 4}
    left = {key: why for key, _, why in found.left_out}
    assert "section parallel" in left["enable_auto_parallel"]
    assert not {"pipeline_schedule_mode", "sharding_offload", "data_parallel_degree"} & left.keys()


@pytest.mark.parametrize("values", [PRETRAIN, SFT, DPO], ids=["pretrain", "sft", "dpo"])
def test_what_comes_out_is_valid(
    values: dict[str, Any], converted: Convert, registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(recipe_text(converted(values).recipe))
    plan = plan_run(path, [], registry)
    assert plan.accumulate_steps == values["gradient_accumulation_steps"]


@pytest.mark.parametrize("values", [PRETRAIN, SFT, LORA, DPO], ids=["pretrain", "sft", "lora", "dpo"])
def test_no_argument_is_lost(values: dict[str, Any], converted: Convert) -> None:
    """Taking one away changes the recipe or the list, or it says what is so anyway."""
    anyway = {"logging_steps", "virtual_pp_degree", "seed", "eval_steps", "fp16_opt_level", "device", "lora_rank"}
    anyway |= {"sharding_parallel_degree", "recompute_granularity", "to_static", "max_grad_norm", "label_smoothing"}
    anyway |= {"continue_training", "warmup_ratio", "do_eval", "save_strategy", "evaluation_strategy", "recompute"}
    anyway |= {"num_train_epochs", "save_steps", "lora", "tokenizer_name_or_path", "do_train", "split"}
    anyway |= {"per_device_eval_batch_size", "pissa"}
    whole = converted(values)
    for key in values.keys() - anyway - {"model_name_or_path", "input_dir", "train_dataset_path", "learning_rate"}:
        if key == "dataset_name_or_path":
            continue
        assert converted({k: v for k, v in values.items() if k != key}, stage=whole.recipe["stage"]) != whole, key


NOT_THE_SAME: list[tuple[dict[str, Any], str]] = [
    ({**SFT, "learning_rat": 5}, "learning_rat = 5: is not known; nearest key: train.learning_rate"),
    ({**SFT, "zzz": [1]}, r"zzz = \[1\]: is not known"),
    ({**LORA, "prefix_tuning": True}, "prefix_tuning = True: beside LoRA"),
    ({**DPO, "prefix_tuning": True}, "prefix_tuning = True: is for stage sft"),
    ({**SFT, "prefix_tuning": True, "prefix_path": "x"}, "prefix_path = x: prefixes begin as they are drawn"),
    ({**SFT, "reft": True, "intervention_type": "x"}, "reft = True: its rotation is orthonormal at the start only"),
    ({**LORA, "lokr": True}, "lokr = True: with lora there would be two adapters"),
    ({**SFT, "lokr": True, "lokr_path": "x"}, "lokr_path = x: nearest key: model.weights"),
    ({**DPO, "lokr": True}, "lokr = True: only run_finetune.py reads it"),
    ({**LORA, "vera": 1}, "vera = 1: both its factors begin with the largest singular vectors"),
    (
        {**LORA, "model_name_or_path": "Qwen/Qwen2-57B-A14B", "loraga": True},
        "loraga = True: routed experts get adapters there, of which few tokens make a gradient",
    ),
    ({**LORA, "model_name_or_path": "baidu/ERNIE-4.5-21B-A3B-PT"}, "lora = True: PaddleNLP names no matrices"),
    ({**LORA, "pissa": True, "lora_use_mixer": True}, "pissa = True: goes with neither"),
    ({**LORA, "use_mora": True, "pissa": True}, "use_mora = True: goes with neither"),
    ({**LORA, "loraga": True, "pissa": True}, "loraga = True: goes with no mixer, DoRA, MoRA or PiSSA"),
    ({**LORA, "loraga": True, "loraga_stable_gamma": -1}, "loraga_stable_gamma = -1: nearest key: lora.init_gamma"),
    (
        {**LORA, "weight_quantize_algo": "nf4"},
        "weight_quantize_algo = nf4: its blocks or scales are others",
    ),
    ({**SFT, "hidden_dropout_prob": 0.1}, "hidden_dropout_prob = 0.1: models are trained without dropout"),
    ({**PRETRAIN, "model_name_or_path": "gpt2-medium-en"}, "hidden_dropout_prob = not given: with GPT it is 0.1"),
    ({**PRETRAIN, "model_name_or_path": "deepseek-ai/DeepSeek-V3"}, "num_nextn_predict_layers = not given"),
    ({**DPO, "loss_type": "sppo_hard"}, "loss_type = sppo_hard: dpo.loss has sigmoid"),
    ({**DPO, "ref_model_update_steps": 10}, "the reference is the initial model"),
    ({**DPO, "pref_loss_ratio": 0.5}, "the preference loss has weight 1"),
    ({**DPO, "process_reward": True}, "scores whole answers"),
    ({**SFT, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type = polynomial"),
    ({**SFT, "num_train_epochs": 0.5}, "num_train_epochs = 0.5: train.num_epochs is whole"),
    ({**SFT, "optim": "adafactor"}, "optim = adafactor"),
    ({**PRETRAIN, "decay_steps": 500}, "decay_steps = 500: the learning rate comes down until the last step"),
    ({"actor_model_name_or_path": "x", "rl_algorithm": "grpo", "do_train": 1}, "rl_algorithm = grpo: reinforcement"),
    ({**SFT, "max_query_len": 512, "loss_type": "contrastive"}, "embedding models are no stage"),
    ({**SFT, "do_train": False, "do_ptq": True}, "do_ptq quantises a trained model"),
    ({**SFT, "do_train": False, "do_gptq": True}, "do_gptq quantises a trained model"),
    ({"do_ptq": True, "do_eval": True, "model_name_or_path": "x"}, "do_ptq quantises a trained model"),
    ({**SFT, "do_train": False}, "do_eval without do_train evaluates only"),
    ({**SFT, "do_train": 0, "do_eval": 0, "do_predict": 1}, "generates only"),
    ({**SFT, "do_train": None, "do_eval": False}, "do_train is not true"),
    ({**SFT, "model_name_or_path": "baichuan-inc/Baichuan2-7B-Base"}, "of type baichuan, which no family has"),
    ({**SFT, "model_name_or_path": "qwen/qwen-14b"}, "of type qwen, which no family has"),
    ({**SFT, "model_name_or_path": "THUDM/chatglm2-6b"}, "of type chatglm, which"),
    ({**SFT, "model_name_or_path": "google/gemma-2b"}, "of type gemma, which"),
]
"""Jobs no recipe can be, and the reason."""


@pytest.mark.parametrize(("values", "message"), NOT_THE_SAME)
def test_what_cannot_be_the_same_job_is_refused(values: dict[str, Any], message: str, converted: Convert) -> None:
    with pytest.raises(UserError, match=message):
        converted(values)


def test_all_reasons_come_at_once_and_can_be_waived(converted: Convert) -> None:
    values = {**SFT, "reft": True, "num_prefix_tokens": 8, "learning_rat": 5, "vera": False}
    with pytest.raises(UserError) as refused:
        converted(values)
    assert "reft = True" in str(refused.value)
    with pytest.raises(UserError, match="--leave_out learning_rat"):
        converted(values, leave_out=["reft"])
    found = converted(values, leave_out=["reft", "learning_rat"])
    assert [key for key, _, _ in found.refused] == ["reft", "learning_rat"]
    assert found.recipe["source"] == "PaddleNLP x_argument.json, without reft, learning_rat"
    told = {key: why for key, _, why in found.left_out}
    assert (told["num_prefix_tokens"], told["vera"]) == ("belongs to prefix_tuning", "it says no")
    with pytest.raises(UserError, match=r"--leave_out: x_argument\.json has no lokr"):
        converted(values, leave_out=["lokr"])


def test_packs(converted: Convert) -> None:
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


def test_what_has_no_choice_here_is_told(converted: Convert) -> None:
    for values, key in (
        ({**SFT, "tensor_parallel_degree": 1, "sequence_parallel": True}, "sequence_parallel"),
        ({**PRETRAIN, "recompute_granularity": "odd"}, "recompute_granularity"),
        ({**PRETRAIN, "pipeline_schedule_mode": "ZBH1"}, "pipeline_schedule_mode"),
        ({**SFT, "do_eval": False, "evaluation_strategy": "no"}, "load_best_model_at_end"),
    ):
        found = converted(values)
        assert key in {name for name, _, _ in found.left_out}, key
    found = converted({**SFT, "tensor_parallel_degree": 8})
    assert ("sharding", "stage2", "there is one data rank on 8 devices") in found.left_out
    assert "sharding" not in found.recipe["parallel"]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen"),
        ("deepseek-ai/deepseek-llm-7b-base", "llama"),
        ("Qwen/Qwen1.5-7B", "qwen"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen"),
        ("Qwen/QwQ-32B", "qwen"),
        ("Qwen/Qwen3-8B", "qwen"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek"),
        ("deepseek-ai/DeepSeek-R1", "deepseek"),
        ("gpt2-medium-en", "gpt"),
    ],
)
def test_family(name: str, family: str, registry: Registry) -> None:
    assert family_of(name, registry).name == family


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"learning_rate": 1, "do_train": True}, {}, "tells no stage; add --stage"),
        ({**SFT, "model_name_or_path": "mymodel-7b"}, {}, "tells no family; if `llmsuite list models` has"),
        ({**SFT, "model_name_or_path": None}, {"family": "llama"}, "has no model_name_or_path"),
        ({**SFT, "learning_rate": "fast"}, {}, "learning_rate is 'fast'; a number is wanted"),
        ({**PRETRAIN, "input_dir": ""}, {}, "has no input_dir"),
        (SFT, {"stage": "sfx"}, "sfx"),
        (SFT, {"family": "llamma"}, "llamma"),
    ],
)
def test_what_cannot_be_told(values: dict[str, Any], options: dict[str, Any], message: str, converted: Convert) -> None:
    with pytest.raises(UserError, match=message):
        converted(values, **options)


SHELL = """#!/bin/bash
# --learning_rate 9 in a comment
name="llama2-13b"
export XPU_SIZE=1 # 94 MB
strings ${lib}/x.so | grep COM
PYTHONPATH=../:$PYTHONPATH  \\
python -u -m paddle.distributed.launch --xpus "0,1,2,3" --nnodes 2 --log_dir "output/$name" \\
    run_pretrain_auto.py \\
    --model_name_or_path "meta-llama/Llama-2-13b" \\
    --input_dir "./data" --output_dir=output/$name --split 949,50,1 \\
    --bf16 --learning_rate 0.00003 --do_train --to_static 1 --max_steps 10 --sharding "stage1" \\
    --pipeline_parallel_degree 4 --max_seq_length 4096 --odd a b 2>&1 | tee log
"""


def test_shell(converted: Convert, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SHELL)
    arguments = read_arguments(path)
    assert (arguments.num_devices, arguments.nnodes, arguments.device) == (4, 2, "xpu")
    assert arguments.values["odd"] == "a b"
    found = convert(arguments, path.name, registry, leave_out=["odd"])
    recipe = found.recipe
    assert recipe["stage"] == "pretrain"
    assert recipe["output_dir"] == "output/llama2-13b"
    assert recipe["engine"] == {"mode": "to_static", "precision": "bf16", "recompute": "none"}
    assert recipe["train"]["learning_rate"] == 3e-5
    assert recipe["launch"] == {"num_devices": 4, "nnodes": 2}
    assert recipe["device"] == "xpu"
    assert recipe["pretrain"]["split"] == "949,50,1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python run_dpo.py ./llama/dpo_argument.json", "the arguments are those of ./llama/dpo_argument.json"),
        ("echo nothing", "no line starts a Python file"),
        ("python a.py --x 1\npython b.py --x 2", "2 lines start a Python file"),
        ('{"a": 1,}', "trailing comma"),
        ("python a.py 'x", "No closing quotation"),
    ],
)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_arguments(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_arguments(tmp_path / "absent")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")  # --no-plugins sets it; restored after the test
    path, target = tmp_path / "sft_argument.json", tmp_path / "made" / "sft.json"
    path.write_text(json.dumps(SFT))
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path), "-o", str(target)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {target}" in out
    assert "use_flash_attention = True: the device backend chooses its fused kernels" in out
    assert main(["--no-plugins", "validate", str(target)]) == 0
    capsys.readouterr()
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(target.read_text())  # what is told goes elsewhere
    assert "have no counterpart" in captured.err
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path), "-o", str(target)]) == 2
    path.write_text(json.dumps({**SFT, "max_length": 10**6}))
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path)]) == 0
    assert "to do: data.max_length: is 1000000" in capsys.readouterr().err
    for words in (
        ["from-paddlenlp"],
        ["from-paddlenlp", str(path), "--preset", "x"],
        ["new", "--leave_out", "x"],
    ):
        assert main(["--no-plugins", "recipe", *words]) == 2
    path.write_text(json.dumps({**SFT, "reft": True}))
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, "add --leave_out reft" in captured.err) == ("", True)
    assert main(["--no-plugins", "recipe", "from-paddlenlp", str(path), "--leave_out", "reft"]) == 0
    assert "so it is another job:\n  reft = True" in capsys.readouterr().err
