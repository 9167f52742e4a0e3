"""Fields and rules that the configs of several families share. Imports no Paddle.

A module of `models.families` derives its dataclass from one of these and states its own fields, sizes and rules. Names
are those of HF's config.json.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.models.head import Head, read_head, with_head
from llmsuite.models.hf_config import check_keys, kept_keys
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.rope import frequencies, magnitude, read_hf
from llmsuite.models.shape_spec import GatedDelta, GatedMLP, GeluMLP, GroupedQuery, Latent, LayerSpec, MoE, ShapeSpec

PositiveInt = Annotated[int, Gt(0), Le(1 << 30)]
NonNegativeInt = Annotated[int, Ge(0), Le(1 << 30)]
PositiveFloat = Annotated[float, Gt(0)]
TokenId = Annotated[int, Ge(0), Le(1 << 30)]
RotaryPart = Annotated[float, Gt(0), Le(1)]
NumLayers = Annotated[int, Gt(0), Le(10_000)]
"""Bounded, as the names of all layers are created before any file is read."""
MAX_EXPERTS = 1 << 20
"""Experts of all layers together."""
MAX_ROTARY = 4096
LayerType = Literal["sliding_attention", "full_attention"]
"""The attention of a layer, in HF's `layer_types`."""
SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a model that is small enough for a laptop; its vocabulary is that of data/tokenizer."""

_Config = TypeVar("_Config", bound=type)


def in_written_order(cls: _Config) -> _Config:
    """Decorator of a dataclass: each new field follows the field written before it in the class, inherited or not.

    A plain dataclass lists its own fields after all inherited ones; but people read the fields, in config.json, the
    JSON Schema and the docs.
    """
    order = list(getattr(cls.__base__, "__dataclass_fields__", ()))
    index = 0
    for name in inspect.get_annotations(cls):
        if name not in order:
            order.insert(index, name)
        index = order.index(name) + 1
    shape: Any = cls
    shape.__dataclass_fields__ = {name: shape.__dataclass_fields__[name] for name in order}
    return cls


def group_problems(config: Any, least: int) -> Iterator[tuple[str, str]]:
    """Rules for experts in groups, as (field, message).

    Args:
        config: has n_routed_experts, n_group, topk_group and num_experts_per_tok.
        least: number of experts that a group needs.
    """
    experts = config.n_routed_experts
    groups = config.n_group
    if experts % groups:
        yield "n_group", f"is {groups}, which does not divide n_routed_experts = {experts}"
    elif config.topk_group > groups:
        yield "topk_group", f"is {config.topk_group}; there are n_group = {groups}"
    elif experts // groups < least:
        yield "n_group", f"is {groups}; the choice of groups needs at least {least} experts in each"
    elif config.num_experts_per_tok > config.topk_group * (experts // groups):
        there = f"topk_group {config.topk_group} x {experts // groups} experts of a group"
        yield "num_experts_per_tok", f"is {config.num_experts_per_tok}, more than {there}"


def window_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Rules for layers some of which have a window, as (field, message).

    Args:
        config: has num_hidden_layers, layer_types, sliding_window and attention_types().
    """
    kinds = config.layer_types
    if kinds is not None and len(kinds) != config.num_hidden_layers:
        yield "layer_types", f"has {len(kinds)} layers; num_hidden_layers is {config.num_hidden_layers}"
    elif config.sliding_window is None and "sliding_attention" in config.attention_types():
        yield "sliding_window", "is null, and the model has layers with a window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder that is a description: `shape_spec` decides its layers and the names of its parameters
    (`models.dense`, or `models.sparse` with experts; `models.dense_names`). A family is a subclass with its fields and
    its `shape_spec`."""

    experts_key: ClassVar[str | None] = None
    """The field with the number of experts of a layer."""
    chosen_key: ClassVar[str | None] = None
    """The field with the number of experts of a token, in families whose experts are not in groups; `group_problems`
    has the rule for groups."""
    network: ClassVar[str] = "llmsuite.models.dense:DenseLM"
    """Address of the class of the model, for `pkgutil.resolve_name`: `ScaledLM` where the description has a factor of
    the embedding or of the logits, or a cap of the logits; `LearnedPositionsLM` where it has learned positions."""
    uncut: ClassVar[str | None] = None
    """The reason why the model cannot be cut over tensor parallel ranks; None where it can."""
    hf_parts: ClassVar[Mapping[str, str]] = {}
    """Modules and parameters of a layer that have another name in HF's files than here, by our name. Several modules
    with one name are joined in one matrix there, in this order. `{}` in a name stands for the number of an expert;
    experts without it are one stack of matrices there too."""
    hf_alternating: ClassVar[tuple[str, ...]] = ()
    """Names in `hf_parts` of joined matrices and biases whose columns are of each part in turn, not of one part after
    the other."""
    hf_reversed: ClassVar[frozenset[str]] = frozenset()
    """Modules of a layer, by our name, whose weights have all dims in the other order in HF's files: convolutions."""
    hf_modules: ClassVar[Mapping[str, str]] = {}
    """Modules outside of the layers, and the list of the layers, that have another name in HF's files, by our name."""
    not_loaded: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors in HF's files that the model does not have."""
    shared_key: ClassVar[str] = "n_shared_experts x moe_intermediate_size"
    """The fields that give the width of the shared experts, for messages."""

    names: ClassVar[str] = "llmsuite.models.dense_names:NAMES"
    """Address of the names of the family: `MTP_NAMES` where its files may have layers for multi-token prediction
    (`models.mtp`), `PLAIN_STACK_NAMES` where they have experts as [E, inputs, outputs], as they are in memory."""

    vocab_size: PositiveInt
    """Rows of the embedding."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt | None
    """Width of the MLP."""
    num_hidden_layers: NumLayers
    """Decoder layers."""
    num_attention_heads: PositiveInt
    """Query heads."""
    max_position_embeddings: PositiveInt
    """Longest sequence the model was made for."""
    tie_word_embeddings: bool = False
    """True where the output projection is the embedding."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial matrices."""
    bos_token_id: TokenId | None
    """Kept for config.json."""
    eos_token_id: TokenId | list[TokenId] | None
    """Kept for config.json; generation stops at it."""
    pad_token_id: Annotated[int, Ge(-1)] | None = None
    """Kept for config.json, where -1 is none: without it, HF's reward models accept one row at a time."""
    head: Head = "language_model"
    """Head of the model; the stage decides, see `llmsuite.models.head`."""
    kept: dict[str, Any] | None = dataclasses.field(default=None, compare=False)
    """Keys of the source config.json that only other programs use; they are written unchanged."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        experts = self.num_routed_experts
        chosen = 0 if self.chosen_key is None else getattr(self, self.chosen_key)
        if chosen > experts:
            yield self.chosen_key or "", f"is {chosen}; there are {self.experts_key} = {experts}"
        if experts * self.num_hidden_layers > MAX_EXPERTS:
            layers = f"with num_hidden_layers = {self.num_hidden_layers}"
            yield (
                self.experts_key or "",
                f"is {experts}, {layers}; at most {MAX_EXPERTS:,} in all are supported",
            )

    @property
    def num_routed_experts(self) -> int:
        """Number of routed experts of a layer; 0 for a model without experts."""
        return 0 if self.experts_key is None else getattr(self, self.experts_key)

    @property
    def norm_eps(self) -> float:
        """Term under the root of the norms."""
        raise AssertionError(f"{type(self).__name__} has no norm_eps")

    def rotations(self) -> list[tuple[list[float], float]]:
        """The rotary tables of the model: the frequencies of each, and its factor of cos and sin. Layers name theirs by
        its index (`shape_spec.GroupedQuery.rotation`). None for a model with learned positions."""
        return []

    def shape_spec(self) -> ShapeSpec:
        """The description of the model."""
        raise AssertionError(f"{type(self).__name__} has no shape_spec")

    def layer(
        self, attention: GroupedQuery | Latent | GatedDelta, mlp: GatedMLP | GeluMLP | MoE | None = None, **choices: Any
    ) -> LayerSpec:
        """A layer of an attention and an MLP (None: one without biases or experts), with the fields in `choices`."""
        if mlp is None:
            assert self.intermediate_size is not None, "an MLP of no width"
            mlp = GatedMLP(width=self.intermediate_size)
        return LayerSpec(attention=attention, mlp=mlp, **choices)

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts, in a model some of whose layers have none."""
        raise AssertionError(f"{type(self).__name__} has no has_experts")

    def some_with_experts(self, attention: GroupedQuery | Latent, mixture: MoE) -> list[LayerSpec]:
        """All layers, with experts where `has_experts` says so, followed by those for multi-token prediction, which
        have experts."""
        dense = self.layer(attention)
        routed = self.layer(attention, mixture)
        layers = [routed if self.has_experts(i) else dense for i in range(self.num_hidden_layers)]
        return layers + [dataclasses.replace(routed, is_mtp=True)] * num_mtp_layers(self)

    def decoder(self, layers: LayerSpec | Sequence[LayerSpec], **choices: Any) -> ShapeSpec:
        """The model of these layers, or of one that is repeated, with the fields in `choices`."""
        if isinstance(layers, LayerSpec):
            layers = [layers] * self.num_hidden_layers
        return ShapeSpec(hidden=self.hidden_size, vocabulary=self.vocab_size, layers=layers, **choices)

    @property
    def paddlenlp_prefix(self) -> str | None:
        """The prefix that PaddleNLP writes instead of `model.`; None where it has no such model."""
        return None

    @property
    def gguf_interleaves(self) -> bool:
        """True where GGUF has the rotary halves of queries and keys as neighbours."""
        return False


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(DecoderConfig):
    """Shape of a decoder with rotary positions, RMSNorm and a gated MLP."""

    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Values of `rope_scaling["rope_type"]` that the family supports."""

    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    """Term under the root of RMSNorm."""
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type", "factor", …} as in HF's config.json."""

    @property
    def norm_eps(self) -> float:
        """Term under the root of the norms."""
        return self.rms_norm_eps

    @property
    def rotary_size(self) -> int:
        """Size of the part of a head that is rotated."""
        raise AssertionError(f"{type(self).__name__} has no rotary_size")

    def rope_frequencies(self) -> list[float]:
        """Rotary frequency of each of the rotary_size / 2 pairs, in radians a position.

        Raises:
            UserError: rope_scaling is of a kind this family does not know, or lacks a key.
        """
        return frequencies(self.rotary_size, self.rope_theta, self.rope_scaling, self.rope_kinds)

    def rotations(self) -> list[tuple[list[float], float]]:
        """One table, that of `rope_theta` and `rope_scaling`."""
        return [(self.rope_frequencies(), magnitude(self.rope_scaling))]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from super().problems()
        if self.rotary_size > MAX_ROTARY:
            yield "hidden_size", f"gives heads with {self.rotary_size} rotary sizes; at most {MAX_ROTARY}"
            return
        try:
            self.rotations()
        except UserError as error:
            yield "rope_scaling", str(error)

    @classmethod
    def hf_fields(cls, data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
        """The fields that a config.json has, by our names; `default_theta` is the base where it names none.

        Raises:
            UserError: its model has a head with several scores.
        """
        values = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        values["rope_theta"], values["rope_scaling"] = read_hf(data, default_theta)
        return {**values, "head": read_head(data), "kept": kept_keys(data)}


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(RotaryConfig):
    """Shape of a decoder with grouped-query attention whose keys in config.json are its fields, but for those that are
    declared here."""

    family: ClassVar[str] = ""
    """Name of the family, for messages."""
    architectures: ClassVar[Mapping[str, str]] = {}
    """Class in HF transformers of each `model_type`."""
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    """Keys of config.json that have only one supported value."""
    written: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    """Keys with one value that are written to config.json."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that change no logit."""
    hf_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of keys that config.json omits, by `model_type`, where they are not the defaults of the fields."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of config.json whose fields have another name here, by our name."""

    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = None
    """Size of a head; null for hidden_size / num_attention_heads."""

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Size of a head: all of it is rotated."""
        return self.head_size

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json.

        Raises:
            UserError: it asks for something this family does not have, or has keys it does not know.
        """
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        known = {cls.renamed.get(name, name) for name in defaults}
        check_keys(data, cls.family, {*known, "rope_parameters", *cls.without_effect}, cls.fixed)
        data = {**data, **{ours: data[theirs] for ours, theirs in cls.renamed.items() if theirs in data}}
        omitted = {"head_dim": defaults["head_dim"], **cls.hf_defaults.get(data.get("model_type", ""), {})}
        if defaults["num_key_value_heads"] != defaults["num_attention_heads"]:
            omitted["num_key_value_heads"] = defaults["num_key_value_heads"]
        rope = data.get("rope_parameters") or {}  # transformers 5 has more fields there
        moved = {key: rope[key] for key in rope if key in defaults}
        return cls(**cls.hf_fields({**omitted, **moved, **data}, cls.rope_theta))

    @classmethod
    def hf_fields(cls, data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
        """The fields that a config.json has, by our names; it may omit the number of key and value heads."""
        values = super().hf_fields(data, default_theta)
        if values.get("num_key_value_heads") is None:
            defaults = {f.name: f.default for f in dataclasses.fields(cls)}
            values["num_key_value_heads"] = {**defaults, **values}["num_attention_heads"]
        return values

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        shape = dataclasses.asdict(self)
        if self.head_dim is None and type(self).head_dim is None:  # HF's config has no such key, and would use the null
            del shape["head_dim"]
        shape = {self.renamed.get(name, name): value for name, value in shape.items()}
        architecture = self.architectures[shape["model_type"]]
        return with_head(self, {"architectures": [architecture], **self.written, **shape, "torch_dtype": "float32"})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from self.head_problems()
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if heads % kv_heads:
            yield "num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads = {heads}"
        yield from super().problems()

    def head_problems(self) -> Iterator[tuple[str, str]]:
        """Rules for the size of a head, as (field, message)."""
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"
        elif self.head_size % 2:
            yield "head_dim", f"is {self.head_size}; rotary positions need an even head size"

    def grouped_query(self, **choices: Any) -> GroupedQuery:
        """The attention of the config's sizes, with the fields in `choices`."""
        return GroupedQuery(
            heads=self.num_attention_heads, kv_heads=self.num_key_value_heads, head_size=self.head_size, **choices
        )


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartlyRotatedConfig(DenseConfig):
    """Shape of a described decoder that may rotate only the first elements of a head."""

    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: RotaryPart = 1.0
    """Part of a head that is rotated: its first elements."""

    @property
    def rotary_size(self) -> int:
        """Size of the part of a head that is rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    def grouped_query(self, **choices: Any) -> GroupedQuery:
        """The attention of the config's sizes and rotated part, with the fields in `choices`."""
        rotary_size = None
        if self.rotary_size != self.head_size:
            rotary_size = self.rotary_size
        return super().grouped_query(rotary_size=rotary_size, **choices)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.rotary_size % 2 or not self.rotary_size:
            yield "partial_rotary_factor", f"gives {self.rotary_size} elements; rotary positions need an even number"
            return
        yield from super().problems()
