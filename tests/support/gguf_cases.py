"""Models of each shape that GGUF is written of, and the tokenizers that it has names for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.convert.gguf_export import GgufExport
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.inference.ollama import read_dialogue
from llmsuite.models.initial_values import initial_values
from tests.support.families import CASES, FAMILIES, read_config
from tests.support.paths import DATA

SHAPES = [
    case for case in CASES if case.startswith(("llama/", "qwen/")) and "yarn" not in case and "window" not in case
]
K_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""A shape whose rows are multiples of 256."""
TOKENIZER = DATA / "tokenizer"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, bool]] = {
    "smollm": ([{"type": "Digits", "individual_digits": True}], None, False),
    "gpt-2": ([], None, False),
    "llama-bpe": ([{"Regex": _WORDS.replace("NUMBERS", r"\p{N}{1,3}")}], None, True),
    "qwen2": ([{"Regex": _WORDS.replace("NUMBERS", r"\p{N}")}], {"type": "NFC"}, False),
}
"""For each GGUF name, of the published tokenizer.json of such a model: the steps before its bytes, its normalizer, and
ignore_merges. (HuggingFaceTB/SmolLM2-135M, openai-community/gpt2, meta-llama/Llama-3.1-8B, Qwen/Qwen2.5-7B.)"""


def write_tokenizer(directory: Path, split: str = "smollm", **changes: Any) -> None:
    """The tokenizer of data/tokenizer, splitting text in another way."""
    directory.mkdir(exist_ok=True, parents=True)
    data = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    first, data["normalizer"], data["model"]["ignore_merges"] = SPLITS[split]
    parts = [
        {"type": "Split", "pattern": s, "behavior": "Isolated", "invert": False} if "Regex" in s else s for s in first
    ]
    uses_regex = not any("Regex" in step for step in first)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": not uses_regex, "use_regex": uses_regex}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*parts, level]} if parts else level
    (directory / "tokenizer.json").write_text(json.dumps({**data, **changes}), encoding="utf-8")
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_case(
    directory: Path, case: str, split: str = "smollm", dtype: str = "float32", **shape: Any
) -> ModelDirectory:
    """A model of the shape of a reference case, with more tokens than its tokenizer has, with random weights."""
    family = FAMILIES[case.split("/")[0]]
    config = family.config_cls.from_hf({**read_config(case), "vocab_size": 520, "eos_token_id": 2, **shape})
    write_tokenizer(directory, split)

    def value(name: str) -> np.ndarray:
        shape = family.names().parameter_shapes(config)[name]
        return (initial_values(0, name, shape, 0.3) + (name.endswith("norm.weight"))).astype(dtype)

    specs = [TensorSpec(n, s, dtype) for n, s in family.names().parameter_shapes(config).items()]
    write_model(directory, family, config, value, specs)
    return open_model(directory, FAMILIES)


def export(model: ModelDirectory, path: Path, dtype: str = "fp32") -> Path:
    GgufExport(model, dtype).write(path, read_dialogue(model.path))
    return path
