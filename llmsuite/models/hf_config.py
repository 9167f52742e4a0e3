"""Checks of the keys of a config.json. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmsuite.base.errors import UserError

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
"""Keys that change no logit: the origin of a model, how it is stored and run, the heads of other tasks. Dropout is
among them, as models here have none."""


_KEPT = frozenset(
    (
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("output_router_logits", "router_aux_loss_coef"),
        *("pretraining_tp", "sep_token_id", "task_specific_params", "tokenizer_class", "unk_token_id", "use_cache"),
    )
)
"""Keys of `_WITHOUT_EFFECT` that other readers of the trained model use. The others describe the origin of the source
or how it was stored, or are written with new values."""


def kept_keys(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of a config.json that are written again unchanged; None for none."""
    return {key: value for key, value in data.items() if key in _KEPT} or None


def check_keys(data: Mapping[str, Any], family: str, known: Iterable[str], fixed: Mapping[str, Any]) -> None:
    """Refuse a config.json with keys that would make the model compute something else.

    Args:
        data: content of the config.json.
        family: name of the family, for the message.
        known: keys that the family reads.
        fixed: keys that must have this value, or null.

    Raises:
        UserError: a key has another value, or is unknown; the message names it.
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
