"""The head of a decoder: the output projection of a language model, or a score. Imports no Paddle.

The config of a family that supports both has a field `head`. The stage decides its value, not the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from llmsuite.base.errors import UserError

Head = Literal["language_model", "score"]
SCORE = "score.weight"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
"""Embedding and output projection, which share one matrix in a tied model."""
EMBEDDINGS = (EMBEDDING, "model.embed_positions.weight")
"""The embeddings of tokens and, in some families, of positions."""
NO_KEYS = ("head", "kept", "mtp")
"""Fields of a config that are not keys of recipes."""
_SCORING = "ForSequenceClassification"


def head_of(config: Any) -> Head:
    """The head of a config."""
    return getattr(config, "head", "language_model")


def is_tied(config: Any) -> bool:
    """True if the embedding is also the output projection."""
    return bool(getattr(config, "tie_word_embeddings", False)) and head_of(config) == "language_model"


def head_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names of the head's parameters, which are also HF's, with their shapes."""
    if head_of(config) == "score":
        return {SCORE: (config.hidden_size, 1)}
    return {} if is_tied(config) else {OUTPUT: (config.hidden_size, config.vocab_size)}


def read_head(data: Mapping[str, Any]) -> Head:
    """The head in HF's config.json.

    Raises:
        UserError: it is a classifier with several labels.
    """
    architectures = data.get("architectures")
    if not isinstance(architectures, list) or not any(str(name).endswith(_SCORING) for name in architectures):
        return "language_model"
    labels = data.get("id2label")
    count = data.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)  # 2 is HF's default
    if count != 1:
        raise UserError(f"config.json: {architectures[0]} has {count} labels; a score head with one is supported")
    return "score"


def with_head(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """HF's config.json of a language model, changed to the head of `config`, with the extra keys that it was read
    with."""
    kept: Mapping[str, Any] = getattr(config, "kept", None) or {}
    result = {**kept, **{key: value for key, value in data.items() if key not in NO_KEYS}}
    if head_of(config) == "score":
        name = result["architectures"][0].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        result |= {"architectures": [name + _SCORING], "id2label": {"0": "score"}, "label2id": {"score": 0}}
    return result
