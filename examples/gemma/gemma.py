"""Gemma 1.1: a Llama with GeGLU, gains of 1 + weight, an embedding times the root of its width, and a tied head."""

import dataclasses

import llmsuite
from llmsuite.contract.hookspecs import ModelFamily
from llmsuite.models.llama import names
from llmsuite.models.llama.config import SMOKE, LlamaConfig
from llmsuite.models.llama.shard_plan import PLAN

OURS = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    tie_word_embeddings: bool = True
    """Whether the output projection is the embedding."""

    def to_hf(self):
        return super().to_hf() | OURS

    @classmethod
    def from_hf(cls, data):
        return super().from_hf(dict(data) | {"model_type": "llama", "hidden_act": "silu"})  # the rest is a Llama's


def network():
    import paddle.nn.functional as F
    from paddle.nn.initializer import Constant

    from llmsuite.models.blocks import GatedMLP, RMSNorm
    from llmsuite.models.llama.layers import Llama

    class GemmaNorm(RMSNorm):
        def __init__(self, size, eps, ops):
            super().__init__(size, eps, ops)
            self.weight = self.create_parameter([size], default_initializer=Constant(0.0))

        def forward(self, x):
            return self.norm(x, 1.0 + self.weight, self.eps)

    class GeGLU(GatedMLP):
        def forward(self, x):
            return self.down_proj(F.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x))

    class Gemma(Llama):
        def __init__(self, config, ops):
            super().__init__(config, ops)
            size = config.hidden_size
            eps = config.rms_norm_eps
            for layer in self.model.layers:
                layer.mlp = GeGLU(size, config.intermediate_size, ops)
                layer.input_layernorm, layer.post_attention_layernorm = (GemmaNorm(size, eps, ops) for _ in range(2))
            self.model.norm = GemmaNorm(size, eps, ops)

        def embed(self, input_ids, start=0, document_starts=None):  # in training
            return super().embed(input_ids, start, document_starts) * self.config.hidden_size**0.5

        def embed_at(self, input_ids, positions):  # in generation
            return super().embed_at(input_ids, positions) * self.config.hidden_size**0.5

    return Gemma


FAMILY = ModelFamily(
    name="gemma",
    help="Gemma 1.1",
    config_cls=GemmaConfig,
    presets={},
    smoke=SMOKE | {"tie_word_embeddings": True},
    factory=network,
    names=lambda: names,
    shard_plan=PLAN,
    hf_model_types=("gemma",),
)


@llmsuite.hookimpl
def llmsuite_register_models():
    return [FAMILY]
