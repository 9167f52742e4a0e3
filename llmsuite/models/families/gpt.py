"""GPT: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import (
    DecoderConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.head import NO_KEYS, read_head, with_head
from llmsuite.models.hf_config import check_keys, kept_keys
from llmsuite.models.shape_spec import GeluMLP, GroupedQuery, ShapeSpec

_HF_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
_PADDLENLP_FIXED = {
    "hidden_activation": "gelu",
    "normalize_before": True,
    "scale_qk_coeff": 1.0,
}  # gelu is tanh's there
# dropout; details of the computation; keys that PaddleNLP ignores: its epsilon is always 1e-5, and its output tied
_PADDLENLP_WITHOUT_EFFECT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "num_partitions", "eol_token_id"),
    *("ignore_index", "use_fast_layer_norm", "fused_softmax_with_triangular", "use_dualpipev", "layer_norm_eps"),
    *("tie_word_embeddings", "output_attentions"),
)
_PADDLENLP_DEFAULTS = {
    "vocab_size": 50304,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 7,
}
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function
# dropout; an attention kernel with the same result; keys of old versions; the head of a classifier
_WITHOUT_EFFECT = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn"),
    *("n_special", "predict_special_tokens", "output_past"),
    *(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
)


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """GPT-2 and GPT-3 (every layer with full attention). Names are those of the other families; HF's config.json has
    its own (n_embd …)."""

    network: ClassVar[str] = "llmsuite.models.dense:LearnedPositionsLM"
    names: ClassVar[str] = "llmsuite.models.families.gpt_names:NAMES"
    hf_modules: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
    }
    hf_parts: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "ln_1",
        "self_attn.q_proj": "attn.c_attn",
        "self_attn.k_proj": "attn.c_attn",
        "self_attn.v_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }

    vocab_size: PositiveInt = 50257
    hidden_size: PositiveInt = 768
    intermediate_size: PositiveInt | None = None
    """Width of the MLP; null for 4 x hidden_size."""
    num_hidden_layers: NumLayers = 12
    num_attention_heads: PositiveInt = 12
    """Heads of queries, keys and values."""
    max_position_embeddings: PositiveInt = 1024
    """Learned positions: no sequence can be longer."""
    layer_norm_eps: PositiveFloat = 1e-5
    """Term under the root of LayerNorm."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def norm_eps(self) -> float:
        """Term under the root of the norms."""
        return self.layer_norm_eps

    def shape_spec(self) -> ShapeSpec:
        """Attention without rotation, an MLP of two matrices, learned positions; biases and LayerNorm everywhere."""
        heads = self.num_attention_heads
        attention = GroupedQuery(
            heads=heads, kv_heads=heads, head_size=self.head_size, rotary=False, biased=True, output_biased=True
        )
        mlp = GeluMLP(width=self.intermediate_size or 4 * self.hidden_size)
        return self.decoder(self.layer(attention, mlp, norm="layer"), norm="layer", learned_positions=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> GPTConfig:
        """From the content of a config.json, HF's (gpt2) or PaddleNLP's (gpt).

        Raises:
            UserError: it asks for something this family does not have, or has keys it does not know.
        """
        if data.get("model_type") == "gpt":
            return cls._from_paddlenlp(data)
        theirs = {f.name: _HF_KEYS.get(f.name, f.name) for f in dataclasses.fields(cls)}
        check_keys(data, "gpt", {*theirs.values(), "activation_function", *_WITHOUT_EFFECT}, _FIXED)
        activation = data.get("activation_function", _ACTIVATIONS[0])
        if activation not in _ACTIVATIONS:
            raise UserError(f"config.json: activation_function is {activation!r}; the gpt family has gelu_new only")
        values = {ours: data[key] for ours, key in theirs.items() if key in data}
        return cls(**{**values, "head": read_head(data), "kept": kept_keys(data)})

    @classmethod
    def _from_paddlenlp(cls, data: Mapping[str, Any]) -> GPTConfig:
        fields = {f.name for f in dataclasses.fields(cls)} - {*NO_KEYS, "layer_norm_eps", "tie_word_embeddings"}
        check_keys(data, "gpt", {*fields, *_PADDLENLP_WITHOUT_EFFECT}, _PADDLENLP_FIXED)
        given = {key: data[key] for key in fields if key in data}
        return cls(**{**_PADDLENLP_DEFAULTS, **given, "head": read_head(data), "kept": kept_keys(data)})

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return with_head(
            self,
            {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "activation_function": _ACTIVATIONS[0],
                **{_HF_KEYS.get(key, key): value for key, value in dataclasses.asdict(self).items()},
                "torch_dtype": "float32",
            },
        )


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


def _gpt3(hidden: int, layers: int, heads: int, positions: int = 2048) -> dict[str, Any]:
    return {**_gpt2(hidden, layers, heads), "vocab_size": 50304, "max_position_embeddings": positions}


PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/openai-community/gpt2, gpt2-medium, gpt2-large, gpt2-xl, config.json
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # Brown et al. 2020, arXiv 2005.14165, table 2.1, with heads of 128 and the vocabulary padded to 128 x 393, so that
    # it can be cut; 345M: the medium GPT-2, padded too
    "gpt-345m": _gpt3(1024, 24, 16, positions=1024),
    "gpt-1.3b": _gpt3(2048, 24, 16),
    "gpt-6.7b": _gpt3(4096, 32, 32),
    "gpt-175b": _gpt3(12288, 96, 96),
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
