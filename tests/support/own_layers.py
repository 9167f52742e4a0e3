"""Families as third parties write them: layers that derive from llmsuite's and compute something else. A plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import llmsuite
from llmsuite.contract.hookspecs import ModelFamily
from llmsuite.models.dense_names import GGUF_NAMES as names
from llmsuite.models.dense_plan import PLAN
from llmsuite.models.families.llama import SMOKE, LlamaConfig


def geglu() -> Any:
    """An MLP with another activation."""
    import paddle.nn.functional as F

    from llmsuite.models.blocks import GatedMLP
    from llmsuite.models.dense import DenseLM

    class GeGLU(GatedMLP):
        def forward(self, x: Any) -> Any:
            return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            for layer in self.model.layers:
                layer.mlp = GeGLU(config.hidden_size, config.intermediate_size, ops)

    return Model


def capped() -> Any:
    """Attention whose output is bounded."""
    import paddle

    from llmsuite.models.blocks import Attention
    from llmsuite.models.dense import DenseLM

    class CappedAttention(Attention):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            out, cache = super().forward(*inputs, **named)
            return paddle.tanh(out), cache

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            for layer in self.model.layers:
                layer.self_attn = CappedAttention(config.hidden_size, config.norm_eps, ops, config.grouped_query())

    return Model


def gemma_norm() -> Any:
    """Norms whose gain is 1 + weight."""
    from llmsuite.models.blocks import RMSNorm
    from llmsuite.models.dense import DenseLM

    class GemmaNorm(RMSNorm):
        def forward(self, x: Any) -> Any:
            return self.norm(x, self.weight + 1.0, self.eps)

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            size = config.hidden_size
            eps = config.rms_norm_eps
            for layer in self.model.layers:
                layer.input_layernorm, layer.post_attention_layernorm = (GemmaNorm(size, eps, ops) for _ in range(2))
            self.model.norm = GemmaNorm(size, eps, ops)

    return Model


def own_swiglu() -> Any:
    """No class of its own: another function in the place of SwiGLU."""
    import paddle.nn.functional as F

    from llmsuite.models.dense import DenseLM

    def model(config: Any, ops: Any) -> Any:
        return DenseLM(config, dataclasses.replace(ops, swiglu=lambda gate, up: F.relu(gate) * up))

    return model


def no_rotation() -> Any:
    """One layer without positions."""
    from llmsuite.models.dense import DenseLM

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            self.model.layers[1].self_attn.rotary = lambda x, cos, sin: x

    return Model


def own_logits() -> Any:
    """Logits that are bounded, of a tied head."""
    import paddle

    from llmsuite.models.dense import DenseLM

    class Model(DenseLM):
        def logits(self, hidden: Any) -> Any:
            return 5.0 * paddle.tanh(super().logits(hidden) / 5.0)

    return Model


def hooked() -> Any:
    """Hooks that change what a matrix and a norm give."""
    from llmsuite.models.dense import DenseLM

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            layer = self.model.layers[1]
            for module in (layer.self_attn.k_proj, layer.mlp.gate_proj, layer.input_layernorm):
                module.register_forward_post_hook(lambda module, inputs, output: 0.5 * output)
            layer.mlp.register_forward_pre_hook(lambda module, inputs: (2.0 * inputs[0],))

    return Model


def parallel_block() -> Any:
    """A layer whose MLP and attention read the same."""
    from llmsuite.models.blocks import DecoderLayer
    from llmsuite.models.dense import DenseLM

    class ParallelLayer(DecoderLayer):
        def forward(self, x: Any, cos: Any, sin: Any, mask: Any, past: Any = None) -> Any:
            normed = self.input_layernorm(x)
            attended, present = self.self_attn(normed, cos, sin, mask, past)
            return x + attended + self.mlp(self.post_attention_layernorm(x)), present

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            for number, layer in enumerate(self.model.layers):
                parts = layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp
                self.model.layers[number] = ParallelLayer(*parts)

    return Model


def own_embedding() -> Any:
    """An embedding that scales."""
    from paddle import nn

    from llmsuite.models.dense import DenseLM

    class Scaled(nn.Embedding):
        def forward(self, ids: Any) -> Any:
            return 2.0 * super().forward(ids)

    class Model(DenseLM):
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            self.model.embed_tokens = Scaled(config.vocab_size, config.hidden_size)

    return Model


NETWORKS: dict[str, Callable[[], Any]] = {
    of.__name__: of
    for of in (geglu, capped, gemma_norm, own_swiglu, no_rotation, own_logits, hooked, parallel_block, own_embedding)
}
TIED = ("own_logits", "geglu")


def _family(name: str) -> ModelFamily:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(LlamaConfig):
        def to_hf(self) -> dict[str, Any]:
            return super().to_hf() | {"model_type": name}

        @classmethod
        def from_hf(cls, data: Any) -> Any:
            return super().from_hf(dict(data) | {"model_type": "llama"})

    shape = SMOKE | {"num_hidden_layers": 2, "tie_word_embeddings": name in TIED}
    return ModelFamily(
        name=name, help=name, config_cls=Config, presets={}, smoke=shape, factory=NETWORKS[name],
        names=lambda: names, shard_plan=PLAN, hf_model_types=(name,),
    )  # fmt: skip


FAMILIES = {name: _family(name) for name in NETWORKS}


@llmsuite.hookimpl
def llmsuite_register_models() -> list[ModelFamily]:
    return [*FAMILIES.values()]
