"""Special tokens of a model: those that begin, end and pad a sequence, and others that mark its parts.

Several files of a directory name them, and published models name a token in one and not in another. Where files
disagree the rules are those of transformers:

- `special_tokens_map.json` takes precedence over `tokenizer_config.json`, unless that has `added_tokens_decoder`. A
  role that the first does not name is taken from the second.
- `added_tokens_decoder` takes precedence over `added_tokens` of `tokenizer.json`, but a token is special if any file
  says so.
- a role that neither names has the token of its id in `generation_config.json`, else in `config.json`.
- every end-of-sequence token that a file names ends an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.tokenizer_files import vocabulary_ids

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Roles of tokens, by the keys in a tokenizer's files."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
CONFIGS = ("generation_config.json", "config.json")
"""Configs of a model that have ids of tokens."""
ROLES_WITH_IDS = ("bos_token", "eos_token", "pad_token")
"""Roles whose ids are in these configs."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class AddedTokenEntry:
    """An added token: it is matched in a text before the rest is split."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False
    """True if decoding leaves it out."""


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """Tokens by the files of a tokenizer's directory other than `tokenizer.json`."""

    directory: Path
    config: Mapping[str, Any]
    """Content of `tokenizer_config.json`; empty without one."""
    roles: Mapping[str, str]
    """Text of each of `ROLES` that is named."""
    additional: frozenset[str]
    """Texts of special tokens without a role."""
    added: tuple[AddedTokenEntry, ...]
    """Tokens of `added_tokens_decoder`, else of `added_tokens.json`; sorted by id."""
    added_in: Path
    """File of `added`."""

    def flag(self, name: str) -> bool | None:
        """Return `add_bos_token` or `add_eos_token`; None where it is not set. Raises UserError for another value."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{self.directory / 'tokenizer_config.json'}: {name} is {value!r}; it is true or false")
        return value

    def ids(self, role: str, vocab_size: int, *models: Path) -> list[int]:
        """Return the ids in configs for a role of `ROLES_WITH_IDS`, each once.

        Those of this directory come first, then those of the directories of `models`. Raises UserError that names a
        file with ids beyond the vocabulary.
        """
        found: list[int] = []
        for directory in dict.fromkeys([self.directory, *models]):
            for name in CONFIGS:
                found += _ids_in(directory / name, f"{role}_id", vocab_size)
        return list(dict.fromkeys(found))


def read_token_files(directory: Path) -> TokenFiles:
    """Read the tokens of a directory. Raises UserError that names a faulty file."""
    path = directory / "tokenizer_config.json"
    config = _object(path)
    own = _roles_in(path, config)
    additional = _additional_in(path, config)
    map_path = directory / "special_tokens_map.json"
    decoder = config.get("added_tokens_decoder")
    named = _object(map_path)
    others = _roles_in(map_path, named)
    roles = {**others, **own} if decoder is not None else {**own, **others}
    additional |= _additional_in(map_path, named)
    if decoder is not None:
        added = _decoder(path, decoder)
        added_in = path
    else:
        added_in = directory / "added_tokens.json"
        added = _added(added_in, {*roles.values(), *additional})
    by_id = tuple(sorted(added, key=lambda token: token.id))
    return TokenFiles(directory, config, roles, frozenset(additional), by_id, added_in)


def role_ids(directory: Path) -> dict[str, int]:
    """Return the ids of the roles in a directory with a tokenizer.json; empty without one.

    The file is read as JSON only, not opened as a tokenizer. Raises UserError that names a faulty file.
    """
    path = directory / "tokenizer.json"
    if not is_file(path):
        return {}
    content = _object(path)
    roles = read_token_files(directory).roles
    found = vocabulary_ids(content)
    ids = {role: found.get(text) for role, text in roles.items()}
    return {role: number for role, number in ids.items() if type(number) is int}


def looks_special(text: str) -> bool:
    """Return True if a token looks unlike a part of common text.

    It then has more than one character, and not only letters, digits and white space. A tokenizer may have words, runs
    of spaces or a `!` among the tokens of its roles, or among its added tokens.
    """
    return len(text) > 1 and not all(char.isalnum() or char.isspace() for char in text)


def _object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is none."""
    return read_json_object(path) if is_file(path) else {}


def _text(path: Path, key: str, value: Any) -> str:
    """Return the text of a token, which is a string or an object with its content; empty for none."""
    text = value
    if isinstance(value, dict):
        text = value.get("content")
    if text is None and not isinstance(value, dict):
        return ""
    if not isinstance(text, str):
        raise UserError(f"{path}: {key} is {value!r}; it has to be a text, or an object with the text as content")
    return text


def _roles_in(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    found = {role: _text(path, role, content.get(role)) for role in ROLES}
    return {role: text for role, text in found.items() if text}


def _additional_in(path: Path, content: Mapping[str, Any]) -> set[str]:
    found = set[str]()
    for key in _LISTS:
        values = content.get(key) or []
        if isinstance(values, dict) and key == "extra_special_tokens":
            values = list(values.values())
        if not isinstance(values, list):
            raise UserError(f"{path}: {key} is {values!r}; it has to be a list of texts")
        found |= {_text(path, f"{key}[{number}]", value) for number, value in enumerate(values)}
    return found - {""}


def _decoder(path: Path, content: Any) -> Iterator[AddedTokenEntry]:
    """Yield the tokens of `added_tokens_decoder`: tokens by id."""
    if not isinstance(content, dict):
        raise UserError(f"{path}: added_tokens_decoder is a {type(content).__name__}, not an object")
    for key, value in content.items():
        where = f"added_tokens_decoder[{key!r}]"
        if not key.isdecimal() or not key.isascii() or not isinstance(value, dict):
            raise UserError(f"{path}: {where}: has to be a token, an object, by its id")
        flags = {flag: value.get(flag, False) for flag in _FLAGS}
        wrong = next((flag for flag, value in flags.items() if not isinstance(value, bool)), None)
        if wrong is not None:
            raise UserError(f"{path}: {where}: {wrong} is {flags[wrong]!r}; it is true or false")
        if "normalized" not in value:
            flags["normalized"] = not flags["special"]
        text = _text(path, where, value)
        if text:
            yield AddedTokenEntry(text, int(key), **flags)


def _added(path: Path, special: set[str]) -> Iterator[AddedTokenEntry]:
    """Yield the tokens of `added_tokens.json`: ids by text."""
    for text, number in _object(path).items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path}: {text!r} is {number!r}; it has to be the id of that token")
        yield AddedTokenEntry(text, number, normalized=text not in special, special=text in special)


def _ids_in(path: Path, key: str, vocab_size: int) -> list[int]:
    """Return the ids of a key in generation_config.json or config.json, also in its `text_config`."""
    content = _object(path)
    inner = content.get("text_config")
    parts = [content, inner] if isinstance(inner, dict) else [content]
    sizes = [part["vocab_size"] for part in parts if type(part.get("vocab_size")) is int]
    limit = max(vocab_size, *sizes, 0)
    found = []
    for part in parts:
        value = part.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        wrong = [i for i in ids if type(i) is not int]
        if wrong:
            raise UserError(
                f"{path}: {key} is {value!r}; it has to be a number or a list of them, and not {wrong[0]!r}"
            )
        ids = [i for i in ids if i != -1]  # -1 stands for no token
        wrong = [i for i in ids if not 0 <= i < limit]
        if wrong:
            raise UserError(
                f"{path}: {key} has {wrong[0]}, and ids of tokens end at {limit - 1}; name one of these, or none"
            )
        found += ids
    return found
