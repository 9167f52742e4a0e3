"""Values of `data.chat_template`: the template of the tokenizer, one of those that come along, or one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from llmsuite.base.suggestions import suggestion

OF_TOKENIZER = "tokenizer"
NAMES = {
    "chatml": "any model with turns between <|im_start|> and <|im_end|>",
    "deepseek-r1": "DeepSeek-R1",
    "deepseek-v3": "DeepSeek-V3, without tools",
    "gemma": "Gemma 2 and 3",
    "glm4.5": "GLM-4.5 and 4.6",
    "gpt-oss": "gpt-oss",
    "llama3": "Llama 3, without tools",
    "llama3.1": "Llama 3.1 and 3.3",
    "mistral": "Mistral 7B v0.3, Mixtral 8x22B",
    "mistral-v7": "Mistral Small 3",
    "phi3": "Phi-3 and 3.5",
    "phi4": "Phi-4",
    "plain": "base models: turns on lines of their own",
    "qwen2.5": "Qwen2.5",
    "qwen3": "Qwen3, with thoughts or without",
}
"""The models of each template that comes along, by the template's name."""
_SUFFIXES = (".jinja", ".jinja2", ".j2")
TEMPLATE_HELP = (
    "tokenizer, chatml, qwen3 or another name of `llmsuite list templates`, or a file of your own, such as own.jinja"
)
"""Description of the option of commands."""


def is_template_text(value: str) -> bool:
    """Return True for the text of a template."""
    return "{{" in value or "{%" in value


def is_template_file(value: str) -> bool:
    """Return True for the path of a file with a template."""
    return not is_template_text(value) and PurePath(value).suffix in _SUFFIXES


def template_fault(value: str) -> str | None:
    """Return the fault of a value that is none of the above; None for a valid one."""
    names = (OF_TOKENIZER, *NAMES)
    if value in names or is_template_text(value) or is_template_file(value):
        return None
    return (
        f"there is no {value!r}; {suggestion(value.lower().replace('_', '-'), names)}it is one of {', '.join(names)}; "
        "one of your own is the path of a .jinja file, or a text with {{ … }}"
    )


def template_problems(value: str) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for a faulty value of a key `chat_template`."""
    fault = template_fault(value)
    if fault is not None:
        yield "chat_template", fault
