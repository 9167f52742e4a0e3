"""Llama: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.head import with_head
from llmsuite.models.shape_spec import GatedMLP, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DenseConfig):
    """Llama 1, 2, 3.x and models with the same architecture (SmolLM2, TinyLlama, Mistral …). Names are those of HF's
    config.json."""

    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3", "yarn")

    model_type: Literal["llama", "mistral"] = "llama"
    """mistral: the same architecture, with or without sliding-window attention."""
    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 4096
    rms_norm_eps: PositiveFloat = 1e-5
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings"} as in Llama 3.1, or one of type "linear" or "yarn"."""
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    mlp_bias: bool = False
    """True where the matrices of the MLP have biases."""
    sliding_window: PositiveInt | None = None
    """With mistral: size of the attention window, in tokens, with the token itself. Null: full causal attention."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2

    def shape_spec(self) -> ShapeSpec:
        """A pre-norm decoder, with or without biases and a window."""
        biased = self.attention_bias
        attention = self.grouped_query(biased=biased, output_biased=biased, window=self.sliding_window)
        return self.decoder(self.layer(attention, GatedMLP(width=self.intermediate_size, biased=self.mlp_bias)))

    @property
    def paddlenlp_prefix(self) -> str | None:
        """None with biases, which PaddleNLP's Llama does not have."""
        return None if self.attention_bias or self.mlp_bias else f"{self.model_type}."

    @property
    def gguf_interleaves(self) -> bool:
        """True: llama.cpp rotates neighbours."""
        return True

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.head_size > 4096:
            yield "head_dim", f"is {self.head_size} (hidden_size / num_attention_heads); at most 4096 is supported"
            return
        for key in ("attention_bias", "mlp_bias"):
            if self.model_type == "mistral" and getattr(self, key):
                yield key, "is true; a mistral has no biases"
        if self.model_type == "llama" and self.sliding_window is not None:
            yield "sliding_window", f"is {self.sliding_window}; a llama has no window: set model_type to mistral"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """From the content of a config.json, HF's or PaddleNLP's.

        Raises:
            UserError: it enables something that this family does not have.
        """
        activation = data.get("hidden_act", "silu")
        if activation != "silu":
            raise UserError(f"config.json: hidden_act is {activation!r}; the llama family has silu")
        if data.get("model_type") == "mistral":
            data = {**_OF_MISTRAL, **data}
            _check_layers(data)
        else:
            data = {key: value for key, value in data.items() if key != "sliding_window"}
        return cls(**cls.hf_fields(data, cls.rope_theta))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers and PaddleNLP read."""
        shape = dataclasses.asdict(self)
        if self.model_type == "mistral":
            shape = {key: value for key, value in shape.items() if not key.endswith("_bias")}
        else:
            del shape["sliding_window"]
        return with_head(
            self,
            {
                "architectures": [f"{self.model_type.title()}ForCausalLM"],
                "hidden_act": "silu",
                **shape,
                "head_dim": self.head_size,
                "torch_dtype": "float32",
            },
        )


# defaults of HF's MistralConfig that differ from Llama's
_OF_MISTRAL: dict[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def _check_layers(data: Mapping[str, Any]) -> None:
    """Raise UserError where the layers of a mistral do not all have the same kind of attention."""
    kind = "full_attention" if data["sliding_window"] is None else "sliding_attention"
    if set(data.get("layer_types") or ()) - {kind}:
        raise UserError(
            f"config.json: layer_types is not {kind} only, as that of a mistral with sliding_window "
            f"{data['sliding_window']} is; layers that differ in this are not supported"
        )


_LLAMA_3_1 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}

_MISTRAL = {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
}

# config.json of huggingface.co/huggyllama/llama-7b and llama-13b (facebook/llama-7b and 13b with PaddleNLP),
# meta-llama/Llama-2-7b-hf, Llama-2-13b-hf, Meta-Llama-3-8B, Llama-3.1-8B-Instruct, Llama-3.1-405B,
# mistralai/Mistral-7B-v0.1, Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407, HuggingFaceTB/SmolLM2-135M-Instruct
PRESETS: dict[str, dict[str, Any]] = {
    "llama-7b": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "llama-13b": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, **_13B},
    "llama-2-7b": {},
    "llama-2-13b": _13B,
    "llama-3-8b": {**_LLAMA_3_1, "intermediate_size": 14336, "max_position_embeddings": 8192, "rope_scaling": None},
    "llama-3.1-8b": {**_LLAMA_3_1, "intermediate_size": 14336},
    "llama-3.1-405b": {
        **_LLAMA_3_1,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "mistral-7b-v0.1": {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096},
    "mistral-7b-v0.3": {**_MISTRAL, "vocab_size": 32768},
    "mistral-nemo-12b": {
        **_MISTRAL,
        "vocab_size": 131072,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "digits": {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Shapes as published in the config.json of each model; "digits" is ours, for data/digits."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "tie_word_embeddings": False,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "tie_word_embeddings", "attention_bias", "mlp_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
