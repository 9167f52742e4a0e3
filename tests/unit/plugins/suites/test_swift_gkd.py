"""`swift rlhf --rlhf_type gkd` as a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-swift"
GKD = {
    "command": "swift rlhf",
    "rlhf_type": "gkd",
    "model": "Qwen/Qwen2.5-7B",
    "teacher_model": "Qwen/Qwen2.5-14B-Instruct",
    "tuner_type": "full",
    "dataset": "rows.jsonl",
    "max_length": 2048,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
}
SAMPLED = {
    "teacher": "ms:Qwen/Qwen2.5-14B-Instruct",
    "teacher_preset": "qwen2.5-14b",
    "beta": 0.5,
    "temperature": 0.9,
    "last_turn": True,
    "mean": "micro_batches",
    "on_policy": 0.5,
    "answer_end": "<|im_end|>\n",
    "row_length": 2048,
}
"""Section of a file with the defaults of ms-swift."""
ALWAYS = {key: value for key, value in SAMPLED.items() if key != "row_length"}
OFFLINE = {key: value for key, value in ALWAYS.items() if key not in ("on_policy", "answer_end")}


def test_a_file_with_its_defaults_samples_half_of_the_steps(converted: Converted) -> None:
    found = converted(ACTION, {**GKD, "dataloader_num_workers": 4, "use_vllm": True, "vllm_mode": "server"})
    recipe = found.recipe
    assert recipe["stage"] == "gkd"
    assert recipe["gkd"] == SAMPLED
    assert recipe["rollout"] == {
        "num_generations": 1,
        "max_completion_length": 512,
        "temperature": 0.9,
        "stop": ["<|im_end|>"],
    }
    data = recipe["data"]
    assert (data["max_length"], data["drop_last"], data["group_by_length"]) == (2048 + 512 + 2, True, False)
    assert "num_workers" not in data


@pytest.mark.parametrize(
    ("values", "own"),
    [
        ({"lmbda": 0}, OFFLINE),
        ({"lmbda": 0, "sft_alpha": 0.1, "beta": 1}, {**OFFLINE, "sft_weight": 0.1, "beta": 1.0}),
        ({"lmbda": 1.0, "temperature": 1.0}, {**ALWAYS, "on_policy": 1.0, "temperature": 1.0, "truncate": True}),
        (
            {"lmbda": 0, "loss_scale": "default"},
            {key: value for key, value in OFFLINE.items() if key != "last_turn"},
        ),
    ],
)
def test_the_section(values: dict[str, Any], own: dict[str, Any], converted: Converted) -> None:
    found = converted(ACTION, {**GKD, **values})
    assert found.recipe["gkd"] == own
    assert ("rollout" in found.recipe) == ("on_policy" in own)
    assert found.recipe["data"]["max_length"] == (2562 if "on_policy" in own else 2048)


def test_one_row_in_a_micro_batch_may_be_grouped_by_length(converted: Converted) -> None:
    found = converted(ACTION, {**GKD, "per_device_train_batch_size": 1})
    assert "group_by_length" not in found.recipe["data"]
    assert found.recipe["gkd"]["mean"] == "micro_batches"


def test_adapters_have_no_dropout(converted: Converted) -> None:
    """Trainers that are made of TRL's turn it off, by `disable_dropout`."""
    for values in ({"lmbda": 0}, {"lmbda": 0.5}, {"lora_dropout": 0.1}):
        found = converted(ACTION, {**GKD, "tuner_type": "lora", **values})
        assert "dropout" not in found.recipe["lora"]
    assert ("lora_dropout", 0.1, "the trainer of this stage turns dropout off, also that of adapters") in found.left_out


def test_the_model_has_positions_for_its_answers(converted: Converted) -> None:
    found = converted(ACTION, {**GKD, "max_length": 32768, "max_completion_length": 1024})
    assert found.recipe["data"]["max_length"] == 32768 + 1024 + 2
    assert found.recipe["model"]["config"] == {"max_position_embeddings": 32768 + 1024 + 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher_model": None}, "teacher_model = not given: the model is then its own teacher"),
        ({"teacher_model_server": "http://a"}, "teacher_model_server = http://a"),
        ({"gkd_logits_topk": 64}, "gkd_logits_topk = 64: compares the most likely tokens only"),
        ({"seq_kd": True}, "seq_kd = True"),
        ({"packing": True}, "packing = True: the loss is a mean over each pack"),
        ({"use_liger_kernel": True}, "use_liger_kernel = True"),
        ({"truncation_strategy": "left"}, "truncation_strategy = left"),
        ({"steps_per_generation": 2}, "steps_per_generation = 2: each step samples answers of its own"),
        ({"multi_turn_scheduler": "math_tip_trick"}, "multi_turn_scheduler = math_tip_trick"),
        ({"external_plugins": "plugin.py"}, "external_plugins = plugin.py"),
        ({"loss_scale": "default"}, "loss_scale = default: supervises all answers of a conversation"),
        ({"model": "Qwen/Qwen3-8B-Base"}, "lmbda = 0.5: samples answers, whose last tokens depend on the template"),
        ({"use_vllm": True, "vllm_max_model_len": 2048}, "vllm_max_model_len = 2048"),
    ],
)
def test_other_jobs_are_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError) as refused:
        converted(ACTION, {**GKD, **values})
    assert message in str(refused.value)


def test_a_teacher_of_grpo_is_refused(converted: Converted) -> None:
    with pytest.raises(UserError, match="teacher_model = "):
        converted(ACTION, {**GKD, "rlhf_type": "grpo", "reward_funcs": ["accuracy"]})
