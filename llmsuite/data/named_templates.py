"""Chat templates that come along, by their names, and files with a template of the user's own.

The texts are in `chat_templates/`, where README.md has their sources and licences.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.files import read_json_object
from llmsuite.base.safe_files import is_file, read_regular
from llmsuite.contract.schema.chat_templates import NAMES
from llmsuite.data.special_tokens import read_token_files

_TEXTS = Path(__file__).parent / "chat_templates"
_MAX_BYTES = 1 << 20
_TOKENS = {
    "deepseek-r1": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    "deepseek-v3": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "glm4.5": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    "llama3.1": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "mistral-v7": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen2.5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
"""Tokens that a template writes around turns. Templates without an entry can be used with any tokenizer."""


@functools.cache
def named_template(name: str) -> str | None:
    """Return the text of a template of `chat_templates/`; None for another value."""
    if name not in _TOKENS:
        return None
    return (_TEXTS / f"{name}.jinja").read_text(encoding="utf-8")


def read_template(path: Path) -> str:
    """Read a file with a chat template. Raises UserError that names it."""
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error


def check_tokens(name: str, directory: Path) -> None:
    """Check that a tokenizer has the tokens that a template of `chat_templates/` writes around turns.

    A tokenizer without tokenizer.json is not checked, as other files do not list all of its tokens.

    Args:
        name: of the template.
        directory: of the tokenizer.

    Raises:
        UserError: names the tokens that are missing.
    """
    if not is_file(directory / "tokenizer.json"):
        return
    known = frozenset(_token_texts(directory))
    missing = [token for token in _TOKENS[name] if token not in known]
    if missing:
        fitting = [other for other in NAMES if other not in _TOKENS or known.issuperset(_TOKENS[other])]
        raise UserError(
            f"chat template {name} writes {', '.join(missing)}, which the tokenizer in {directory} does not have among "
            f"its added tokens; choose another data.chat_template (tokenizer, {', '.join(fitting)}), or a tokenizer "
            "with these tokens"
        )


def _token_texts(directory: Path) -> Iterator[str]:
    """Yield the texts of the tokens that are matched in a text before the rest is split."""
    added = read_json_object(directory / "tokenizer.json").get("added_tokens")
    if isinstance(added, list):
        for entry in added:
            if isinstance(entry, dict) and isinstance(entry.get("content"), str):
                yield entry["content"]
    files = read_token_files(directory)
    yield from files.roles.values()
    yield from files.additional
    yield from (token.text for token in files.added)
