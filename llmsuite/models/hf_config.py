"""Checks that a family makes before it trusts a config.json. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmsuite.errors import UserError

_WITHOUT_EFFECT = frozenset(
    (
        "architectures",
        "attention_dropout",
        "auto_map",
        "base_model_tp_plan",
        "chunk_size_feed_forward",
        "dpo_config",
        "dtype",
        "finetuning_task",
        "fuse_attention_ffn",
        "fuse_attention_qkv",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "paddlenlp_version",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "seq_length",
        "task_specific_params",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    )
)
"""Keys that change no logit: where a model comes from, how it is stored and run, what another task's head would need.
Dropout is among them: nothing is dropped here."""


_KEPT = frozenset(
    (
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("output_router_logits", "router_aux_loss_coef"),
        *("pretraining_tp", "sep_token_id", "task_specific_params", "tokenizer_class", "unk_token_id", "use_cache"),
    )
)
"""Those of them that another reader of the trained model goes by. The others say where the source came from, how it was
stored, or what our own writing says anew."""


def kept_keys(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a config.json is written again as it is; None for nothing."""
    return {key: value for key, value in data.items() if key in _KEPT} or None


def check_keys(data: Mapping[str, Any], family: str, known: Iterable[str], fixed: Mapping[str, Any]) -> None:
    """Refuse a config.json whose model would not be computed as it was meant.

    Args:
        data: content of the config.json.
        family: its name, for the message.
        known: keys the family reads.
        fixed: keys that have to have this value, or null.

    Raises:
        UserError: a key has another value, or is not known; the message names it.
    """
    known = set(known)
    unknown = []
    for key, value in data.items():
        if key in fixed:
            if value is not None and value != fixed[key]:
                raise UserError(f"config.json: {key} is {value!r}; the {family} family has {fixed[key]!r} only")
        elif key not in known and key not in _WITHOUT_EFFECT and not key.startswith("_"):
            unknown.append(key)
    if unknown:
        raise UserError(
            f"config.json: the {family} family does not know {', '.join(sorted(unknown))}; they may change what the "
            "model computes. Remove them if they do not"
        )
