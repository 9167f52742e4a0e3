"""Names of GPT's parameters in an HF model, and in one of PaddleNLP. Imports no Paddle.

Our names are those of the other families. HF keeps q, k and v in one matrix, and every matrix but the output
projection and the score as [inputs, outputs], as we do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmsuite.models.gpt.config import GPTConfig
from llmsuite.models.head import SCORE, head_shapes
from llmsuite.models.hf_tensors import HfTensors

_HF_TOP = {"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"}
_HF_LAYER = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
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


def parameter_names(config: GPTConfig) -> Iterator[str]:
    """Every parameter of the model, in the order it has them."""
    yield from parameter_shapes(config)


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, in the order it has them, with its shape."""
    hidden = config.hidden_size
    width = config.mlp_size
    special: dict[str, tuple[int, ...]] = {"mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        for part in _HF_LAYER:
            shape = special.get(part, (hidden, hidden) if part.endswith("_proj") else (hidden,))
            shapes[f"model.layers.{i}.{part}.weight"] = shape
            shapes[f"model.layers.{i}.{part}.bias"] = shape[-1:]
    shapes |= {"model.norm.weight": (hidden,), "model.norm.bias": (hidden,)}
    shapes["model.embed_positions.weight"] = (config.max_position_embeddings, hidden)
    return {**shapes, **head_shapes(config)}


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]."""
    return name in ("lm_head.weight", SCORE)


def hf_tensors(name: str, config: GPTConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter, or the part of one."""
    base, _, kind = name.rpartition(".")
    if base in _HF_TOP:
        return HfTensors((f"transformer.{_HF_TOP[base]}.{kind}",))
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base):
        theirs = f"transformer.h.{match[1]}.{_HF_LAYER[match[2]]}.{kind}"
        if _HF_LAYER[match[2]] == "attn.c_attn":
            return HfTensors((theirs,), part="qkv".index(match[2][-6]), sizes=(config.hidden_size,) * 3)
        return HfTensors((theirs,))
    return HfTensors((name,))


def from_hf(name: str, config: GPTConfig) -> str | None:
    """The full name of a tensor in an HF file, where `transformer.` may be missing; None for one that is a mask."""
    if _IGNORED.fullmatch(name):
        return None
    return name if name.startswith(("transformer.", "lm_head.", "score.")) else f"transformer.{name}"


def from_paddlenlp(name: str, config: GPTConfig) -> str | None:
    """Our name of a tensor in a file of PaddleNLP (`gpt.decoder.layers.0.linear1.weight`) or PaddleFleetX, where the
    layers of a pipeline are numbers (`1.linear1.weight`); that of q, k and v in one is `qkv_proj`. None for others.

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


def paddlenlp_prefix(config: GPTConfig) -> str | None:
    """None: PaddleNLP's names differ in more than a prefix (`from_paddlenlp`), and are not written."""
    return None
