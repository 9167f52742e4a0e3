"""GRPO's files of ms-swift and TRL become recipes whose batches count prompts, with rewards that are the same
functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from tests.support import swift, trl
from tests.unit.plugins.suites.conftest import Converted

SWIFT: dict[str, Any] = {
    **swift.BARE, "command": "swift rlhf", "rlhf_type": "grpo", "reward_funcs": "accuracy format",
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
    "lora_dropout": 0,
}  # fmt: skip
TRL: dict[str, Any] = {**trl.BARE, "reward_funcs": ["accuracy_reward"]}


def test_swift_by_its_defaults(converted: Converted) -> None:
    found = converted("from-swift", SWIFT).recipe
    assert found["stage"] == "grpo"
    assert found["rollout"] == {"num_generations": 8, "max_completion_length": 512, "temperature": 0.9}
    assert found["reward"] == {"functions": {"swift_accuracy": 1.0, "swift_format": 1.0}, "time_limit": 60.0}
    assert found["grpo"] == {
        "loss": "grpo", "patience": None, "epsilon": 0.2, "beta": 0.04, "reference": "adapter_off",
    }  # fmt: skip
    assert found["data"]["drop_last"] is True
    assert (found["train"]["global_batch_size"], found["train"]["micro_batch_size"]) == (2, 1)  # prompts
    assert found["data"]["max_length"] == 2048 + 512
    assert found["lora"]["rank"] == 8


def test_trl_by_its_defaults(converted: Converted) -> None:
    found = converted("from-trl", TRL, stage="grpo").recipe
    assert found["rollout"] == {"num_generations": 8, "max_completion_length": 512, "temperature": 1.0}
    assert found["reward"] == {"functions": {"trl_accuracy": 1.0}, "time_limit": 60.0}
    assert found["grpo"] == {"loss": "dapo", "patience": None, "epsilon": 0.2}
    assert found["data"]["drop_last"] is True
    assert (found["train"]["global_batch_size"], found["train"]["learning_rate"]) == (1, 1e-6)
    assert converted("from-trl", TRL, name="grpo_math.yaml").recipe["stage"] == "grpo"


def test_batches_of_prompts(converted: Converted) -> None:
    values = {**SWIFT, "NPROC_PER_NODE": 4, "num_generations": 4, "gradient_accumulation_steps": 3}
    train = converted("from-swift", values).recipe["train"]
    assert (train["global_batch_size"], train["micro_batch_size"]) == (24, 2)  # 8 * 3 * 4 completions
    few = {**values, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert converted("from-swift", few).recipe["train"]["micro_batch_size"] == 1
    same = {**values, "steps_per_generation": 3, "generation_batch_size": 96, "num_iterations": 1}
    assert converted("from-swift", same).recipe["train"] == train


def test_losses_become_keys_of_grpo(converted: Converted) -> None:
    def own(**values: Any) -> Any:
        full = {"tuner_type": "full", "deepspeed": "zero2"}
        section = converted("from-swift", {**SWIFT, **full, "beta": 0, **values}).recipe["grpo"]
        assert section.pop("patience") is None  # a run does not stop without a signal
        return section

    assert own(epsilon=0.1, epsilon_high=0.3, delta=5) == {
        "loss": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "dual_clip": 5.0,
    }  # fmt: skip
    assert own(loss_type="cispo", epsilon_high=5) == {"loss": "cispo", "epsilon_high": 4.0}
    assert own(loss_type="sapo", tau_neg=1.05) == {"loss": "sapo"}
    assert own(importance_sampling_level="sequence", scale_rewards="none") == {
        "loss": "grpo", "epsilon": 0.2, "importance_sampling_level": "sequence", "scale_rewards": "none",
    }  # fmt: skip
    assert own(beta=0.01)["reference"] == "copy"
    weighted = converted("from-swift", {**SWIFT, "reward_weights": "0.5 2"}).recipe["reward"]
    assert weighted["functions"] == {"swift_accuracy": 0.5, "swift_format": 2.0}
    twice = {"reward_funcs": "accuracy format accuracy", "reward_weights": [0.5, 2, 1]}
    summed = converted("from-swift", {**SWIFT, **twice}).recipe["reward"]
    assert summed["functions"] == {"swift_accuracy": 1.5, "swift_format": 2.0}


def test_a_rollout_for_several_steps(converted: Converted) -> None:
    """ms-swift trains on its completions in their order, so each step has whole groups."""
    values = {**SWIFT, "steps_per_generation": 4, "dataset": "org/rows#100", "warmup_ratio": 0.1}
    recipe = converted("from-swift", {**values, "generation_batch_size": 32}).recipe
    assert recipe["grpo"]["updates"] == 2
    assert recipe["train"]["global_batch_size"] == 2
    assert "num_epochs" not in recipe["train"]
    assert recipe["train"]["max_steps"] == 3 * (100 // 4) * 2
    assert recipe["train"]["warmup_steps"] == 15
    steps = converted("from-swift", {**SWIFT, "steps_per_generation": 4, "max_steps": 6}).recipe
    assert (steps["grpo"]["updates"], steps["train"]["max_steps"]) == (2, 6)
    with pytest.raises(UserError, match="steps_per_generation = 4: a rollout is for one step"):
        converted("from-trl", {**TRL, "steps_per_generation": 4}, stage="grpo")


def test_ranks_that_share_sequences_change_no_step(converted: Converted) -> None:
    """ms-swift accumulates over as many more passes."""
    values = {**SWIFT, "NPROC_PER_NODE": 4, "num_generations": 4}
    alone = converted("from-swift", values).recipe
    assert converted("from-swift", {**values, "sequence_parallel_size": 2}).recipe == alone
    with pytest.raises(UserError, match="sequence_parallel_size = 3"):
        converted("from-swift", {**values, "sequence_parallel_size": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_funcs": "accuracy cosine"}, "reward_funcs = cosine: of its rewards, these are the same functions"),
        ({"reward_funcs": None}, "reward_funcs = not given"),
        ({"reward_weights": "1"}, "has 1 numbers for 2 rewards"),
        ({"num_generations": 5}, "num_generations = 5: a step has 16 completions"),
        ({"steps_per_generation": 3}, "steps_per_generation = 3: a rollout is for one step"),
        ({"steps_per_generation": 4, "num_generations": 32}, "steps_per_generation = 4: a rollout is for one step"),
        ({"steps_per_generation": 4}, "num_train_epochs = None: may end between the 2 steps of a rollout"),
        ({"steps_per_generation": 4, "max_steps": 5}, "max_steps = 5: may end between the 2 steps of a rollout"),
        ({"generation_batch_size": 64}, "generation_batch_size = 64: a rollout is for one step"),
        ({"steps_per_generation": 2, "generation_batch_size": 64}, "generation_batch_size = 64: a rollout is for"),
        ({"delta": 1.2}, "delta = 1.2: has to be above 1 + epsilon_high"),
        ({"loss_type": "grpo bnpo"}, "loss_type = grpo, bnpo: grpo.loss has"),
        ({"loss_type": ["grpo", "dapo"]}, "loss_type = grpo, dapo: grpo.loss has"),
        ({"reward_weights": ["a", 1]}, "reward_weights is 'a'; expected a number"),
        ({"scale_rewards": ["group"]}, "scale_rewards is ['group']; expected a single text"),
        ({"response_prefix": "<think>"}, "response_prefix = <think>: begins each completion"),
        ({"lora_dropout": None}, "lora_dropout = 0.05: completions are sampled without dropout"),
        ({"num_iterations": 2}, "num_iterations = 2"),
        ({"loss_type": "bnpo"}, "loss_type = bnpo: grpo.loss has"),
        ({"loss_type": "cispo"}, "epsilon_high = 0.2: is the bound of the ratio"),
        ({"importance_sampling_level": "sequence_token"}, "importance_sampling_level = sequence_token"),
        ({"scale_rewards": "gdpo"}, "scale_rewards = gdpo"),
        ({"min_p": 0.1}, "min_p = 0.1: rollouts have temperature, top_k and top_p"),
        ({"dynamic_sample": True}, "dynamic_sample = True"),
        ({"system": "prompt.txt"}, "system = prompt.txt: is a file that cannot be read here"),
        ({"advantage_estimator": "rloo"}, "advantage_estimator = rloo"),
        ({"kl_in_reward": True}, "kl_in_reward = True"),
        ({"tau_pos": 2}, "tau_pos = 2"),
        ({"external_plugins": "plugin.py"}, "external_plugins = plugin.py: is code"),
        ({"async_generate": True}, "async_generate = True"),
        ({"truncation_strategy": "right"}, "truncation_strategy = right"),
        ({"multi_turn_scheduler": "tips"}, "multi_turn_scheduler = tips"),
    ],
)
def test_other_jobs_are_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError) as refused:
        converted("from-swift", {**SWIFT, **values})
    assert message in str(refused.value)


def test_length_of_vllm(converted: Converted) -> None:
    """It may be all positions of the model."""

    def longest(**values: Any) -> Any:
        given = {"max_length": 1024, "max_completion_length": 512, **values}
        return converted("from-swift", {**SWIFT, **given}).recipe["data"]["max_length"]

    assert longest(use_vllm=True, vllm_max_model_len=1200) == 1200
    assert longest(use_vllm=True, vllm_max_model_len=4096) == 1536
    assert longest(use_vllm=False, vllm_max_model_len=1200) == 1536
    assert longest() == 1536


def test_sampling_from_the_most_likely_tokens(converted: Converted) -> None:
    rollout = converted("from-swift", {**SWIFT, "top_k": 50, "top_p": 0.9}).recipe["rollout"]
    assert (rollout["top_k"], rollout["top_p"]) == (50, 0.9)
    whole = converted("from-swift", {**SWIFT, "top_k": -1, "top_p": 1.0}).recipe["rollout"]
    assert not {"top_k", "top_p"} & set(whole)
    cut = {**TRL, "top_k": 9}
    assert converted("from-trl", cut, stage="grpo").recipe["rollout"]["top_k"] == 9
    served = {**cut, "use_vllm": True}
    with pytest.raises(UserError, match="top_k = 9: is part of the weights of the loss"):
        converted("from-trl", served, stage="grpo")


def test_truncated_completions_count(converted: Converted) -> None:
    section = converted("from-swift", {**SWIFT, "overlong_filter": True}).recipe["grpo"]
    assert (section["mask_truncated"], section["count_truncated"]) == (True, True)
    assert "mask_truncated" not in converted("from-swift", {**SWIFT, "overlong_filter": False}).recipe["grpo"]


def test_a_system_turn_in_a_file(converted: Converted, tmp_path: Path) -> None:
    """Its text is as it is: no line breaks are written as two characters there."""
    (tmp_path / "prompt.txt").write_text("Think.\nAnswer \\n.", encoding="utf-8")
    found = converted("from-swift", {**SWIFT, "system": "prompt.txt"})
    assert found.recipe["data"]["system"] == "Think.\nAnswer \\n."
    assert "data.system: the text of prompt.txt" in found.notes
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"system = prompt\.txt: is a file that cannot be read here"):
        converted("from-swift", {**SWIFT, "system": "prompt.txt"})


def test_groups_that_are_split_over_ranks_stay_on_one(converted: Converted) -> None:
    """Fewer data ranks have the prompts of a step, and matrices are divided over the other devices where the model
    allows it."""

    def places(model: str, devices: int, size: int, **values: Any) -> Any:
        full = {**SWIFT, "tuner_type": "full", "deepspeed": "zero2", "model": model, "NPROC_PER_NODE": devices}
        one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        found = converted("from-swift", {**full, **one, "num_generations": size, **values})
        recipe = found.recipe
        assert any(note.startswith("launch: the ") for note in found.notes)
        assert recipe["train"]["micro_batch_size"] == 1
        parallel = recipe.get("parallel", {})
        tensor = parallel.get("tensor_parallel_degree", 1)
        return recipe["train"]["global_batch_size"], recipe["launch"], tensor, parallel.get("sharding")

    big = "Qwen/Qwen2.5-32B-Instruct"  # 40 heads, of which 8 are keys and values
    assert places(big, 8, 8) == (1, {"num_devices": 8}, 8, None)
    assert places(big, 8, 4) == (2, {"num_devices": 8}, 4, "stage2")
    assert places("Qwen/Qwen2.5-7B-Instruct", 8, 8) == (1, {"num_devices": 4}, 4, None)  # 28 heads, 4
    assert places("Qwen/Qwen2.5-7B-Instruct", 6, 3, gradient_accumulation_steps=2) == (
        4, {"num_devices": 4}, 1, "stage2",
    )  # fmt: skip


def test_trl_names_its_command(converted: Converted) -> None:
    with pytest.raises(UserError, match="for GRPO add --stage grpo"):
        converted("from-trl", TRL, stage="sft")
    with pytest.raises(UserError, match=r"reward_funcs = my\.reward: of its rewards"):
        converted("from-trl", {**TRL, "reward_funcs": ["my.reward"]}, stage="grpo")


def test_one_batch_is_a_step_of_swift_by_default(converted: Converted) -> None:
    """Other stages of ms-swift accumulate 16 samples."""
    values = {**SWIFT, "gradient_accumulation_steps": None, "per_device_train_batch_size": 4, "num_generations": 4}
    assert converted("from-swift", values).recipe["train"]["global_batch_size"] == 1


def test_experts_of_trl_are_balanced_by_default(converted: Converted) -> None:
    experts = {**TRL, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}
    for given in (None, 0.001):
        with pytest.raises(UserError, match=r"router_aux_loss_coef = 0\.001: is a load-balancing loss"):
            converted("from-trl", {**experts, "router_aux_loss_coef": given}, stage="grpo")
    converted("from-trl", {**experts, "router_aux_loss_coef": 0}, stage="grpo")
    without = converted("from-trl", {**TRL, "router_aux_loss_coef": 0.001}, stage="grpo")
    assert ("router_aux_loss_coef", 0.001, "the model has no experts") in without.left_out
    with pytest.raises(UserError, match="is no argument of trl reward"):
        converted("from-trl", {**trl.BARE, "router_aux_loss_coef": 0.001}, stage="rm")


def test_names_of_the_length_of_completions_in_swift(converted: Converted) -> None:
    def length(**values: Any) -> Any:
        return converted("from-swift", {**SWIFT, **values}).recipe["rollout"]["max_completion_length"]

    assert length(max_new_tokens=128) == 128
    assert length(response_length=64, max_new_tokens=128) == 64
    both = converted("from-swift", {**SWIFT, "max_new_tokens": 128, "max_completion_length": 256})
    assert ("max_completion_length", 256, "max_new_tokens takes precedence") in both.left_out
    assert both.recipe["data"]["max_length"] == 2048 + 128
    with pytest.raises(UserError, match="max_completion_length = null: rollout"):
        converted("from-trl", {**TRL, "max_completion_length": None}, stage="grpo")


def test_order_of_prompts(converted: Converted) -> None:
    """Only one argument of each suite determines it."""

    def data(action: str, **values: Any) -> Any:
        base = SWIFT if action == "from-swift" else TRL
        return converted(action, {**base, **values}, stage="grpo").recipe["data"]

    assert data("from-swift", dataset_shuffle=False)["shuffle"] is False
    assert "shuffle" not in data("from-swift", train_dataloader_shuffle=False)
    assert data("from-trl", shuffle_dataset=False)["shuffle"] is False
    assert "shuffle" not in data("from-trl", shuffle_dataset=True)
    assert "shuffle" not in data("from-trl", train_sampling_strategy="sequential", disable_dropout=False)
    with pytest.raises(UserError) as refused:
        converted("from-trl", {**trl.SFT, "shuffle_dataset": True, "disable_dropout": False}, stage="sft")
    assert "shuffle_dataset = True: nearest key" in str(refused.value)
    assert "disable_dropout = False: models are trained without" in str(refused.value)


def test_evaluations_become_keys_of_the_recipe(converted: Converted) -> None:
    """They sample as training does, and the best checkpoint has the highest reward."""
    held = {**TRL, "eval_strategy": "steps", "load_best_model_at_end": True}
    found = converted("from-trl", held, stage="grpo")
    assert found.recipe["eval_rollout"] == {"num_generations": 8, "temperature": 1.0}
    best = found.recipe["checkpoint"]
    assert (best["best_metric"], best["best_is"]) == ("eval/reward", "highest")
    assert any(note.startswith("checkpoint.best_metric: eval/reward instead of loss") for note in found.notes)
    named = converted("from-trl", {**held, "metric_for_best_model": "reward", "num_generations_eval": 2}, stage="grpo")
    assert named.recipe["eval_rollout"]["num_generations"] == 2
    assert not any(note.startswith("checkpoint.best_metric") for note in named.notes)
    without = converted("from-trl", {**TRL, "num_generations_eval": 2}, stage="grpo")
    assert "eval_rollout" not in without.recipe
    assert ("num_generations_eval", 2, "there are no rows to evaluate on") in without.left_out


def test_a_batch_with_solutions_that_cannot_be_parsed(converted: Converted) -> None:
    """TRL leaves them out of the standard deviation of a batch, unless there is another reward."""
    batch = {**TRL, "scale_rewards": "batch"}
    with pytest.raises(UserError, match="scale_rewards = batch: TRL leaves out completions"):
        converted("from-trl", batch, stage="grpo")
    two = {**batch, "reward_funcs": ["accuracy_reward", "think_format_reward"]}
    assert converted("from-trl", two, stage="grpo").recipe["grpo"]["scale_rewards"] == "batch"
