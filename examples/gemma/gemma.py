"""Gemma 1.1: gains of 1 + weight, a GeGLU, an embedding times the root of its width, and a tied head."""

import dataclasses
from typing import ClassVar, Literal

import llmsuite
from llmsuite.contract.dense_family import dense_family
from llmsuite.models.decoder_config import SMALL, DenseConfig
from llmsuite.models.shape_spec import GatedMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(DenseConfig):
    """Names and defaults are those of HF's config.json."""

    family: ClassVar = "gemma1"
    network: ClassVar = "llmsuite.models.dense:ScaledLM"
    architectures: ClassVar = {"gemma": "GemmaForCausalLM"}
    fixed: ClassVar = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    written: ClassVar = {"hidden_act": "gelu_pytorch_tanh"}

    model_type: Literal["gemma"] = "gemma"
    """The only one."""
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = 256
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    bos_token_id: int | None = 2
    eos_token_id: int | None = 1

    def shape_spec(self):
        attention = self.grouped_query(biased=self.attention_bias, output_biased=self.attention_bias)
        layer = self.layer(attention, GatedMLP(width=self.intermediate_size, activation="gelu_tanh"), norm="offset_rms")
        return self.decoder(layer, norm="offset_rms", embedding_scale=self.hidden_size**0.5)


FAMILY = dense_family(
    name="gemma1",
    help="Gemma 1.1",
    config_cls=GemmaConfig,
    smoke=SMALL | {"head_dim": 16},
    hf_model_types=("gemma",),
)


@llmsuite.hookimpl
def llmsuite_register_models():
    return [FAMILY]
