"""Names of a dense decoder's tensors in GGUF, the format of llama.cpp. Imports no Paddle.

They are those of llama.cpp's `gguf-py/gguf/constants.py`; our own names are HF's.
"""

from __future__ import annotations

import re

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OUR_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}
_OUR_TOP = {ours: theirs for theirs, ours in _TOP.items()}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the plain rotary frequencies; computed from the config, not trained."""


def from_gguf(name: str) -> str | None:
    """Our name of a tensor in a GGUF file; None for one that is computed, not trained. Unknown names are unchanged."""
    if name == ROPE_FACTORS:
        return None
    base, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        part = _LAYER.get(match[2])
        return f"model.layers.{match[1]}.{part}.{suffix}" if part else name
    return f"{_TOP[base]}.{suffix}" if base in _TOP else name


def to_gguf(name: str) -> str | None:
    """The GGUF name of a parameter by our name; None where there is none."""
    base, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base):
        part = _OUR_LAYER.get(match[2])
        return f"blk.{match[1]}.{part}.{suffix}" if part else None
    return f"{_OUR_TOP[base]}.{suffix}" if base in _OUR_TOP else None
