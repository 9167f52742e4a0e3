"""The loss of a tiny Llama on conversations in Llama 3's turns, written out in NumPy: no line of llmsuite is in it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

_EPSILON = 1e-5
_BASE = 10000.0


def first_loss(model: Path, rows: Path, apart: bool = False) -> float:
    """Mean over all tokens that the assistant says, with the end of its turns: what these suites learn.

    ms-swift: `Llama3TemplateMeta`, of whose turns the answers and what ends them have a label. Axolotl: `chat_template`
    with `roles_to_train: [assistant]` and `train_on_eos: turn`, which are its defaults. PaddleFormers: the template
    `llama3`, whose answers are tokenised `apart` from what is in front of them (`Template.encode_multiturn`); the token
    that ends an answer is learnt (`_add_dynamic_eos`, `efficient_eos`), and a batch has one mean
    (`sft_postprocess_loss`).
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = {name: value.astype("float64") for name, value in load_file(model / "model.safetensors").items()}
    total = 0.0
    count = 0
    for line in rows.read_text(encoding="utf-8").splitlines():
        ids, learnt = _tokens(tokenizer, json.loads(line)["messages"], apart)
        logits = _logits(config, tensors, np.array(ids[:-1]))
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = np.flatnonzero(learnt[1:])
        total -= float(logps[at, np.array(ids)[at + 1]].sum())
        count += len(at)
    return total / count


def _tokens(tokenizer: Tokenizer, messages: list[dict[str, str]], apart: bool) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which of them are learnt."""
    parts = [("<|begin_of_text|>", False)]
    for message in messages:
        parts.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        parts.append((f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"))
    if apart:
        ids = list[int]()
        learnt = list[bool]()
        for is_learnt, group in itertools.groupby(parts, lambda part: part[1]):
            found = tokenizer.encode("".join(text for text, _ in group), add_special_tokens=False).ids
            ids = ids + found
            learnt = learnt + [is_learnt] * len(found)
        return ids, learnt
    encoded = tokenizer.encode("".join(text for text, _ in parts), add_special_tokens=False)
    owner = [is_learnt for text, is_learnt in parts for _ in text]  # by character
    return encoded.ids, [owner[begin] for begin, _ in encoded.offsets]


def _logits(config: dict[str, int], tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """[tokens, vocabulary]."""
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    x = tensors["model.embed_tokens.weight"][ids]
    size = x.shape[1] // heads
    angles = np.arange(len(ids))[:, None] / _BASE ** (np.arange(0, size, 2) / size)
    cos, sin = (np.concatenate([f(angles)] * 2, 1)[:, None] for f in (np.cos, np.sin))

    def turned(y: np.ndarray) -> np.ndarray:
        first, second = np.split(y, 2, -1)
        rotated: np.ndarray = y * cos + np.concatenate([-second, first], -1) * sin
        return rotated

    for layer in range(config["num_hidden_layers"]):
        at = {
            name.split(".", 3)[3]: value for name, value in tensors.items() if name.startswith(f"model.layers.{layer}.")
        }
        h = _norm(x) * at["input_layernorm.weight"]
        q, k, v = (h @ at[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (y.reshape(len(ids), -1, size) for y in (q, k, v))
        k, v = (np.repeat(y, heads // kv_heads, 1) for y in (turned(k), v))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(size)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(len(ids), -1) @ at["self_attn.o_proj.weight"].T
        h = _norm(x) * at["post_attention_layernorm.weight"]
        gate = h @ at["mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (h @ at["mlp.up_proj.weight"].T)
        x = x + inner @ at["mlp.down_proj.weight"].T
    found: np.ndarray = _norm(x) * tensors["model.norm.weight"] @ tensors["lm_head.weight"].T
    return found


def _norm(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPSILON)
    return found
