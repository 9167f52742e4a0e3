"""ms-swift's commands become recipes: its defaults where nothing is said, and refusals where it is another job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.convert import convert
from llmsuite.plugins.suites.known import SUITES
from llmsuite.plugins.suites.swift import read_shell
from llmsuite.plugins.suites.turn_texts import CHATML, turns_text
from tests.support.swift import BARE, FULL, RLHF
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-swift"
TEXT = turns_text(CHATML, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
"""The template of `BARE`."""
NAMED = {**BARE, "dataset": "swift/self-cognition", "model_name": "robot", "model_author": ["swift"]}
SHARED = {**BARE, "NPROC_PER_NODE": 4, "sequence_parallel_size": 2, "gradient_accumulation_steps": 8}
RAY = {
    "nproc_per_node": 4,
    "default": {"device": "GPU", "ranks": "list(range(0, 4))", "workers": ["default"]},
}
SCRIPT = """\
# 2 * 20GiB, it's small
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'one.jsonl' two.jsonl \\
    --system 'Be brief
and kind.' \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --packing true \\
    --learning_rate 1e-4 > log.txt 2>&1
"""

PLAIN = {**BARE, "command": "swift pt", "tuner_type": "full", "deepspeed": "zero2"}


def test_sft_by_its_defaults(converted: Converted) -> None:
    """Adapters of rank 8, alpha 32 and dropout 0.05 on all matrices, steps of at least 16 samples, 0.1 of decay."""
    found = converted(ACTION, BARE)
    assert found.recipe == {
        "stage": "lora", "source": "ms-swift x.yaml",
        "model": {"family": "qwen", "weights": "ms:Qwen/Qwen2.5-7B-Instruct", "preset": "qwen2.5-7b"},
        "data": {"train": "rows.jsonl", "max_length": 2048, "chat_template": TEXT, "end_of_answer": "template",
                 "ignore_columns": ["*"]},
        "engine": {"precision": "bf16", "recompute": "full"}, "launch": {"num_devices": 1},
        "train": {
            "num_epochs": 3, "global_batch_size": 16, "micro_batch_size": 1, "learning_rate": 1e-4,
            "lr_schedule": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95,
        },
        "lora": {"rank": 8, "alpha": 32.0, "dropout": 0.05}, "checkpoint": {"save_steps": 500},
        "device": "gpu", "seed": 42, "output_dir": "runs/x",
    }  # fmt: skip


def test_quantised_weights_have_the_template_of_their_model(registry: Registry) -> None:
    values = {**BARE, "model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "torch_dtype": "bfloat16"}
    found = convert(SUITES[ACTION], values, "x.yaml", registry).recipe
    assert found["model"] == {"family": "qwen", "weights": "ms:Qwen/Qwen2.5-7B-Instruct-AWQ"}, "no preset: padded sizes"
    assert found["data"]["chat_template"] == TEXT
    with pytest.raises(UserError, match="torch_dtype = not given: that of quantised models depends on the version"):
        convert(SUITES[ACTION], {**values, "torch_dtype": None}, "x.yaml", registry)


def test_whole_models_and_batches(converted: Converted) -> None:
    recipe = converted(ACTION, {**FULL, "NPROC_PER_NODE": 8, "per_device_train_batch_size": 3}).recipe
    assert (recipe["stage"], recipe["train"]["learning_rate"]) == ("sft", 1e-5)
    assert recipe["parallel"] == {"sharding": "stage2"}
    assert recipe["launch"] == {"num_devices": 8}
    assert recipe["train"]["global_batch_size"] == 24  # 16 samples are less than one of each rank
    older = {key: value for key, value in FULL.items() if key != "tuner_type"} | {"train_type": "full"}
    assert converted(ACTION, older).recipe == converted(ACTION, FULL).recipe
    two = converted(ACTION, {**BARE, "NPROC_PER_NODE": 4, "NNODES": 2, "gradient_accumulation_steps": 3}).recipe
    assert (two["launch"], two["train"]["global_batch_size"]) == ({"num_devices": 8}, 24)


def test_masters_of_full_models(converted: Converted) -> None:
    def train(**values: Any) -> Any:
        return converted(ACTION, {**BARE, "tuner_type": "full", **values}).recipe["train"]

    assert train()["master_weights"] is False
    assert train(optim="adamw_torch_fused", torch_dtype="bfloat16")["master_weights"] is False
    assert train(optim="adamw_bnb_8bit") == {**train(), "optimizer": "adamw_8bit"}
    for words in ({"deepspeed": "zero2"}, {"fsdp": "fsdp2"}, {"torch_dtype": "float16"}, {"tuner_type": "lora"}):
        assert "master_weights" not in train(**words), words


def test_data_sets_become_the_section_data(converted: Converted) -> None:
    def data(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["data"]

    several = data(dataset=["one.jsonl", "ORG/two", "HF::org/three:en"])
    assert several["train"] == "one.jsonl"
    assert several["mix"] == {"ms:ORG/two?split=train": None, "hf:org/three?split=train&config=en": None}
    assert data(dataset="org/one", use_hf=True)["train"] == "hf:org/one?split=train"
    assert data(max_length=None)["max_length"] == 32768  # the positions of the model
    assert data(packing=True)["packing"] == "best_fit"
    assert data(dataset_shuffle=False, train_dataloader_shuffle=False)["shuffle"] is False
    assert "shuffle" not in data(dataset_shuffle=False)


def test_rows_longer_than_the_positions_of_the_model(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "max_length": 65536}).recipe
    assert (found["data"]["max_length"], found["model"]["config"]) == (65536, {"max_position_embeddings": 65536})
    assert "config" not in converted(ACTION, {**BARE, "max_length": 32768}).recipe["model"]


def test_texts_without_a_chat_template(converted: Converted) -> None:
    """`swift pt`: each text by itself, all of it supervised, with the end-of-sequence token."""
    found = converted(ACTION, {**PLAIN, "loss_scale": "all", "system": "Be brief.", "packing": True})
    assert found.recipe["stage"] == "sft"
    assert found.recipe["data"] == {
        "train": "rows.jsonl", "max_length": 2048, "packing": "best_fit", "format": "text", "ignore_columns": ["*"],
    }  # fmt: skip
    assert ("system", "Be brief.", "texts have no turns") in found.left_out
    assert converted(ACTION, {**BARE, "command": "swift pt"}).recipe["stage"] == "lora"


def test_names_are_filled_in(converted: Converted) -> None:
    found = converted(ACTION, {**NAMED, "dataset": ["one.jsonl", "HF::swift/self-cognition"]}).recipe["data"]
    assert found["mix"] == {"hf:swift/self-cognition?split=train": None}
    assert found["fill"] == {"{{NAME}}": "robot", "{{AUTHOR}}": "swift"}
    other = converted(ACTION, {**NAMED, "dataset": "rows.jsonl"})
    assert "fill" not in other.recipe["data"]
    assert "model_name" in [key for key, _, _ in other.left_out]


def test_names_that_are_not_given_stay_places(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "dataset": ["one.jsonl", "swift/self-cognition"]})
    assert "fill" not in found.recipe["data"]
    assert any(note.startswith("dataset: {{NAME}} and {{AUTHOR}} stay in rows") for note in found.notes)
    assert not any(note.startswith("data.fill") for note in found.notes)


def test_evaluations_on_benchmarks_are_left_out(converted: Converted) -> None:
    given = {"eval_use_evalscope": True, "eval_dataset": "gsm8k", "eval_limit": 10}
    found = converted(ACTION, {**BARE, **given})
    assert {key: why for key, _, why in found.left_out if key in given} == dict.fromkeys(
        given, "evaluation on benchmarks is a command of its own: llmsuite eval"
    )


def test_data_sets_with_rules_of_their_own(converted: Converted) -> None:
    def data(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["data"]

    zh = "AI-ModelScope/alpaca-gpt4-data-zh"
    assert data(dataset=f"{zh}#500")["format"] == "swift_alpaca_zh"
    mixed = data(dataset=[f"{zh}#500", "AI-ModelScope/alpaca-gpt4-data-en#500"])
    assert mixed["format"] == {f"ms:{zh}?split=train": "swift_alpaca_zh"}
    assert data(dataset=zh, val_dataset="rows.jsonl")["format"] == {f"ms:{zh}?split=train": "swift_alpaca_zh"}
    assert data(dataset=zh, val_dataset="rows.jsonl", eval_strategy="no")["format"] == "swift_alpaca_zh"
    assert "format" not in data(dataset="rows.jsonl", val_dataset=zh, eval_strategy="no")
    assert data(dataset="HF::llm-wizard/alpaca-gpt4-data-zh")["format"] == "swift_alpaca_zh"
    assert data(dataset="AI-ModelScope/LongAlpaca-12k")["format"] == "swift_long_alpaca"
    assert "format" not in data(dataset="AI-ModelScope/alpaca-gpt4-data-en")
    pairs = converted(ACTION, {**RLHF, "dataset": "hjh0119/shareAI-Llama3-DPO-zh-en-emoji"})
    assert pairs.recipe["data"]["format"] == "swift_emoji_pairs"
    assert not [note for note in pairs.notes if "is read by its columns" in note]
    thoughts = converted(ACTION, {**NAMED, "dataset": "swift/self-cognition:empty_think#600"}).recipe["data"]
    assert thoughts["train"] == "ms:swift/self-cognition?split=train"
    assert thoughts["format"] == "swift_self_cognition_empty_think"


def test_the_first_rows_with_streaming(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "dataset": "a.jsonl#5", "streaming": True, "max_steps": 9, "data_seed": 7})
    assert found.recipe["data"]["max_samples"] == 5
    assert {"sample", "choice", "holdout"}.isdisjoint(found.recipe["data"])
    held_out = {**BARE, "dataset": "a.jsonl#5", "streaming": True, "split_dataset_ratio": 0.1}
    assert "split_dataset_ratio" in [key for key, _, _ in converted(ACTION, held_out).left_out]


def test_numbers_of_devices(converted: Converted) -> None:
    def devices(**values: Any) -> Any:
        return converted(ACTION, {**BARE, "per_device_train_batch_size": 2, **values}).recipe["launch"]["num_devices"]

    assert devices(device_groups=RAY) == 4
    assert devices(device_groups={"default": {"device": "GPU", "ranks": 2, "workers": ["default"]}}) == 2
    unknown = converted(ACTION, {**BARE, "NNODES": "$WORLD_SIZE", "NPROC_PER_NODE": 4})
    assert unknown.recipe["launch"]["num_devices"] == 1
    assert [key for key, _, _ in unknown.left_out if key == "NNODES"] == ["NNODES"]
    assert converted(ACTION, {**BARE, "NNODES": "$N"}, num_devices=8).recipe["launch"]["num_devices"] == 8


def test_ranks_that_share_sequences(converted: Converted) -> None:
    """They are data ranks here, with the same global batch: 3 samples, 8 times, on 2 ranks."""
    found = converted(ACTION, {**SHARED, "per_device_train_batch_size": 3})
    assert found.recipe["train"]["global_batch_size"] == 48
    assert (found.recipe["train"]["micro_batch_size"], found.recipe["launch"]["num_devices"]) == (3, 4)
    assert converted(ACTION, {**BARE, "sequence_parallel_size": 1}).recipe["train"]["global_batch_size"] == 16


def test_early_stopping(converted: Converted) -> None:
    """Where evaluations are at the steps of checkpoints, which ms-swift counts."""
    given = {**BARE, "split_dataset_ratio": 0.1, "save_steps": 50, "early_stop_interval": 3}
    for values in ({}, {"eval_steps": 50}, {"metric_for_best_model": "loss"}):
        train = converted(ACTION, {**given, **values}).recipe["train"]
        assert (train["early_stopping"], train["eval_steps"]) == ({"patience": 3}, 50)


def test_dynamic_fine_tuning(converted: Converted) -> None:
    assert converted(ACTION, {**BARE, "enable_dft_loss": True}).recipe["sft"] == {"loss": "dft"}
    both = {**BARE, "enable_dft_loss": True, "truncation_strategy": "right"}
    assert converted(ACTION, both).recipe["sft"] == {"loss": "dft", "truncate": True}
    assert "sft" not in converted(ACTION, {**BARE, "enable_dft_loss": False}).recipe


@pytest.mark.parametrize(
    ("values", "section"),
    [
        ({"rpo_alpha": 0.1}, {"beta": 0.1, "loss": "sigmoid", "sft_weight": 0.1, "sft_mean": "answers"}),
        ({"rpo_alpha": 0}, {"beta": 0.1, "loss": "sigmoid"}),
        (
            {"rlhf_type": "simpo"},
            {"beta": 2.0, "loss": "simpo", "gamma": 1.0, "sft_weight": 1.0, "sft_mean": "answers"},
        ),
        (
            {"rlhf_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.5, "per_device_train_batch_size": 4},
            {"beta": 2.0, "loss": "simpo", "gamma": 0.5},
        ),
        (
            {"rlhf_type": "cpo", "cpo_alpha": 0.5, "label_smoothing": 0.1},
            {"beta": 0.1, "loss": "cpo", "label_smoothing": 0.1, "sft_weight": 0.5, "sft_mean": "answers"},
        ),
        ({"rlhf_type": "orpo"}, {"beta": 0.1, "loss": "orpo", "sft_mean": "answers"}),
        (
            {"rpo_alpha": 0.1, "per_device_train_batch_size": 4},
            {"beta": 0.1, "loss": "sigmoid", "sft_weight": 0.1, "sft_mean": "micro_batches"},
        ),
    ],
)
def test_losses_on_chosen_answers(values: dict[str, Any], section: dict[str, Any], converted: Converted) -> None:
    """Means over micro-batches; those of one pair are means over answers."""
    recipe = converted(ACTION, {**RLHF, **values}).recipe
    assert recipe["dpo"] == section
    assert recipe["data"].get("group_by_length", True) == (section.get("sft_mean") != "micro_batches")


def test_trainers_of_preferences_turn_dropout_off(converted: Converted) -> None:
    """Those of TRL, of which ms-swift's are made, do so by default, also for adapters."""
    for kind in ("dpo", "simpo", "cpo", "orpo", "kto", "rm"):
        assert "dropout" not in converted(ACTION, {**RLHF, "rlhf_type": kind}).recipe["lora"]


