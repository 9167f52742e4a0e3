"""Tokens that a run adds to the tokenizer of its model: a directory of the cache with the completed tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.cache import cache_root, locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file, committed_directory, read_json_object, write_json
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.data.tokenizer import TextTokenizer

_CONFIG = "tokenizer_config.json"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def tokenizer_with_tokens(directory: Path, tokens: Sequence[str], special_tokens: Sequence[str]) -> Path:
    """Return the directory of a tokenizer with more tokens: `directory` itself where none is to be added.

    New tokens get the next ids, first `tokens`, then `special_tokens`, as by `add_tokens` of transformers; those that
    the vocabulary has keep their ids. They are matched in a text before the rest is split, and nothing is stripped next
    to them.

    Args:
        directory: of the tokenizer, with a tokenizer.json.
        tokens: texts of tokens.
        special_tokens: texts of tokens that `decode` leaves out.

    Raises:
        UserError: it has no tokenizer.json.
    """
    if not tokens and not special_tokens:
        return directory
    if not is_file(directory / "tokenizer.json"):
        raise UserError(
            f"model.new_tokens: {directory} has no tokenizer.json, to which tokens can be added; save one there with "
            "transformers' save_pretrained, or remove the key"
        )
    tokenizer = TextTokenizer(directory)
    key = json.dumps([tokenizer.digest(), list(tokens), list(special_tokens)])
    target = cache_root() / "tokenizers" / f"new-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with locked(target.with_suffix(".lock")):
        if not is_dir(target) or broken_file(target) is not None:
            with committed_directory(target) as written:
                copy_tokenizer(directory, written)
                added = tokenizer.add_tokens(tokens, special_tokens, written / "tokenizer.json")
                _complete_config(written / _CONFIG, added, special_tokens)
    return target


def _complete_config(path: Path, added: dict[int, Any], special_tokens: Sequence[str]) -> None:
    """Write the new tokens into tokenizer_config.json, where it lists added tokens; and the special ones, as
    transformers does.

    Args:
        path: of the file, which may be missing.
        added: tokens of the library by id.
        special_tokens: texts of those that are special.
    """
    if not is_file(path):
        return
    config = read_json_object(path)
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        for number, token in added.items():
            flags = {flag: getattr(token, flag) for flag in _FLAGS}
            entries[str(number)] = {"content": token.content, **flags, "special": token.special}
    named = config.get("additional_special_tokens")
    if special_tokens and (named is None or isinstance(named, list)):
        config["additional_special_tokens"] = list(dict.fromkeys([*(named or []), *special_tokens]))
    write_json(path, config)
