"""Names of GPT's parameters in an HF model, and in one of PaddleNLP. Imports no Paddle.

HF keeps every matrix but the output projection and the score as [inputs, outputs], as we do.
"""

from __future__ import annotations

import re

from llmsuite.models.decoder_config import DecoderConfig
from llmsuite.models.dense_names import DenseNames
from llmsuite.models.head import OUTPUT, SCORE

_PADDLENLP_LAYER = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.qkv_proj": "self_attn.qkv_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "linear1": "mlp.up_proj",
    "linear2": "mlp.down_proj",
}
_PADDLENLP_TOP = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "decoder.norm": "model.norm",
    "lm_head": "lm_head",
}
# prefixes of Fleet's wrappers of a model that is trained in parallel, and of the embedding of its pipelines
_WRAPPED = re.compile(r"(?:_layers?\.)*(?:gpt\.|shared_layers\.\w+\.(?=\w+_embeddings$))?")
_IGNORED = re.compile(r".*\.attn\.(masked_)?bias")  # masks


class GPTNames(DenseNames):
    """`DenseNames` of GPT, with the names of PaddleNLP, which differ in more than a prefix, and are not written."""

    def is_linear(self, name: str) -> bool:
        """True if HF stores this parameter transposed, as [outputs, inputs]."""
        return name in (OUTPUT, SCORE)

    def from_hf(self, name: str, config: DecoderConfig) -> str | None:
        """The full name of a tensor in an HF file, where `transformer.` may be missing; None for one that is a mask."""
        if _IGNORED.fullmatch(name):
            return None
        return name if name.startswith(("transformer.", "lm_head.", "score.")) else f"transformer.{name}"

    def from_paddlenlp(self, name: str, config: DecoderConfig) -> str | None:
        """Our name of a tensor in a file of PaddleNLP (`gpt.decoder.layers.0.linear1.weight`) or PaddleFleetX, where
        the layers of a pipeline are numbers (`1.linear1.weight`); that of q, k and v in one is `qkv_proj`. None for
        others.

        Sources: paddlenlp/transformers/gpt/modeling.py and, in PaddleFleetX,
        ppfleetx/models/language_model/gpt/dygraph/hybrid_model.py.
        """
        module, _, kind = name.rpartition(".")
        module = module[match.end() :] if (match := _WRAPPED.match(module)) else module
        if re.match(r"(word|position)_embeddings$", module):
            module = f"embeddings.{module}"
        if module in _PADDLENLP_TOP:
            return f"{_PADDLENLP_TOP[module]}.{kind}"
        if module == f"{config.num_hidden_layers + 1}.norm":
            return f"model.norm.{kind}"
        layer = re.fullmatch(r"(?:decoder\.layers\.)?(\d+)\.(.+)", module)
        if layer is None or layer[2] not in _PADDLENLP_LAYER:
            return None
        number = int(layer[1]) - (0 if module.startswith("decoder.") else 1)
        return f"model.layers.{number}.{_PADDLENLP_LAYER[layer[2]]}.{kind}"


NAMES = GPTNames()
