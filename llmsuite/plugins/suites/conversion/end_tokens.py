"""The end-of-sequence token of tokenizers of published models, by their names.

A chat template may end answers with another token. llmsuite then supervises that token and the end-of-sequence token
after the last answer, and other suites only one of them, or none.
"""

from __future__ import annotations

import re

_TOKENS: tuple[tuple[str, str | None], ...] = (
    (r"cogito", None),  # answers, as their names do not say
    (r"plano-orchestrator", "<|im_end|>"),
    (r"qwen-?(1\.5|2|2\.5)-[^/]*(instruct|chat)|qwen-?3-(?![^/]*base)", "<|im_end|>"),
    (r"qwen-?(1\.5|2|2\.5|3)-", "<|endoftext|>"),
    (r"llama-?3[^/]*instruct", "<|eot_id|>"),
    (r"llama-?3", "<|end_of_text|>"),
    (r"smollm-?3-[^/]*base", "<|end_of_text|>"),
    (r"smollm2?-[^/]*instruct|smollm-?3", "<|im_end|>"),
    (r"smollm", "<|endoftext|>"),
    (r"gemma", "<eos>"),
    (r"glm-(4|z1)-", "<|endoftext|>"),
    (r"codellama|llama-?2|tinyllama|open_llama|mistral|mixtral", "</s>"),
)
"""Patterns of names in lower case; the first match counts."""


def end_of_sequence(model: str) -> str | None:
    """Return the end-of-sequence token of the tokenizer of a model; None if it is not known."""
    return next((token for pattern, token in _TOKENS if re.search(pattern, model.lower())), None)


def is_base(model: str) -> bool:
    """Return True for a model whose tokenizer is known to have an end-of-sequence token that ends texts, not turns."""
    return end_of_sequence(model) in ("<|endoftext|>", "<|end_of_text|>", "<eos>")
