"""A tiny Llama in the layout of Hugging Face, the same wherever it is written. Needs NumPy and safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What the assistant says is between marks. Nothing is behind the end of a turn: TRL would learn it in preferences."""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""The template of Llama 3, with nothing behind the end of a turn either."""
_LLAMA3_TOKENS = {0: "<|end_of_text|>", 1: "<|begin_of_text|>", 2: "<|eot_id|>"}
"""What the tokens of the tokenizer that end and begin are called there."""
_FURTHER = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
_HIDDEN = 32
_INNER = 64
_LAYERS = 2
_HEADS = 4
_KV_HEADS = 2


def write_model(target: Path, tokenizer: Path, like_llama3: bool = False) -> None:
    """Config, weights and tokenizer, as a directory; `like_llama3` with Llama 3's template and control tokens."""
    target.mkdir(parents=True)
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    words = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    words |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    if like_llama3:
        words |= _rename(vocabulary)
    (target / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    ids = [*vocabulary["model"]["vocab"].values(), *(token["id"] for token in vocabulary["added_tokens"])]
    size = max(ids) + 1
    eos = next(t["id"] for t in vocabulary["added_tokens"] if t["content"] == words["eos_token"])
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "eos_token_id": eos,
        "torch_dtype": "float32",
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    random = np.random.RandomState(0)  # whose numbers no version of NumPy changes

    def drawn(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.1).astype("float32")

    kept = _HIDDEN // _HEADS * _KV_HEADS
    tensors = {"model.embed_tokens.weight": drawn(size, _HIDDEN), "lm_head.weight": drawn(size, _HIDDEN)}
    tensors["model.norm.weight"] = np.ones(_HIDDEN, "float32")
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": np.ones(_HIDDEN, "float32") for name in
                    ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        for name, rows, columns in (
            ("self_attn.q_proj", _HIDDEN, _HIDDEN), ("self_attn.k_proj", kept, _HIDDEN),
            ("self_attn.v_proj", kept, _HIDDEN), ("self_attn.o_proj", _HIDDEN, _HIDDEN),
            ("mlp.gate_proj", _INNER, _HIDDEN), ("mlp.up_proj", _INNER, _HIDDEN), ("mlp.down_proj", _HIDDEN, _INNER),
        ):  # fmt: skip
            tensors[f"{at}.{name}.weight"] = drawn(rows, columns)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _rename(vocabulary: dict[str, Any]) -> dict[str, str]:
    """Give a tokenizer the control tokens of Llama 3. Returns what its configuration says then."""
    by_id = {token["id"]: token for token in vocabulary["added_tokens"]}
    for number, name in _LLAMA3_TOKENS.items():
        vocabulary["model"]["vocab"][name] = vocabulary["model"]["vocab"].pop(by_id[number]["content"])
        by_id[number]["content"] = name
    first = max(vocabulary["model"]["vocab"].values()) + 1
    vocabulary["added_tokens"] += [{**by_id[0], "id": first + i, "content": name} for i, name in enumerate(_FURTHER)]
    end, begin, turn = _LLAMA3_TOKENS.values()
    return {"chat_template": LLAMA3, "bos_token": begin, "eos_token": turn, "pad_token": end, "unk_token": end}


def write_rows(target: Path, source: Path, count: int) -> None:
    """The first rows of a file, in a directory as TRL reads it, without what is not their text."""
    target.mkdir(parents=True)
    lines = source.read_text(encoding="utf-8").splitlines()[:count]
    known = ("messages", "prompt", "chosen", "rejected")
    rows = [{key: value for key, value in json.loads(line).items() if key in known} for line in lines]
    (target / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
