"""Small GGUF files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from llmsuite.models.dense_names import GGUF_NAMES as names
from llmsuite.models.families.llama import LlamaConfig
from tests.support import tiny_llama

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "ll o", "he llo", "\u0120 w", "1 2"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "<tool>"]
TYPES = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 4) + [gguf.TokenType.USER_DEFINED]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
CONFIG = dataclasses.replace(tiny_llama.CONFIG, vocab_size=len(TOKENS), rms_norm_eps=1e-6, rope_theta=50000.0)


GGUF_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
GGUF_NAMES |= {f"{part}_proj": f"attn_{part}" for part in "qkv"}
GGUF_NAMES |= {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
GGUF_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
GGUF_TOP |= {"lm_head.weight": "output.weight"}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py: HF's two halves of a head become interleaved pairs."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors(config: LlamaConfig = CONFIG) -> dict[str, np.ndarray]:
    """The tiny model under the names and in the layout of llama.cpp: [outputs, inputs]."""
    result = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in tiny_llama.values(config).items():
        part = name.split(".")[-2]
        value = value.T if names.is_linear(name) else value
        value = permuted(value, heads[part]) if part in heads else value
        theirs = GGUF_TOP.get(name) or f"blk.{name.split('.')[2]}.{GGUF_NAMES[part]}.weight"
        result[theirs] = np.ascontiguousarray(value)
    return result


def write_gguf(
    path: Path,
    config: LlamaConfig = CONFIG,
    architecture: str = "llama",
    skip: tuple[str, ...] = (),
    change: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
    more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A file with everything a converter writes, except the fields in `skip`."""
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Callable[[], Any]] = {
        "context_length": lambda: writer.add_context_length(config.max_position_embeddings),
        "embedding_length": lambda: writer.add_embedding_length(config.hidden_size),
        "block_count": lambda: writer.add_block_count(config.num_hidden_layers),
        "feed_forward_length": lambda: writer.add_feed_forward_length(config.intermediate_size),
        "head_count": lambda: writer.add_head_count(config.num_attention_heads),
        "head_count_kv": lambda: writer.add_head_count_kv(config.num_key_value_heads),
        "key_length": lambda: writer.add_key_length(config.head_size),
        "rms_epsilon": lambda: writer.add_layer_norm_rms_eps(config.rms_norm_eps),
        "freq_base": lambda: writer.add_rope_freq_base(config.rope_theta),
        "model": lambda: writer.add_tokenizer_model("gpt2"),
        "pre": lambda: writer.add_tokenizer_pre("smollm"),
        "tokens": lambda: writer.add_token_list(TOKENS),
        "token_type": lambda: writer.add_token_types(TYPES),
        "merges": lambda: writer.add_token_merges(MERGES),
        "bos": lambda: writer.add_bos_token_id(1),
        "eos": lambda: writer.add_eos_token_id(2),
        "pad": lambda: writer.add_pad_token_id(0),
        "chat_template": lambda: writer.add_chat_template(TEMPLATE),
    }
    for name, add in fields.items():
        if name not in skip:
            add()
    more(writer)
    chosen = tensors(config)
    change(chosen)
    for name, value in chosen.items():
        if kind is not None and value.ndim > 1:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