def test_evaluation_follows_the_arguments(converted: Converted) -> None:
    """It follows the checkpoints."""
    held = {**BARE, "val_dataset": "held.jsonl"}
    recipe = converted(ACTION, {**held, "save_steps": 30}).recipe
    assert (recipe["data"]["eval"], recipe["train"]["eval_steps"]) == ("held.jsonl", 30)
    assert converted(ACTION, {**held, "eval_steps": 7}).recipe["train"]["eval_steps"] == 7
    assert converted(ACTION, {**held, "save_strategy": "epoch"}).recipe["train"]["eval_steps"] == "epoch"
    assert "eval" not in converted(ACTION, {**held, "eval_strategy": "no"}).recipe["data"]
    found = converted(ACTION, {**BARE, "eval_steps": 7})
    assert ("eval_steps", 7, "there are no rows to evaluate on") in found.left_out


def test_a_sample_and_a_system_turn(converted: Converted) -> None:
    given = {**BARE, "dataset": ["org/rows#500", "more.jsonl"], "system": "Be brief."}
    data = converted(ACTION, given).recipe["data"]
    assert (data["sample"], data["system"], data["mix"]) == (500, "Be brief.", {"more.jsonl": None})
    assert data["train"].endswith(":org/rows?split=train")
    assert data["choice"] == "ms-swift"
    assert "holdout" not in data
    assert converted(ACTION, {**given, "seed": 7, "data_seed": 7}).recipe["data"]["sample"] == 500
    several = converted(ACTION, {**given, "dataset": "org/rows:en#500 more.jsonl#7 rest.jsonl"}).recipe["data"]
    assert several["sample"] == {"ms:org/rows?split=train&config=en": 500, "more.jsonl": 7}
    second = converted(ACTION, {**given, "dataset": ["a.jsonl", "more.jsonl#7"]}).recipe["data"]
    assert second["sample"] == {"more.jsonl": 7}
    repeated = converted(ACTION, {**NAMED, "dataset": "swift/self-cognition#1000"}).recipe["data"]
    assert repeated["sample"] == 1000
    assert "choice" not in converted(ACTION, BARE).recipe["data"]


