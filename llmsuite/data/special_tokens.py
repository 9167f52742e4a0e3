"""The tokens of a model that are no text: those that begin, end and pad a sequence, and all that mark its parts.

Several files of a directory name them, and published models name a token in one and not in another. Where files
disagree the rules are those of transformers:

- `special_tokens_map.json` goes before `tokenizer_config.json`, unless that has `added_tokens_decoder`. What the first
  does not name is taken from the second.
- `added_tokens_decoder` goes before `added_tokens` of `tokenizer.json`, but a token is special if any file says so.
- a role that neither names has the token of its id in `generation_config.json`, else in `config.json`.
- every end that a file names ends an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.tokenizer_files import ids_of_tokens
from llmsuite.errors import UserError
from llmsuite.files import read_json_object
from llmsuite.regular import is_file

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""What a tokenizer's files call a token by."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
CONFIGS = ("generation_config.json", "config.json")
"""Files of a model that have ids of tokens."""
OF_IDS = ("bos_token", "eos_token", "pad_token")
"""Roles that those have ids of."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class Added:
    """A token that is found in a text before the rest is split."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False
    """Whether it is left out where ids become text."""


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """What the files of a tokenizer's directory, without `tokenizer.json`, say of its tokens."""

    directory: Path
    config: Mapping[str, Any]
    """The content of `tokenizer_config.json`; empty without one."""
    roles: Mapping[str, str]
    """The text of each of `ROLES` that is named."""
    further: frozenset[str]
    """Texts of special tokens without a role."""
    added: tuple[Added, ...]
    """Those of `added_tokens_decoder`, or of `added_tokens.json` without it; by their ids."""
    added_in: Path
    """The file that they are from."""

    def flag(self, name: str) -> bool | None:
        """`add_bos_token` or `add_eos_token`; None where it is not set. Raises UserError for another value."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{self.directory / 'tokenizer_config.json'}: {name} is {value!r}; it is true or false")
        return value

    def ids(self, role: str, vocab_size: int, *models: Path) -> list[int]:
        """The ids that configs have for a role of `OF_IDS`: those of this directory first, then of the directories of
        models, each once. Raises UserError naming a file whose ids are not of the vocabulary."""
        found: list[int] = []
        for directory in dict.fromkeys([self.directory, *models]):
            for name in CONFIGS:
                found += _ids_in(directory / name, f"{role}_id", vocab_size)
        return list(dict.fromkeys(found))


def read_token_files(directory: Path) -> TokenFiles:
    """What a directory says of its tokens. Raises UserError naming the file that is faulty."""
    path = directory / "tokenizer_config.json"
    config = _object(path)
    own = _roles_in(path, config)
    further = _further_in(path, config)
    map_path, decoder = directory / "special_tokens_map.json", config.get("added_tokens_decoder")
    named = _object(map_path)
    others = _roles_in(map_path, named)
    roles = {**others, **own} if decoder is not None else {**own, **others}
    further |= _further_in(map_path, named)
    if decoder is not None:
        added, added_in = _decoder(path, decoder), path
    else:
        added_in = directory / "added_tokens.json"
        added = _added(added_in, {*roles.values(), *further})
    return TokenFiles(directory, config, roles, frozenset(further), tuple(sorted(added, key=lambda a: a.id)), added_in)


def ids_of_roles(directory: Path) -> dict[str, int]:
    """The ids of the tokens of roles in a directory with a tokenizer.json, which is not opened as a tokenizer; empty
    without one. Raises UserError naming a file that is faulty."""
    path = directory / "tokenizer.json"
    if not is_file(path):
        return {}
    content, roles = _object(path), read_token_files(directory).roles
    found = ids_of_tokens(content)
    ids = {role: found.get(text) for role, text in roles.items()}
    return {role: number for role, number in ids.items() if type(number) is int}


def is_mark(text: str) -> bool:
    """Whether a token looks like no part of a common text: it has more than one character, and not only letters, digits
    and space. A tokenizer may have words, runs of spaces or a `!` among its tokens of a role, or among its added ones.
    """
    return len(text) > 1 and not all(char.isalnum() or char.isspace() for char in text)


def _object(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where there is none."""
    return read_json_object(path) if is_file(path) else {}


def _text(path: Path, key: str, value: Any) -> str:
    """The text of a token, which is a string or an object with its content; empty for none."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is None and not isinstance(value, dict):
        return ""
    if not isinstance(text, str):
        raise UserError(f"{path}: {key} is {value!r}; it has to be a text, or an object with the text as content")
    return text


def _roles_in(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    found = {role: _text(path, role, content.get(role)) for role in ROLES}
    return {role: text for role, text in found.items() if text}


def _further_in(path: Path, content: Mapping[str, Any]) -> set[str]:
    found = set[str]()
    for key in _LISTS:
        values = content.get(key) or []
        values = list(values.values()) if isinstance(values, dict) and key == "extra_special_tokens" else values
        if not isinstance(values, list):
            raise UserError(f"{path}: {key} is {values!r}; it has to be a list of texts")
        found |= {_text(path, f"{key}[{number}]", value) for number, value in enumerate(values)}
    return found - {""}


def _decoder(path: Path, content: Any) -> Iterator[Added]:
    """`added_tokens_decoder`: tokens by their ids."""
    if not isinstance(content, dict):
        raise UserError(f"{path}: added_tokens_decoder is a {type(content).__name__}, not an object")
    for key, value in content.items():
        where = f"added_tokens_decoder[{key!r}]"
        if not key.isdecimal() or not key.isascii() or not isinstance(value, dict):
            raise UserError(f"{path}: {where}: has to be a token, an object, by its id")
        flags = {flag: value.get(flag, False) for flag in _FLAGS}
        if wrong := next((flag for flag, given in flags.items() if not isinstance(given, bool)), None):
            raise UserError(f"{path}: {where}: {wrong} is {flags[wrong]!r}; it is true or false")
        if "normalized" not in value:
            flags["normalized"] = not flags["special"]
        if text := _text(path, where, value):
            yield Added(text, int(key), **flags)


def _added(path: Path, special: set[str]) -> Iterator[Added]:
    """`added_tokens.json`: ids by texts."""
    for text, number in _object(path).items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path}: {text!r} is {number!r}; it has to be the id of that token")
        yield Added(text, number, normalized=text not in special, special=text in special)


def _ids_in(path: Path, key: str, vocab_size: int) -> list[int]:
    """The ids of a key in generation_config.json or config.json, also in its `text_config`."""
    content = _object(path)
    inner = content.get("text_config")
    parts = [content, inner] if isinstance(inner, dict) else [content]
    sizes = [part["vocab_size"] for part in parts if type(part.get("vocab_size")) is int]
    found = []
    for part in parts:
        value = part.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [i for i in ids if type(i) is not int]:
            raise UserError(
                f"{path}: {key} is {value!r}; it has to be a number or a list of them, and not {wrong[0]!r}"
            )
        ids = [i for i in ids if i != -1]  # which is none
        if wrong := [i for i in ids if not 0 <= i < max(vocab_size, *sizes, 0)]:
            last = max(vocab_size, *sizes, 0) - 1
            raise UserError(
                f"{path}: {key} has {wrong[0]}, and ids of tokens end at {last}; name one of these, or none"
            )
        found += ids
    return found
