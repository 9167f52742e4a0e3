"""LLaMA-Factory's files become recipes: the same numbers, its defaults where nothing is said, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.plugins.suites.turn_texts import CHATML, LLAMA_3, turns_text
from tests.support import awq_files
from tests.support.llamafactory import ACTION, DPO, FULL, SFT
from tests.support.marked import marked
from tests.unit.plugins.suites.conftest import Converted

BARE = {"model_name_or_path": "Qwen/Qwen3-8B", "do_train": True, "dataset": "mine", "template": "qwen3"}
PLAIN = turns_text(CHATML, None, fills_empty_system=True)
"""The template of `SFT`."""


def test_sft_with_adapters(converted: Converted) -> None:
    found = converted(ACTION, SFT, num_devices=4)
    assert found.recipe == {
        "stage": "lora", "source": "LLaMA-Factory x.yaml",
        "model": {"family": "qwen", "weights": "Qwen/Qwen3-8B", "preset": "qwen3-8b"},
        "data": {
            "train": "data/mine.json", "max_length": 1024, "chat_template": PLAIN, "end_of_answer": "template",
            "num_workers": 2, "ignore_columns": ["*"],
        },
        "engine": {"precision": "bf16", "recompute": "full"}, "launch": {"num_devices": 4},
        "train": {
            "num_epochs": 2, "global_batch_size": 32, "micro_batch_size": 2, "learning_rate": 2e-4,
            "lr_schedule": "cosine", "warmup_ratio": 0.1, "warmup_from_zero": True, "log_steps": 5,
        },
        "sft": {"truncate": True}, "lora": {"rank": 16, "alpha": 32.0}, "checkpoint": {"save_steps": 50},
        "device": "gpu", "seed": 42, "output_dir": "saves/x",
    }  # fmt: skip
    assert ("learning_rate", 2e-4) in found.same
    assert ("cutoff_len", 1024, "data.max_length") in found.translated
    assert ("plot_loss", True, "see: llmsuite report") in found.left_out


def test_defaults_of_the_suite(converted: Converted) -> None:
    """Adapters of rank 8 and alpha 16 on all matrices, 3 epochs, batches of 8, a linear schedule."""
    recipe = converted(ACTION, BARE).recipe
    assert recipe["stage"] == "lora"
    assert recipe["lora"] == {"rank": 8, "alpha": 16.0}
    assert recipe["train"] == {
        "num_epochs": 3, "global_batch_size": 8, "micro_batch_size": 8, "learning_rate": 5e-5, "lr_schedule": "linear",
    }  # fmt: skip
    assert recipe["data"]["max_length"] == 2048
    assert recipe["engine"] == {"precision": "fp32", "recompute": "full"}
    assert recipe["checkpoint"] == {"save_steps": 500}


def test_pure_bf16(converted: Converted) -> None:
    """All that is trained, adapters too, and without mixed precision."""
    for values in (FULL, {**SFT, "bf16": False, "additional_target": "lm_head"}):
        found = converted(ACTION, {**values, "deepspeed": None, "pure_bf16": True})
        assert found.recipe["engine"]["precision"] == "bf16"
        assert found.recipe["train"]["master_weights"] is False
        assert [note for note in found.notes if "adamw_torch_fused, which is the default" in note]
    assert "master_weights" not in converted(ACTION, {**SFT, "pure_bf16": False}).recipe["train"]


def test_adapters_on_quantised_weights(converted: Converted, tmp_path: Path) -> None:
    """Adapters are trained on the values of the codes, which are not quantised again."""
    awq_files.publish(tmp_path / "tiny-llama-AWQ", group_size=32)
    values = {**SFT, "model_name_or_path": f"{tmp_path}/tiny-llama-AWQ", "cutoff_len": 64}
    found = converted(ACTION, values).recipe
    assert found["model"] == {"family": "llama", "weights": f"{tmp_path}/tiny-llama-AWQ"}
    assert found["lora"] == {"rank": 16, "alpha": 32.0}


def test_dpo_becomes_a_recipe(converted: Converted) -> None:
    assert converted(ACTION, DPO).recipe["dpo"] == {"beta": 0.2, "loss": "sigmoid"}
    assert converted(ACTION, {**DPO, "pref_loss": "ipo"}).recipe["dpo"]["loss"] == "ipo_mean"  # it divides by tokens
    simpo = converted(ACTION, {**DPO, "pref_loss": "simpo"}).recipe["dpo"]
    assert simpo == {"beta": 0.2, "loss": "simpo", "gamma": 0.5}
    assert converted(ACTION, {**DPO, "dpo_label_smoothing": 0.1}).recipe["dpo"]["label_smoothing"] == 0.1
    kto = converted(ACTION, {**SFT, "stage": "kto", "kto_chosen_weight": 1.5}).recipe
    assert (kto["stage"], kto["kto"]) == ("kto", {"beta": 0.1, "desirable_weight": 1.5})


def test_trainers_of_preferences_turn_dropout_off(converted: Converted) -> None:
    """Those of LLaMA-Factory do so by default, also for adapters."""
    assert converted(ACTION, {**SFT, "lora_dropout": 0.1}).recipe["lora"]["dropout"] == 0.1
    for stage in ("dpo", "kto"):
        found = converted(ACTION, {**SFT, "stage": stage, "lora_dropout": 0.1})
        assert "dropout" not in found.recipe["lora"]


def test_adapters_become_the_section_lora(converted: Converted) -> None:
    def lora(**values: Any) -> Any:
        return converted(ACTION, {**SFT, **values}).recipe["lora"]

    assert lora(lora_target="q_proj, v_proj")["target_modules"] == ["q_proj", "v_proj"]
    assert lora(additional_target="embed_tokens,lm_head")["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert lora(lora_alpha=8)["alpha"] == 8.0
    assert lora(use_dora=True)["method"] == "dora"
    assert lora(loraplus_lr_ratio=16.0)["lora_plus_ratio"] == 16.0
    assert lora(use_rslora=True)["rslora"] is True
    assert lora(pissa_init=True)["init"] == "pissa"
    assert lora(quantization_bit=4, double_quantization=False)["base_dtype"] == "nf4"
    assert lora(quantization_bit=4)["base_double_quant"] is True
    eight = lora(quantization_bit=8)
    assert eight["base_dtype"] == "llm_int8"
    assert "base_double_quant" not in eight


def test_strategy_and_schedule(converted: Converted) -> None:
    full = converted(
        ACTION, {**FULL, "deepspeed": "examples/deepspeed/ds_z3_offload_config.json"}, num_devices=8
    ).recipe
    assert (full["stage"], full["parallel"]) == ("sft", {"sharding": "stage3"})
    assert full["engine"]["offload_optimizer"] is True
    steps = converted(ACTION, {**SFT, "max_steps": 30, "warmup_ratio": 0.05}).recipe["train"]
    assert (steps["max_steps"], steps["warmup_steps"]) == (30, 2)
    assert "num_epochs" not in steps
    least = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-5}}
    assert converted(ACTION, {**SFT, **least}).recipe["train"]["min_lr_ratio"] == 0.1
    plain = converted(ACTION, {**SFT, "disable_gradient_checkpointing": True, "neat_packing": True}).recipe
    assert "recompute" not in plain["engine"]
    assert plain["data"]["packing"] == "best_fit"
    for number, devices in ((4, 4), (0, 1)):
        assert converted(ACTION, {**SFT, "ray_num_workers": number}).recipe["launch"] == {"num_devices": devices}


def test_evaluation_follows_the_arguments(converted: Converted) -> None:
    given = {**SFT, "eval_dataset": "held", "eval_strategy": "steps", "eval_steps": 20, "load_best_model_at_end": True}
    recipe = converted(ACTION, given).recipe
    assert (recipe["data"]["eval"], recipe["train"]["eval_steps"]) == ("data/held.json", 20)
    assert recipe["checkpoint"]["best_metric"] == "eval/loss"
    assert "eval" not in converted(ACTION, {**SFT, "eval_dataset": "held"}).recipe["data"]  # eval_strategy is no


def test_rows_are_held_out_as_there(converted: Converted) -> None:
    for size, expected in ((0.1, 0.1), (100, 100), (100.0, 100)):
        given = {**SFT, "val_size": size, "eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True}
        recipe = converted(ACTION, {**given, "early_stopping_steps": 3}).recipe
        assert recipe["data"]["holdout"] == expected
        assert type(recipe["data"]["holdout"]) is type(expected)
        assert (recipe["train"]["eval_steps"], recipe["train"]["early_stopping"]) == (5, {"patience": 3})
        assert recipe["checkpoint"]["best_metric"] == "eval/loss"
    assert "holdout" not in converted(ACTION, {**SFT, "val_size": 0.0}).recipe["data"]
    assert converted(ACTION, {**SFT, "val_size": 0.1}).recipe["data"]["holdout"] == 0.1, "they are not trained on"
    with pytest.raises(UserError, match="has val_size and eval_dataset"):
        converted(ACTION, {**SFT, "val_size": 0.1, "eval_dataset": "held"})


def test_the_default_system_turn(converted: Converted) -> None:
    """LLaMA-Factory writes it in place of an empty one too."""
    brief = converted(ACTION, {**SFT, "default_system": "It's {{ x }}\n"}).recipe["data"]["chat_template"]
    for turns in ([("user", "Hi")], [("system", ""), ("user", "Hi")]):
        assert marked(brief, *turns) == "{system\nIt's {{ x }}\n}\n{user\nHi}\n"
    qwen = {**SFT, "template": "qwen", "model_name_or_path": "Qwen/Qwen2.5-7B", "default_system": ""}
    assert converted(ACTION, qwen).recipe["data"]["chat_template"] == PLAIN


def test_revisions_become_parts_of_names(converted: Converted) -> None:
    assert converted(ACTION, {**SFT, "model_revision": "v1"}).recipe["model"]["weights"] == "Qwen/Qwen3-8B@v1"
    usual = converted(ACTION, {**SFT, "model_revision": "main"})
    assert usual.recipe["model"]["weights"] == "Qwen/Qwen3-8B"
    assert ("model_revision", "main", "is the default") in usual.left_out


NOT_THE_SAME: list[tuple[dict[str, Any], str]] = [
    ({**SFT, "learning_rat": 5}, "learning_rat = 5: is not known; did you mean learning_rate"),
    ({**SFT, "model_name_or_path": "mistralai/Mistral-7B-v0.3"}, r"writes <\|im_start\|>, which is not a token of"),
    ({**SFT, "template": "mistral"}, r"template = mistral: is a template .*nearest: data\.chat_template mistral\)"),
    ({**SFT, "template": None}, "template = not given: LLaMA-Factory makes one of the tokenizer's"),
    ({**SFT, "template": "qwen3", "enable_thinking": False}, "enable_thinking = False: removes thoughts"),
    ({**SFT, "template": "qwen3", "enable_thinking": None}, "enable_thinking = None: removes thoughts"),
    ({**SFT, "val_size": 1}, "val_size = 1: is one row, or all rows as 1.0"),
    ({**SFT, "packing": True}, "tokens attend to other rows of a pack"),
    ({**SFT, "val_size": 0.1, "streaming": True}, "val_size = 0.1: with streaming it holds the first rows"),
    ({**SFT, "early_stopping_steps": 3}, "early_stopping_steps = 3: needs load_best_model_at_end, and evaluations"),
    ({**SFT, "mask_history": True}, "mask_history = True"),
    ({**DPO, "use_dft_loss": True}, "use_dft_loss = True: is a loss of sft"),
    ({**SFT, "neftune_noise_alpha": 5}, "neftune_noise_alpha = 5"),
    ({**SFT, "optim": "adafactor"}, "optim = adafactor: train.optimizer has adamw"),
    ({**SFT, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type = polynomial"),
    ({**SFT, "num_train_epochs": 0.5}, "num_train_epochs = 0.5: train.num_epochs is an integer"),
    ({**SFT, "quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method = hqq"),
    ({**SFT, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "lora_target = all: includes routed experts and gates"),
    ({**BARE, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "lora_target = all: includes routed experts"),
    ({**SFT, "additional_target": "embed_tokens,norm"}, "additional_target = norm: lora.modules_to_save has"),
    ({**SFT, "pure_bf16": True, "deepspeed": "x_z2_config.json"}, "pure_bf16 = True: with deepspeed: DeepSpeed has"),
    ({**SFT, "pure_bf16": True, "quantization_bit": 4}, "pure_bf16 = True: with quantization_bit: adapters of"),
    (
        {**SFT, "pure_bf16": True, "optim": "adamw_torch"},
        "optim = adamw_torch: rounds parameters in 16 bits after each",
    ),
    ({**SFT, "finetuning_type": "freeze"}, "finetuning_type = freeze"),
    ({**SFT, "adapter_name_or_path": "x"}, "after `llmsuite merge`"),
    ({**DPO, "pref_loss": "orpo"}, "pref_loss = orpo: weights chosen answers equally"),
    ({**DPO, "pref_loss": "kto_pair"}, "pref_loss = kto_pair"),
    ({**DPO, "pref_ftx": 0.1}, "pref_ftx = 0.1: weights answers equally"),
    ({**DPO, "ref_model": "x"}, "ref_model = x: the reference is the initial model"),
    ({**SFT, "stage": "rm"}, "its stage rm scores by a linear layer with a bias"),
    ({**SFT, "stage": "ppo"}, "stage ppo cannot be converted"),
    ({**SFT, "tensor_model_parallel_size": 1}, "its Megatron engines put adapters"),
    ({**SFT, "model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct"}, "of type for images or sound"),
    ({**SFT, "model_name_or_path": "Qwen/Qwen3.5-4B"}, "of type qwen3_5"),
    ({**SFT, "model_name_or_path": "x/Llama-3-8B-AQLM-2Bit"}, "of type quantised already"),
    ({**SFT, "model_name_or_path": "x/Llama-3-8B-FP8"}, "of type quantised already"),
    (
        {**SFT, "model_name_or_path": "x/Llama-3-8B-GPTQ", "finetuning_type": "full"},
        "model_name_or_path = x/Llama-3-8B-GPTQ: its matrices are quantised; only sft with adapters",
    ),
    ({**DPO, "model_name_or_path": "x/Llama-3-8B-AWQ"}, "its matrices are quantised; only sft with adapters"),
    (
        {**SFT, "model_name_or_path": "x/Llama-3-8B-GPTQ-Int4", "quantization_bit": 4},
        "quantization_type = nf4: the model is quantised already",
    ),
    ({**SFT, "do_train": False}, "do_train is not true, so nothing is trained"),
    ({"model": "Qwen/Qwen3-8B", "train_dataset": "x"}, "the keys of LLaMA-Factory's engine v1"),
    ({"do_train": True, "dataset": "x"}, "has no model_name_or_path"),
    ({**SFT, "dataset": None}, "has no dataset"),
    ({**SFT, "learning_rate": "fast"}, "learning_rate is 'fast'; expected a number"),
]


@pytest.mark.parametrize(("values", "message"), NOT_THE_SAME)
def test_jobs_without_an_equal_recipe_are_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError, match=message):
        converted(ACTION, values)


def test_reasons_can_be_waived(converted: Converted) -> None:
    values = {**SFT, "quantization_bit": 4, "use_muon": True}
    with pytest.raises(UserError, match="add --leave_out use_muon"):
        converted(ACTION, values)
    found = converted(ACTION, values, leave_out=["use_muon"])
    assert found.recipe["source"] == "LLaMA-Factory x.yaml, without use_muon"
    assert found.recipe["lora"]["base_dtype"] == "nf4"
    with pytest.raises(UserError, match=r"--leave_out: x\.yaml has no use_galore"):
        converted(ACTION, SFT, leave_out=["use_galore"])


def test_the_template_of_llama_3(converted: Converted) -> None:
    for model in ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"):
        found = converted(ACTION, {**SFT, "model_name_or_path": model, "template": "llama3"}).recipe["data"]
        assert found["chat_template"] == turns_text(LLAMA_3, None, fills_empty_system=True)
        assert found["end_of_answer"] == "template"


def test_stages_that_train_on_the_last_answer(converted: Converted) -> None:
    text = converted(ACTION, {**DPO, "template": "qwen3"}).recipe["data"]["chat_template"]
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    expected = "{user\na}\n{assistant\nb}\n{user\nc}\n{assistant\n[<think>\n\n</think>\n\nd}\n]"
    assert marked(text, *turns, last=True) == expected
    with pytest.raises(UserError, match="writes no thoughts of earlier answers"):
        marked(text, ("user", "a"), ("assistant", "<think>\nx\n</think>\n\nb"), *turns[2:], last=True)


def _text_of(converted: Converted, **values: Any) -> str:
    text = converted(ACTION, {**SFT, **values}).recipe["data"]["chat_template"]
    assert isinstance(text, str)
    return text


def _encoded(turns: Sequence[tuple[str, str]], system: str | None, has_thoughts: bool) -> str:
    """The slots of LLaMA-Factory's templates qwen and qwen3 (ff6d4d12, data/template.py), with [ ] around the
    responses, all of whose tokens are labels."""
    found = ""
    if turns[0][0] == "system":
        (_, system), *turns = turns
    if system:
        found = f"{{system\n{system}}}\n"
    for role, content in turns:
        if role == "user":
            found += f"{{user\n{content}}}\n{{assistant\n"
            continue
        has_thought = "<think>" in content or "</think>" in content
        thought = "<think>\n\n</think>\n\n" if has_thoughts and not has_thought else ""
        found += f"[{thought}{content}}}\n]"
    return found


@pytest.mark.parametrize(
    "turns",
    [
        (("user", "Hi"), ("assistant", "Hello.")),
        (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4 ")),
        (("user", " a "), ("assistant", "<think>\nb\n</think>\n\nc"), ("user", "d"), ("assistant", "e</think>f")),
        (("user", "a"), ("assistant", "")),
    ],
)
def test_texts_of_templates(turns: Sequence[tuple[str, str]], converted: Converted) -> None:
    qwen = _text_of(converted, template="qwen", model_name_or_path="Qwen/Qwen2-1.5B-Instruct")
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert marked(qwen, *turns) == _encoded(turns, default, False)
    assert marked(_text_of(converted, template="qwen3"), *turns) == _encoded(turns, None, True)


def test_rows_that_a_text_does_not_write_alike(converted: Converted) -> None:
    text = _text_of(converted, template="qwen3", enable_thinking=True)
    with pytest.raises(UserError, match="begins with white space"):
        marked(text, ("user", "a"), ("assistant", "\nb"))
    assert marked(text, ("user", "a"), ("assistant", " <think>x</think>")) == _encoded(
        [("user", "a"), ("assistant", " <think>x</think>")], None, True
    )


def test_the_loss_dft(converted: Converted) -> None:
    assert converted(ACTION, {**SFT, "use_dft_loss": True}).recipe["sft"] == {"truncate": True, "loss": "dft"}
    assert "loss" not in converted(ACTION, {**SFT, "use_dft_loss": False}).recipe["sft"]


def test_the_command_writes_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    lines = [f"{key}: {'' if value is None else str(value)}" for key, value in SFT.items()]
    path.write_text("\n".join(lines).replace("True", "yes").replace("0.0002", "2.0e-4"))
    assert main(["recipe", ACTION, str(path), "-o", "out.json", "--num_devices=2"]) == 0
    out = capsys.readouterr().out
    assert "wrote out.json" in out
    assert "  cutoff_len = 1024: data.max_length" in out
    assert "arguments have no counterpart, and do not affect the training" in out
    assert json.loads((tmp_path / "out.json").read_text())["train"]["global_batch_size"] == 16
    path.write_text("stage: sft\nstage: dpo\n")
    assert main(["recipe", ACTION, str(path)]) == 2
    assert f"{path}:2:1: stage: is given twice" in capsys.readouterr().err
    path.write_text("- a\n")
    assert main(["recipe", ACTION, str(path)]) == 2
    assert f"{path}:1:1: has no keys" in capsys.readouterr().err
    assert main(["recipe", ACTION]) == 2
    assert f"recipe {ACTION}: name the file" in capsys.readouterr().err


def test_keys_of_other_jobs(converted: Converted) -> None:
    """Arguments that LLaMA-Factory does not read for a stage or tuning method are ignored; a misspelt one is
    refused."""
    others = {"lora_rank": 8, "lora_target": "all", "loraplus_lr_ratio": 16.0, "pref_beta": 0.1, "kto_chosen_weight": 1}
    left = {key: why for key, _, why in converted(ACTION, {**FULL, **others}).left_out}
    assert {left[key] for key in list(others)[:3]} == {"belongs to finetuning_type lora"}
    assert (left["pref_beta"], left["kto_chosen_weight"]) == ("belongs to stages dpo and kto", "belongs to stage kto")
    for values, meant in ((SFT, "lora_rank"), (FULL, "lora_rank"), (DPO, "pref_beta"), (SFT, "cutoff_len")):
        wrong = meant[:-3] + meant[-2] + meant[-3] + meant[-1]
        with pytest.raises(UserError, match=f"{wrong} = 8: is not known; did you mean {meant}\\?"):
            converted(ACTION, {**values, wrong: 8})
    with pytest.raises(UserError, match="quantization_bit = 4: is for adapters only"):
        converted(ACTION, {**FULL, "quantization_bit": 4})


def test_default_values_are_ignored(converted: Converted) -> None:
    values = {"average_tokens_across_devices": True, "ignore_pad_token_for_loss": True, "mix_strategy": "concat"}
    found = converted(ACTION, {**SFT, **values})
    assert [key for key, _, why in found.left_out if "default value" in why] == list(values)
    with pytest.raises(UserError, match="average_tokens_across_devices = False: the loss is averaged over the tokens"):
        converted(ACTION, {**SFT, "average_tokens_across_devices": False})


def test_shares_of_the_steps(converted: Converted) -> None:
    shares = {**SFT, "eval_dataset": "mine", "eval_strategy": "steps", "eval_steps": 0.15}
    found = converted(ACTION, shares)
    assert found.recipe["train"]["eval_steps"] == 0.15
    assert converted(ACTION, {**shares, "max_steps": 50}).recipe["train"]["eval_steps"] == 8
    assert converted(ACTION, {**shares, "eval_steps": None}).recipe["train"]["eval_steps"] == SFT["logging_steps"]


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "its scheduler replaces lr_scheduler_type"),
        ({"optimizer": {"type": "Lamb"}}, "its optimizer is Lamb; train.optimizer has adamw"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, None),
        ({"tensor_parallel": {"autotp_size": 2}}, "its tensor_parallel reduces the number"),
    ],
)
def test_other_jobs_in_the_file_of_deepspeed(
    section: dict[str, Any], why: str | None, converted: Converted, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **section}))
    values = {**SFT, "deepspeed": "ds.json"}
    if why is None:
        assert converted(ACTION, values, num_devices=2).recipe["parallel"] == {"sharding": "stage3"}
    else:
        with pytest.raises(UserError, match=f"deepspeed = ds.json: {why}"):
            converted(ACTION, values)


def test_a_section_of_deepspeed_that_is_none_is_named(converted: Converted, tmp_path: Path) -> None:
    for given in ({"zero_optimization": "auto"}, {"optimizer": "AdamW"}):
        (tmp_path / "ds.json").write_text(json.dumps(given))
        ((name, value),) = given.items()
        with pytest.raises(UserError, match=f"ds.json: {name} is '{value}'; expected a section"):
            converted(ACTION, {**SFT, "deepspeed": "ds.json"})


def test_the_report_has_the_values_of_the_file(converted: Converted) -> None:
    options = {"min_lr": 2e-5}
    found = converted(ACTION, {**SFT, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": options})
    assert found.recipe["train"]["min_lr_ratio"] == 0.1
    assert ("lr_scheduler_kwargs", {"min_lr": 2e-5}, "train.min_lr_ratio") in found.translated
    assert options == {"min_lr": 2e-5}


def test_leaving_out_what_can_be_followed(converted: Converted) -> None:
    found = converted(ACTION, {**SFT, "use_muon": True}, leave_out=["use_muon", "template"])
    assert found.recipe["source"] == "LLaMA-Factory x.yaml, without use_muon"
    assert found.recipe["data"]["chat_template"] == PLAIN
    assert any(note.startswith("--leave_out: the recipe can express template") for note in found.notes)


def test_the_family_of_a_directory(converted: Converted, tmp_path: Path) -> None:
    """The config.json determines the family if the name does not."""
    values = {**SFT, "model_name_or_path": "./mine"}
    with pytest.raises(UserError, match="whose family is not known"):
        converted(ACTION, values)
    (tmp_path / "mine").mkdir()
    for text, said in (
        ("{}", "whose family is not known"),
        ('{"model_type": "mamba"}', "of type mamba, which no family"),
    ):
        (tmp_path / "mine/config.json").write_text(text)
        with pytest.raises(UserError, match=said):
            converted(ACTION, values)
    (tmp_path / "mine/config.json").write_text('{"model_type": "qwen3"}')
    assert converted(ACTION, values).recipe["model"] == {"family": "qwen", "weights": "./mine"}


@pytest.mark.parametrize("stage", ["grpo", "online_dpo", "ppo", "infer"])
def test_stages_that_no_file_becomes(stage: str, converted: Converted) -> None:
    with pytest.raises(UserError, match=f"--stage {stage}: cannot be converted to; choose dpo, kto, lora, pretrain"):
        converted(ACTION, SFT, stage=stage)
