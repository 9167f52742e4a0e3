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
    "save_strategy": "epoch", "src_length": 1024, "max_length": 2048, "load_best_model_at_end": True,
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
    "max_seq_len": 4096, "max_prompt_len": 2048, "load_best_model_at_end": True, "tensor_parallel_degree": 4,
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
    assert recipe["pretrain"] == {"split": "949,50,1"}
    assert recipe["parallel"] == {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline_schedule": "1F1B", "sharding": "stage1",
        "sequence_parallel": True,
    }  # fmt: skip
    assert recipe["engine"] == {"mode": "dynamic", "precision": "bf16", "recompute": "selective"}
    assert recipe["train"] == {
        "max_steps": 1000, "global_batch_size": 16, "micro_batch_size": 2, "learning_rate": 3e-5,
        "lr_schedule": "cosine", "warmup_ratio": 0.03, "min_lr_ratio": 0.1, "weight_decay": 0.01, "adam_beta2": 0.95,
        "max_grad_norm": 1.0, "eval_steps": 250,
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


def test_sft(converted: Convert) -> None:
    found = converted(SFT)
    recipe, left = found.recipe, {key: why for key, _, why in found.left_out}
    assert recipe["stage"] == "sft"
    assert recipe["model"]["weights"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert recipe["model"]["preset"] == "llama-3.1-8b"
    assert recipe["data"] == {
        "train": "./data/train.json", "eval": "./data/dev.json", "max_length": 2048, "packing": "best_fit",
    }  # fmt: skip
    assert recipe["train"]["num_epochs"] == 3
    assert recipe["train"]["global_batch_size"] == 2 * 4 * 4
    assert recipe["checkpoint"] == {"keep_last": 2}
    assert "train.warmup_ratio" in left["warmup_steps"]
    assert "eval/loss" in left["load_best_model_at_end"]
    assert "data.max_length" in left["src_length"]


def test_lora(converted: Convert) -> None:
    recipe = converted(LORA).recipe
    assert recipe["stage"] == "lora"
    assert recipe["lora"] == {"rank": 16, "alpha": 32.0}
    assert recipe["model"]["family"] == "qwen"


def test_dpo_with_adapters(converted: Convert) -> None:
    recipe = converted(DPO, num_devices=16).recipe
    assert recipe["stage"] == "dpo"
    assert recipe["dpo"] == {"loss": "hinge", "beta": 0.2}
    assert recipe["lora"] == {"rank": 64, "alpha": 4.0, "rslora": True}
    assert recipe["data"]["train"], recipe["data"]["eval"] == ("./data/train.jsonl", "./data/dev.jsonl")
    assert recipe["engine"]["offload_optimizer"] is True
    assert recipe["launch"] == {"num_devices": 8, "nnodes": 2}
    assert recipe["parallel"] == {"tensor_parallel_degree": 4, "sharding": "stage1", "expert_parallel_degree": 2}
    assert recipe["checkpoint"]["best_metric"] == "eval/loss"
    assert recipe["train"]["max_steps"] == 100
    assert recipe["train"]["warmup_ratio"] == 0.1


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
    anyway |= {"num_train_epochs", "save_steps", "lora", "tokenizer_name_or_path"}
    whole = converted(values)
    for key in values.keys() - anyway - {"model_name_or_path", "input_dir", "train_dataset_path", "learning_rate"}:
        if key == "dataset_name_or_path":
            continue
        assert converted({k: v for k, v in values.items() if k != key}, stage=whole.recipe["stage"]) != whole, key


def test_what_is_not_known_is_told_with_the_nearest_key(converted: Convert) -> None:
    left = {key: (value, why) for key, value, why in converted({**SFT, "learning_rat": 5, "zzz": [1]}).left_out}
    assert left["learning_rat"] == (5, "is not known; nearest key: train.learning_rate")
    assert left["zzz"] == ([1], "is not known")


def test_what_has_no_choice_here_is_told(converted: Convert) -> None:
    for values, key in (
        ({**DPO, "loss_type": "sppo_hard"}, "loss_type"),
        ({**SFT, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({**SFT, "tensor_parallel_degree": 1, "sequence_parallel": True}, "sequence_parallel"),
        ({**PRETRAIN, "recompute_granularity": "odd"}, "recompute_granularity"),
    ):
        found = converted(values)
        assert key in {name for name, _, _ in found.left_out}, key
    found = converted({**SFT, "tensor_parallel_degree": 8})
    assert ("sharding", "stage2", "there is one data rank on 8 devices") in found.left_out
    assert "sharding" not in found.recipe["parallel"]
    packed, unpacked = (converted({**DPO, "zero_padding": True}, stage=stage) for stage in ("dpo", "kto"))
    assert packed.recipe["data"]["packing"] == "best_fit"
    assert ("zero_padding", True, "rows are not packed in stage kto") in unpacked.left_out


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"learning_rate": 1}, {}, "tells no stage; add --stage"),
        ({**SFT, "model_name_or_path": "mistral-7b"}, {}, "tells no family; add --family"),
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
    found = convert(arguments, path.name, registry)
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
    for words in (["recipe", "from-paddlenlp"], ["recipe", "from-paddlenlp", str(path), "--preset", "x"]):
        assert main(["--no-plugins", *words]) == 2
