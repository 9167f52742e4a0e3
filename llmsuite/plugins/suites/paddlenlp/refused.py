"""Arguments of PaddleNLP that no recipe can express, with reasons. Such a job is refused, not approximated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites.conversion.kinds import is_on, is_true
from llmsuite.plugins.suites.conversion.refuse import Refusal, find

_QUANTISED = "its blocks or scales differ; nearest key: lora.base_dtype, with nf4, fp4 or int8"
DROPOUT = "models are trained without dropout"
"""Why dropout is refused."""
_RL = (
    "its reinforcement learning has its own rewards and normalisation; write a recipe of stage grpo or ppo, such as "
    "recipes/llama/grpo.json"
)
_EMBEDDING = "there is no stage for embedding models"
_STEPS = "scores each step of an answer; stage rm scores complete answers"
_LONG = "positions are those of the model's config: model.config.rope_scaling"


def _is_not_one(value: Any) -> bool:
    return value not in (1, None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


REFUSED: Mapping[str, Refusal] = {
    "vera": Refusal(
        "both its factors are initialised with the largest singular vectors of each matrix there, which are subtracted "
        "from it, and the second one is trained; here they are random, shared and frozen, as in the paper. Nearest "
        "keys: lora.method with vera, lora.init with pissa"
    ),
    "reft": Refusal(
        "its rotation is orthonormal only at the start, and the initial edits change the model; here it stays "
        "orthonormal, and the initial edits are zero. Nearest keys: reft.rank (rank there, 8 by default), reft.layers "
        "and reft.positions (position); see recipes/llama/reft.json"
    ),
    "lora_path": Refusal("nearest key: model.weights, after `llmsuite merge` of adapter and model"),
    "lokr_path": Refusal("nearest key: model.weights, after `llmsuite merge` of adapter and model"),
    "prefix_path": Refusal("prefixes are initialised at random: prefix.tokens; --resume continues from a checkpoint"),
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
    "use_ssa": Refusal("attention is over the full sequence"),
    "use_long_sequence_strategies": Refusal(_LONG),
    "rope_scaling_factor": Refusal(_LONG, _is_not_one),
    "autotuner_benchmark": Refusal("it replaces the job by five steps without saving; see: llmsuite plan --search"),
    "using_fake_gate": Refusal("it is for benchmarks; tokens are routed by the gate"),
}
"""`fnmatch` patterns of names; the first match counts."""

_INSTEAD_OF_TRAINING = {
    "do_ptq": "quantises a trained model (PTQ)",
    "do_gptq": "quantises a trained model (GPTQ)",
    "do_awq": "quantises a trained model (AWQ)",
}


def refuse_without_training(name: str, values: Mapping[str, Any]) -> None:
    """Raise UserError for arguments with which PaddleNLP does not train."""
    for key, what in _INSTEAD_OF_TRAINING.items():
        if is_true(values.get(key)):
            raise UserError(
                f"{name}: {key} {what}, which is not a recipe; `llmsuite export --precision int8` quantises weights to "
                "int8, and section qat of a recipe trains with quantised weights"
            )
    if is_true(values.get("do_train")):
        return
    if is_true(values.get("do_eval")):
        raise UserError(f"{name}: do_eval without do_train evaluates only; that is `llmsuite eval`, not a recipe")
    if is_true(values.get("do_predict")):
        raise UserError(f"{name}: do_predict without do_train generates only; that is `llmsuite generate`")
    raise UserError(f"{name}: do_train is not true, and without it PaddleNLP does not train; set it in the file")


def is_off(key: str, value: Any) -> bool:
    """Return True for an argument that is off, or known to be refused only with other values."""
    return not is_on(value) or find(REFUSED, key) is not None