def test_rows_are_held_out(converted: Converted) -> None:
    split = {**BARE, "split_dataset_ratio": 0.01}
    found = converted(ACTION, {**split, "save_steps": 30, "load_best_model_at_end": True})
    assert (found.recipe["data"]["holdout"], found.recipe["data"]["choice"]) == (0.01, "ms-swift")
    assert "eval" not in found.recipe["data"]
    assert found.recipe["train"]["eval_steps"] == 30
    assert found.recipe["checkpoint"]["best_metric"] == "eval/loss"
    for others in (
        {"val_dataset": "held.jsonl"},
        {"streaming": True, "max_steps": 9},
        {"eval_strategy": "no"},
        {"save_strategy": "no"},
    ):
        left = converted(ACTION, {**split, **others})
        assert {"holdout", "choice"}.isdisjoint(left.recipe["data"])
        assert [(key, value) for key, value, _ in left.left_out if key == "split_dataset_ratio"] == [
            ("split_dataset_ratio", 0.01)
        ]
    assert {"holdout", "choice"}.isdisjoint(converted(ACTION, {**BARE, "split_dataset_ratio": 0}).recipe["data"])


def test_adapters_and_losses(converted: Converted) -> None:
    def lora(**values: Any) -> Any:
        return converted(ACTION, {**BARE, "lora_dropout": 0, **values}).recipe["lora"]

    assert lora(target_modules="q_proj v_proj")["target_modules"] == ["q_proj", "v_proj"]
    assert lora(init_weights="pissa", lora_rank=4)["init"] == "pissa"
    assert lora(init_weights="olora")["init"] == "olora"
    assert lora(quant_bits=4, quant_method="bnb", bnb_4bit_use_double_quant=False)["base_dtype"] == "nf4"
    assert lora(quant_bits=4, quant_method="bnb")["base_double_quant"] is True
    assert lora(quant_bits=8, quant_method="bnb")["base_dtype"] == "llm_int8"
    assert "base_dtype" not in lora(quant_bits=4), "ms-swift quantises only with a method"
    assert lora(lorap_lr_ratio=16, use_rslora=True)["lora_plus_ratio"] == 16.0
    assert converted(ACTION, {**BARE, "truncation_strategy": "right"}).recipe["sft"] == {"truncate": True}
    ipo = converted(ACTION, {**RLHF, "loss_type": "ipo", "beta": 0.2}).recipe
    assert (ipo["stage"], ipo["dpo"], ipo["lora"]["rank"]) == ("dpo", {"beta": 0.2, "loss": "ipo_mean"}, 8)
    kto = converted(ACTION, {**RLHF, "rlhf_type": "kto", "desirable_weight": 1.5}).recipe
    assert kto["kto"] == {"beta": 0.1, "desirable_weight": 1.5}
    assert converted(ACTION, {**RLHF, "rlhf_type": "rm"}).recipe["stage"] == "rm"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**BARE, "tuner_type": "full", "optim": "adamw_torch"}, "optim = adamw_torch: rounds parameters in 16 bits"),
        ({**BARE, "tuner_type": "adalora"}, "tuner_type = adalora"),
        ({**BARE, "dataset": "org/rows#500", "data_seed": 7}, "dataset = org/rows#500: chooses rows by data_seed"),
        ({**BARE, "dataset": ["a.jsonl", "b.jsonl#5"], "seed": 7}, "dataset = b.jsonl#5: chooses rows by data_seed"),
        ({**BARE, "dataset": "a.jsonl#5 b.jsonl", "streaming": True}, "a.jsonl#5: chooses the first rows with"),
        ({**BARE, "dataset": "a.jsonl#0", "streaming": True}, "a.jsonl#0: is not followed by a number of rows"),
        ({**BARE, "dataset": "a.jsonl#x"}, "dataset = a.jsonl#x: is not followed by a number"),
        ({**BARE, "dataset": ["a.jsonl#5", "a.jsonl#7"]}, "names a data set twice"),
        ({**BARE, "val_dataset": "a.jsonl#5"}, "val_dataset = a.jsonl#5: takes the first rows"),
        ({**BARE, "dataset": "lvjianjin/AdvertiseGen#5"}, "reads lvjianjin/AdvertiseGen by rules of its own"),
        ({**RLHF, "dataset": "AI-ModelScope/alpaca-gpt4-data-zh"}, "alpaca-gpt4-data-zh by rules of its own"),
        ({**BARE, "dataset": "hjh0119/shareAI-Llama3-DPO-zh-en-emoji"}, "zh-en-emoji by rules of its own"),
        ({**BARE, "dataset": "org/rows:one/two"}, "is of several subsets; name each"),
        (
            {**BARE, "dataset": "swift/self-cognition", "model_name": ["a", "b"], "model_author": ["c", "d"]},
            "needs one model_name and one model_author",
        ),
        ({**NAMED, "model_name": ["小黄", "Xiao Huang"]}, "needs one model_name and one model_author"),
        ({**NAMED, "model_name": "小黄 Xiao Huang"}, "needs one model_name and one model_author"),
        ({**NAMED, "dataset": "swift/self-cognition:other"}, "adds texts to questions and answers"),
        ({**BARE, "device_groups": {"nproc_per_node": 4}}, "names other ranks on Ray than 0 to N of one group"),
        ({**BARE, "device_groups": {**RAY, "rollout": RAY["default"]}}, "names other ranks on Ray"),
        ({**BARE, "device_groups": {"default": {"ranks": [4, 5], "workers": ["default"]}}}, "names other ranks on Ray"),
        ({**RLHF, "enable_dft_loss": True}, "enable_dft_loss = True: is a loss of sft"),
        ({**BARE, "early_stop_interval": 3}, "early_stop_interval = 3: counts checkpoints"),
        ({**BARE, "val_dataset": "held.jsonl", "early_stop_interval": 3, "eval_steps": 7}, "which are at other steps"),
        (
            {**BARE, "val_dataset": "held.jsonl", "early_stop_interval": 3, "metric_for_best_model": "token_acc"},
            "is for another metric than the loss",
        ),
        ({**BARE, "dataset": None}, "has no dataset"),
        ({**BARE, "val_dataset": ["a.jsonl", "b.jsonl"]}, "sets of data.eval have"),
        ({**BARE, "columns": '{"a": "query"}'}, "columns = "),
        ({**BARE, "system": "brief.txt"}, "system = brief.txt: is a file that cannot be read here"),
        ({**BARE, "dataset": "a.jsonl#5", "dataset_shuffle": False}, "dataset = a.jsonl#5: chooses the first or last"),
        ({**BARE, "split_dataset_ratio": 1}, r"split_dataset_ratio = 1\.0: leaves no row for training"),
        (
            {**BARE, "split_dataset_ratio": 0.1, "data_seed": 7},
            r"split_dataset_ratio = 0\.1: chooses rows by data_seed",
        ),
        ({**NAMED, "dataset": "self-cognition", "model_name": None}, "needs one model_name and one model_author"),
        ({**NAMED, "dataset": "HF::modelscope/self-cognition", "model_name": None}, "needs one model_name"),
        ({**NAMED, "dataset": "HF::modelscope/self-cognition:other"}, "adds texts to questions and answers"),
        (
            {**BARE, "command": "swift rlhf", "rlhf_type": "grpo", "system": ""},
            'system = "": turns the system turn of the template off',
        ),
        ({**BARE, "model": "Qwen/Qwen2.5-7B-Instruct-1M"}, "template = not given: for Qwen/Qwen2.5-7B-Instruct-1M"),
        ({**BARE, "model": "Qwen/Qwen1.5-7B-Chat"}, "template = not given: for Qwen/Qwen1.5-7B-Chat"),
        ({**RLHF, "rlhf_type": "grpo", "model": "Qwen/Qwen3-8B"}, "template = not given: for Qwen/Qwen3-8B it is a"),
        ({**BARE, "model": "Qwen/Qwen3-4B-Thinking-2507"}, "template = not given: for Qwen/Qwen3-4B-Thinking-2507"),
        ({**BARE, "model": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"}, "template = not given: for deepseek-ai/Deep"),
        ({**BARE, "template": "agentscope"}, "template = agentscope"),
        ({**RLHF, "template": "default"}, "template = default"),
        ({**BARE, "model": "LLM-Research/Meta-Llama-3-8B", "template": "default"}, "template = default"),
        ({**BARE, "truncation_strategy": "left"}, "truncation_strategy = left"),
        ({**BARE, "loss_scale": "hermes"}, "loss_scale = hermes"),
        ({**BARE, "model": "Qwen/Qwen3-8B", "loss_scale": "last_round"}, "loss_scale = last_round"),
        ({**BARE, "loss_type": "dft"}, "loss_type = dft"),
        ({**BARE, "sequence_parallel_size": 2}, "sequence_parallel_size = 2: sequences are split over these ranks"),
        ({**SHARED, "NPROC_PER_NODE": 3}, "sequence_parallel_size = 2"),
        ({**SHARED, "gradient_accumulation_steps": 3}, "sequence_parallel_size = 2"),
        ({**RLHF, **SHARED, "rlhf_type": "dpo"}, "sequence_parallel_size = 2"),
        ({**BARE, "quant_bits": 4, "quant_method": "hqq"}, "quant_method = hqq"),
        ({**BARE, "init_weights": "loftq"}, "init_weights = loftq"),
        ({**BARE, "task_type": "embedding"}, "task_type = embedding"),
        ({**BARE, "torch_dtype": "float8"}, "torch_dtype = float8"),
        ({**BARE, "learning_rat": 1}, "learning_rat = 1: is not known; did you mean learning_rate"),
        ({**RLHF, "rlhf_type": "cpo", "loss_type": "ipo"}, "loss_type = ipo: of ms-swift's losses, dpo.loss has sig"),
        ({**RLHF, "loss_type": ["sigmoid", "sft"]}, "loss_type = sigmoid,sft"),
        ({**RLHF, "packing": True}, "a pack of pairs is two rows here"),
        ({**RLHF, "truncation_strategy": "right"}, "truncation_strategy = right"),
        ({**RLHF, "rlhf_type": "ppo"}, "llmsuite recipe new --stage ppo"),
        ({**PLAIN, "use_chat_template": True}, "use_chat_template = True: texts have no turns"),
        ({**PLAIN, "loss_scale": "default"}, "loss_scale = default"),
        ({**PLAIN, "truncation_strategy": "split"}, "truncation_strategy = split"),
        ({**PLAIN, "dataset": "AI-ModelScope/alpaca-gpt4-data-zh"}, "has rows of format swift_alpaca"),
    ],
)
def test_what_has_no_counterpart_is_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError, match=message):
        converted(ACTION, values)


