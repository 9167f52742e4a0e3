"""Arguments of PaddleNLP that no recipe can express are refused or reported."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from tests.support.paddlenlp_arguments import DPO, LORA, PRETRAIN, SFT, Convert

NOT_THE_SAME: list[tuple[dict[str, Any], str]] = [
    ({**SFT, "learning_rat": 5}, "learning_rat = 5: is not known; nearest key: train.learning_rate"),
    ({**SFT, "zzz": [1]}, r"zzz = \[1\]: is not known"),
    ({**LORA, "prefix_tuning": True}, "prefix_tuning = True: together with LoRA"),
    ({**DPO, "prefix_tuning": True}, "prefix_tuning = True: is for stage sft"),
    ({**SFT, "prefix_tuning": True, "prefix_path": "x"}, "prefix_path = x: prefixes are initialised at random"),
    ({**SFT, "reft": True, "intervention_type": "x"}, "reft = True: its rotation is orthonormal only at the start"),
    ({**LORA, "lokr": True}, "lokr = True: with lora there would be two adapters"),
    ({**SFT, "lokr": True, "lokr_path": "x"}, "lokr_path = x: nearest key: model.weights"),
    ({**DPO, "lokr": True}, "lokr = True: only run_finetune.py reads it"),
    ({**LORA, "vera": 1}, "vera = 1: both its factors are initialised with the largest singular"),
    (
        {**LORA, "model_name_or_path": "Qwen/Qwen2-57B-A14B", "loraga": True},
        "loraga = True: routed experts get adapters there, and few tokens reach each",
    ),
    (
        {**LORA, "model_name_or_path": "baidu/ERNIE-4.5-21B-A3B-PT"},
        "lora = True: PaddleNLP defines no adapter matrices",
    ),
    ({**LORA, "pissa": True, "lora_use_mixer": True}, "pissa = True: cannot be combined"),
    ({**LORA, "use_mora": True, "pissa": True}, "use_mora = True: cannot be combined"),
    ({**LORA, "loraga": True, "pissa": True}, "loraga = True: cannot be combined with a mixer, DoRA, MoRA or PiSSA"),
    ({**LORA, "loraga": True, "loraga_stable_gamma": -1}, "loraga_stable_gamma = -1: nearest key: lora.init_gamma"),
    (
        {**LORA, "weight_quantize_algo": "nf4"},
        "weight_quantize_algo = nf4: its blocks or scales differ",
    ),
    ({**SFT, "hidden_dropout_prob": 0.1}, "hidden_dropout_prob = 0.1: models are trained without dropout"),
    ({**PRETRAIN, "model_name_or_path": "gpt2-medium-en"}, "hidden_dropout_prob = not given: with GPT it is 0.1"),
    ({**PRETRAIN, "model_name_or_path": "deepseek-ai/DeepSeek-V3"}, "num_nextn_predict_layers = not given"),
    ({**DPO, "loss_type": "sppo_hard"}, "loss_type = sppo_hard: dpo.loss has sigmoid"),
    ({**DPO, "ref_model_update_steps": 10}, "the reference is the initial model"),
    ({**DPO, "pref_loss_ratio": 0.5}, "the preference loss has weight 1"),
    ({**DPO, "process_reward": True}, "scores complete answers"),
    ({**SFT, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type = polynomial"),
    ({**SFT, "num_train_epochs": 0.5}, "num_train_epochs = 0.5: train.num_epochs is an integer"),
    ({**SFT, "optim": "adafactor"}, "optim = adafactor"),
    ({**PRETRAIN, "decay_steps": 500}, "decay_steps = 500: the learning rate decays until the last step"),
    (
        {"actor_model_name_or_path": "x", "rl_algorithm": "grpo", "do_train": 1},
        "rl_algorithm = grpo: .*stage grpo or ppo",
    ),
    ({**SFT, "max_query_len": 512, "loss_type": "contrastive"}, "there is no stage for embedding models"),
    ({**SFT, "do_train": False, "do_ptq": True}, "do_ptq quantises a trained model"),
    ({**SFT, "do_train": False, "do_gptq": True}, "do_gptq quantises a trained model"),
    ({"do_ptq": True, "do_eval": True, "model_name_or_path": "x"}, "do_ptq quantises a trained model"),
    ({**SFT, "do_train": False}, "do_eval without do_train evaluates only"),
    ({**SFT, "do_train": 0, "do_eval": 0, "do_predict": 1}, "generates only"),
    ({**SFT, "do_train": None, "do_eval": False}, "do_train is not true"),
    ({**SFT, "model_name_or_path": "baichuan-inc/Baichuan2-7B-Base"}, "of type baichuan, which no family supports"),
    ({**SFT, "model_name_or_path": "qwen/qwen-14b"}, "of type qwen, which no family supports"),
    ({**SFT, "model_name_or_path": "THUDM/chatglm2-6b"}, "of type chatglm, which"),
    ({**SFT, "model_name_or_path": "google/gemma-2b"}, "of type gemma, which"),
]
"""Jobs that no recipe can express, with the reason."""


@pytest.mark.parametrize(("values", "message"), NOT_THE_SAME)
def test_jobs_without_an_equal_recipe_are_refused(values: dict[str, Any], message: str, converted: Convert) -> None:
    with pytest.raises(UserError, match=message):
        converted(values)


def test_all_reasons_come_at_once_and_can_be_waived(converted: Convert) -> None:
    values = {**SFT, "reft": True, "num_prefix_tokens": 8, "learning_rat": 5, "vera": False}
    with pytest.raises(UserError) as refused:
        converted(values)
    assert "reft = True" in str(refused.value)
    assert str(refused.value).endswith("add --leave_out reft,learning_rat")
    assert str(refused.value).count("reft = ") == 1
    with pytest.raises(UserError, match="--leave_out learning_rat"):
        converted(values, leave_out=["reft"])
    found = converted(values, leave_out=["reft", "learning_rat"])
    assert [key for key, _, _ in found.refused] == ["reft", "learning_rat"]
    assert found.recipe["source"] == "PaddleNLP x_argument.json, without reft, learning_rat"
    ignored = {key: why for key, _, why in found.left_out}
    assert (ignored["num_prefix_tokens"], ignored["vera"]) == ("belongs to prefix_tuning", "is off")
    with pytest.raises(UserError, match=r"--leave_out: x_argument\.json has no lokr"):
        converted(values, leave_out=["lokr"])


def test_wrong_names_to_leave_out_are_reported_with_the_reasons(converted: Convert) -> None:
    for values, reason in (
        ({**SFT, "reft": True, "optim": "adafactor"}, "add --leave_out reft,optim\n"),
        ({**SFT, "reft": True, "model_name_or_path": "mymodel-7b"}, "add --leave_out reft\n"),
        ({**SFT, "model_name_or_path": "mymodel-7b"}, "whose family is not known"),
        ({**SFT, "do_train": False}, "do_eval without do_train"),
        (SFT, ""),
    ):
        with pytest.raises(UserError, match=r"--leave_out: x_argument\.json has no refd$") as refused:
            converted(values, leave_out=["refd"])
        assert reason in str(refused.value)


def test_missing_arguments_can_be_left_out(converted: Convert) -> None:
    values = {**PRETRAIN, "model_name_or_path": "gpt2-medium-en"}
    with pytest.raises(UserError, match=r"add --leave_out hidden_dropout_prob$"):
        converted(values)
    assert [key for key, *_ in converted(values, leave_out=["hidden_dropout_prob"]).refused] == ["hidden_dropout_prob"]


def test_ignored_arguments_are_reported(converted: Convert) -> None:
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
    ("values", "options", "message"),
    [
        ({"learning_rate": 1, "do_train": True}, {}, "does not determine the stage; add --stage"),
        ({**SFT, "model_name_or_path": "mymodel-7b"}, {}, "whose family is not known; if `llmsuite list models` has"),
        ({**SFT, "model_name_or_path": None}, {"family": "llama"}, "has no model_name_or_path"),
        ({**SFT, "learning_rate": "fast"}, {}, "learning_rate is 'fast'; expected a number"),
        ({**PRETRAIN, "input_dir": ""}, {}, "has no input_dir"),
        (SFT, {"stage": "sfx"}, "sfx"),
        (SFT, {"family": "llamma"}, "llamma"),
    ],
)
def test_undetermined_jobs_are_errors(
    values: dict[str, Any], options: dict[str, Any], message: str, converted: Convert
) -> None:
    with pytest.raises(UserError, match=message):
        converted(values, **options)
