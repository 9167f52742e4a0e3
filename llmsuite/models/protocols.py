"""Optional parts of a model family: fields of its config, and functions of its names. Imports no Paddle.

A family need not derive its config from a class of ours: `isinstance(config, HasScoreHead)` is true where a config has
the fields that `HasScoreHead` declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from llmsuite.base.fields import field_values
from llmsuite.models.head import Head

# configs


@runtime_checkable
class HasVocabulary(Protocol):
    """Config of a model that reads tokens."""

    vocab_size: int
    """Number of rows of the embedding."""


@runtime_checkable
class HasEndToken(Protocol):
    """Config of a model that generates text."""

    eos_token_id: int | list[int] | None
    """Tokens at which generation stops."""


@runtime_checkable
class HasPositions(Protocol):
    """Config of a model with a longest sequence."""

    max_position_embeddings: int | None
    """Number of tokens of the longest sequence; None for no limit."""


@runtime_checkable
class HasScoreHead(Protocol):
    """Config of a family that supports a score head."""

    head: Head
    """Head of the model; the stage decides."""


@runtime_checkable
class KeepsKeys(Protocol):
    """Config of a family that preserves keys of config.json that it does not use."""

    kept: dict[str, Any] | None
    """These keys, with their values."""


@runtime_checkable
class HasTiedEmbedding(Protocol):
    """Config of a family whose output projection may be the embedding."""

    tie_word_embeddings: bool
    """True where it is."""


@runtime_checkable
class HasWindow(Protocol):
    """Config of a family with sliding-window attention."""

    sliding_window: int | None
    """Number of tokens of the window, the token itself included; None for full causal attention."""


@runtime_checkable
class HasHeads(Protocol):
    """Config of a model with multi-head attention."""

    num_attention_heads: int | None
    """Number of query heads; None where attention has another form."""


@runtime_checkable
class HasGroupedHeads(HasHeads, Protocol):
    """Config of a model with grouped-query attention."""

    num_key_value_heads: int
    """Number of key and value heads."""


@runtime_checkable
class HasGateBias(Protocol):
    """Config of a family with routed experts."""

    has_gate_bias: bool
    """True where the router has a bias for each expert."""


@runtime_checkable
class HasMtpLayers(Protocol):
    """Config of a family with layers for multi-token prediction (`llmsuite.models.mtp`)."""

    num_nextn_predict_layers: int
    """Number of these layers in the files."""
    mtp: bool
    """True where they are a part of the model."""


def shape_fields(config: Any) -> dict[str, Any]:
    """Return the value of each field of a config, by name: for fields that a recipe or a shard plan names."""
    return field_values(config)


def window_of(config: Any) -> int | None:
    """Return the number of tokens of the attention window; None for full attention."""
    return config.sliding_window if isinstance(config, HasWindow) else None


def num_stored_mtp_layers(config: Any) -> int:
    """Return the number of MTP layers in the files of a model, whether or not they are a part of it."""
    return config.num_nextn_predict_layers if isinstance(config, HasMtpLayers) else 0


# names


@runtime_checkable
class HasShapes(Protocol):
    """Names of a family that knows the shapes of its parameters."""

    def parameter_shapes(self, config: Any) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each parameter, in the order of `parameter_names`."""


@runtime_checkable
class HasPaddleNLPNames(Protocol):
    """Names of a family whose names in PaddleNLP follow no prefix rule."""

    def from_paddlenlp(self, name: str, config: Any) -> str | None:
        """Return our name of a tensor; None for one that has none."""


@runtime_checkable
class CarriesTensors(Protocol):
    """Names of a family with tensors that are no parameters, and are copied to everything written from the weights."""

    def is_carried(self, name: str, config: Any) -> bool:
        """Return True for such a tensor of HF."""


@runtime_checkable
class HasGgufNames(Protocol):
    """Names of a family that is written as GGUF."""

    def to_gguf(self, name: str) -> str | None:
        """Return the name of a parameter in GGUF; None where there is none."""


REQUIRED_FUNCTIONS: Sequence[str] = ("parameter_names", "is_linear", "hf_tensors", "from_hf", "paddlenlp_prefix")
"""Functions of the names of every family, see `ModelFamily.names`."""