def test_a_script_is_read_as_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(SCRIPT)
    assert read_shell(path) == {
        "command": "swift sft", "NPROC_PER_NODE": 2, "model": "Qwen/Qwen2.5-7B-Instruct",
        "dataset": "one.jsonl two.jsonl", "system": "Be brief\nand kind.", "gradient_accumulation_steps": 8,
        "packing": True, "learning_rate": 1e-4,
    }  # fmt: skip
    path.write_text("export NNODES=2\ntorchrun --nproc_per_node=4 swift/cli/rlhf.py --dataset a/b#5 --x 1 # more\n")
    assert read_shell(path) == {
        "command": "swift rlhf", "NPROC_PER_NODE": 4, "NNODES": 2, "dataset": "a/b#5", "x": 1,
    }  # fmt: skip
    for text, message in (
        ("swift infer --model x\n", "has no command that trains"),
        ("swift sft --model x\nswift sft --model y\n", "has 2 commands that train"),
        ("swift sft sft.yaml\n", r"the arguments are in sft\.yaml"),
        ("swift sft --system 'x\n", "No closing quotation"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_shell(path)


def test_the_command_writes_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.sh"
    path.write_text(SCRIPT.replace("--system 'Be brief\nand kind.'", ""))
    assert main(["recipe", ACTION, str(path), "-o", "out.json"]) == 0
    out = capsys.readouterr().out
    assert "  NPROC_PER_NODE = 2: launch.num_devices" in out
    assert "is read by its columns" not in out  # they are files
    assert main(["recipe", "from-trl", str(path)]) == 2
    assert "is a shell script; pass the YAML or JSON file" in capsys.readouterr().err


def test_a_dtype_that_is_left_out_is_the_usual_one(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "torch_dtype": "float8"}, leave_out=["torch_dtype"])
    assert found.recipe["engine"] == {"precision": "bf16", "recompute": "full"}


def test_names_of_self_cognition(converted: Converted) -> None:
    """Whatever its address is, names are filled in; a short name is that on the hub."""

    def data(**values: Any) -> Any:
        return converted(ACTION, {**NAMED, **values}).recipe["data"]

    for name, address in (
        ("self-cognition#50", "ms:swift/self-cognition"),
        ("HF::self-cognition", "hf:modelscope/self-cognition"),
        ("HF::modelscope/self-cognition", "hf:modelscope/self-cognition"),
        ("org/self-cognition", "ms:org/self-cognition"),
    ):
        found = data(dataset=name)
        assert (found["train"], found["fill"]["{{NAME}}"]) == (f"{address}?split=train", "robot")
    assert data(dataset="self-cognition", use_hf=True)["train"] == "hf:modelscope/self-cognition?split=train"
    mixed = converted(ACTION, {**NAMED, "dataset": ["one.jsonl", "self-cognition"]})
    assert any(note.startswith("data.fill: replaces these texts in the rows of all files") for note in mixed.notes)


def test_system_turns(converted: Converted) -> None:
    def system(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values})

    assert system(system="Be brief\\nand kind.").recipe["data"]["system"] == "Be brief\nand kind."
    none = system(system="", model="LLM-Research/Meta-Llama-3-8B-Instruct")
    assert "system" not in none.recipe["data"]
    assert ("system", "", "the template has no system turn of its own") in none.left_out


