"""Arguments of PaddleNLP that make it a job no recipe can be, and why. A job is refused rather than replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.conversion.kinds import is_on, is_true
from llmsuite.recipe.conversion.refuse import Refusal, find

_QUANTISED = "its blocks or scales are others; nearest key: lora.base_dtype, with nf4, fp4 or int8"
DROPOUT = "models are trained without dropout"
"""Why dropout is refused."""
_RL = (
    "its reinforcement learning has rewards and normalisation of its own; write a recipe of stage grpo or ppo, such as "
    "recipes/llama/grpo.json"
)
_EMBEDDING = "embedding models are no stage"
_STEPS = "is a score for each step of an answer; stage rm scores whole answers"
_LONG = "positions are those of the model's config: model.config.rope_scaling"


def _is_not_one(value: Any) -> bool:
    return value not in (1, None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


REFUSED: Mapping[str, Refusal] = {
    "vera": Refusal(
        "both its factors begin with the largest singular vectors of each matrix there, which are taken off it, and "
        "the second one is trained too; here they are random, shared and frozen, as in the paper. Nearest keys: "
        "lora.method with vera, lora.init with pissa"
    ),
    "reft": Refusal(
        "its rotation is orthonormal at the start only, and the edits begin as those of other matrices; here it stays "
        "so, and the first step is that of the model as it was. Nearest keys: reft.rank (rank there, 8 unless given), "
        "reft.layers and reft.positions (position); see recipes/llama/reft.json"
    ),
    "lora_path": Refusal("nearest key: model.weights, after `llmsuite merge` of adapter and model"),
    "lokr_path": Refusal("nearest key: model.weights, after `llmsuite merge` of adapter and model"),
    "prefix_path": Refusal("prefixes begin as they are drawn: prefix.tokens; --resume goes on from a checkpoint"),
    "weight_quantize_algo": Refusal(_QUANTISED),
    "neftune": Refusal("embeddings are trained without noise"),
    "hidden_dropout_prob": Refusal(DROPOUT),
    "attention_probs_dropout_prob": Refusal(DROPOUT),
    "process_reward": Refusal(_STEPS),
    "max_query_len": Refusal(_EMBEDDING),
    "max_passage_len": Refusal(_EMBEDDING),
    "actor_model_name_or_path": Refusal(_RL),
    "rl_algorithm": Refusal(_RL),
    "critic_*": Refusal(_RL),
    "kl_coeff": Refusal(_RL),
    "reference_free": Refusal("nearest key: dpo.loss, simpo or orpo"),
    "ref_model_update_steps": Refusal("the reference is the initial model", _is_positive),
    "pref_loss_ratio": Refusal("the preference loss has weight 1; nearest key: dpo.sft_weight", _is_not_one),
    "regularization": Refusal("nearest key: rm.center_rewards"),
    "normalize_score_during_training": Refusal("scores of a reward model are not normalised"),
    "use_ssa": Refusal("attention is over the whole sequence"),
    "use_long_sequence_strategies": Refusal(_LONG),
    "rope_scaling_factor": Refusal(_LONG, _is_not_one),
    "autotuner_benchmark": Refusal("it replaces the job by five steps without saving; see: llmsuite plan --search"),
    "using_fake_gate": Refusal("it is for benchmarks: tokens go where the gate sends them"),
}
"""Patterns of `fnmatch` over names; the first that fits counts."""

_INSTEAD_OF_TRAINING = {
    "do_ptq": "quantises a trained model (PTQ)",
    "do_gptq": "quantises a trained model (GPTQ)",
    "do_awq": "quantises a trained model (AWQ)",
}


def refuse_without_training(name: str, values: Mapping[str, Any]) -> None:
    """Raise UserError for arguments with which PaddleNLP trains nothing."""
    for key, what in _INSTEAD_OF_TRAINING.items():
        if is_true(values.get(key)):
            raise UserError(
                f"{name}: {key} {what}, which is no recipe; `llmsuite export --precision int8` rounds weights to int8, "
                "and section qat of a recipe trains with rounded weights"
            )
    if is_true(values.get("do_train")):
        return
    if is_true(values.get("do_eval")):
        raise UserError(f"{name}: do_eval without do_train evaluates only; that is `llmsuite eval`, not a recipe")
    if is_true(values.get("do_predict")):
        raise UserError(f"{name}: do_predict without do_train generates only; that is `llmsuite generate`")
    raise UserError(f"{name}: do_train is not true, and without it PaddleNLP trains nothing; set it in the file")


def is_off(key: str, value: Any) -> bool:
    """Whether an argument that could make it another job, or that is not known, says no."""
    return not is_on(value) or find(REFUSED, key) is not None