def test_base_models_of_qwen_have_the_template_of_instruct(converted: Converted) -> None:
    """Their tokenizers have another system turn, and another end-of-sequence token, which ms-swift does not write."""
    for model, system in (("Qwen2.5-7B", "You are Qwen, created by Alibaba Cloud. "), ("Qwen2-7B", "")):
        found = converted(ACTION, {**BARE, "model": f"Qwen/{model}"})
        text = turns_text(CHATML, f"{system}You are a helpful assistant.")
        assert found.recipe["data"]["chat_template"] == text
        for kind in ("dpo", "kto"):
            data = converted(ACTION, {**RLHF, "rlhf_type": kind, "model": f"Qwen/{model}"}).recipe["data"]
            assert data["end_of_answer"] == "template"


def test_revisions_become_parts_of_names(converted: Converted) -> None:
    """A branch that a hub has by default is none."""
    named = converted(ACTION, {**BARE, "model_revision": "v1"})
    assert named.recipe["model"]["weights"] == "ms:Qwen/Qwen2.5-7B-Instruct@v1"
    assert named.recipe["model"]["preset"] == "qwen2.5-7b"
    usual = converted(ACTION, {**BARE, "model_revision": "master"})
    assert ("model_revision", "master", "is the default") in usual.left_out
    local = converted(ACTION, {**BARE, "model": "./Qwen2.5-7B-Instruct", "model_revision": "v1"})
    assert ("model_revision", "v1", "the weights are a directory") in local.left_out


def test_both_names_of_the_tuner(converted: Converted) -> None:
    found = converted(ACTION, {**FULL, "train_type": "lora"})
    assert found.recipe["stage"] == "sft"
    assert ("train_type", "lora", "tuner_type takes precedence") in found.left_out


def test_the_last_batch_of_an_epoch_is_in_the_report(converted: Converted) -> None:
    assert any(note.startswith("train.num_epochs: the last batch") for note in converted(ACTION, BARE).notes)
    dropped = converted(ACTION, {**BARE, "dataloader_drop_last": True})
    assert not any(note.startswith("train.num_epochs") for note in dropped.notes)
