"""Files of a model's tokenizer: copied with a model that is written, and merged for an adapter and its base."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.cache import cache_root, locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file, committed_directory, read_json_object, sha256_of, write_json
from llmsuite.base.safe_files import check_local, copy_regular, is_dir, is_file, listed

_CONFIG = "tokenizer_config.json"
_TOKENS = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
_VOCABULARY = (
    "tokenizer.json",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_SUFFIXES = (".model", ".tiktoken")
"""Suffixes of other files with a vocabulary."""
TOKENIZER_FILES = (*_VOCABULARY, _CONFIG, _TOKENS, _ADDED, _TEMPLATE, _GENERATION)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer. Raises UserError as `check_tokenizer`, before any is copied."""
    for path in check_tokenizer(source):
        copy_regular(path, target / path.name)


def check_tokenizer(source: Path) -> list[Path]:
    """Return the files of a tokenizer.

    Raises:
        UserError: one is no valid JSON, or a link to another place, so that a copy would publish an unrelated file.
    """
    others = [path.name for path in listed(source) if path.suffix in _SUFFIXES]
    found = [path for name in dict.fromkeys((*TOKENIZER_FILES, *others)) if is_file(path := source / name)]
    for path in found:
        try:
            check_local(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be copied: {error.strerror}") from error
        if path.suffix == ".json":
            _check_object(path, path.stat().st_mtime_ns)
    return found


@functools.lru_cache(maxsize=64)
def _check_object(path: Path, changed: int) -> None:
    """Raise UserError if a file is no JSON object. `changed`, its time of modification, is a part of the cache key."""
    read_json_object(path)


def tokenizer_of_adapter(adapter: Path, base: Path) -> Path:
    """Return the directory of a model's tokenizer with an adapter.

    Vocabulary, settings, chat template and generation_config.json are each the adapter's if it has them, else the
    base's. So the result is one of the two directories, or one of the cache with files of both. An adapter with a
    vocabulary and settings has a complete tokenizer, to which the base adds no chat template.

    Args:
        adapter: the directory of the adapter.
        base: the directory of its model.

    Raises:
        UserError: as `check_tokenizer`; or settings name added tokens that the base's vocabulary does not have.
    """
    own = {path.name: path for path in check_tokenizer(adapter)}
    if not own:
        return base
    theirs = {path.name: path for path in check_tokenizer(base)}
    taken = {name: path for name, path in theirs.items() if name not in own and not _has_own(name, own)}
    settings = _merged_settings(own, theirs)
    if settings is None and not taken:
        return adapter
    if _CONFIG in own and "tokenizer.json" in taken:
        _check_added(own[_CONFIG], taken["tokenizer.json"])
    return _in_cache({**taken, **own}, settings)


def _is_vocabulary(name: str) -> bool:
    return name in _VOCABULARY or name.endswith(_SUFFIXES)


def _has_own(name: str, own: dict[str, Path]) -> bool:
    """Return True if an adapter's files replace a file of the base that the adapter does not have itself."""
    has_vocabulary = any(map(_is_vocabulary, own))
    if name == _TEMPLATE:
        return (has_vocabulary and _CONFIG in own) or _template_in(own) is not None
    if name in (_CONFIG, _TOKENS):
        return _CONFIG in own
    return has_vocabulary and (name == _ADDED or _is_vocabulary(name))


def _merged_settings(own: dict[str, Path], theirs: dict[str, Path]) -> dict[str, Any] | None:
    """Return a tokenizer_config.json that neither has: the adapter's with the base's chat template, or the base's
    without its own, which some libraries would prefer to the adapter's chat_template.jinja; else None."""
    if _TEMPLATE in own and _CONFIG not in own and _template_in(theirs) is not None:
        return {key: value for key, value in read_json_object(theirs[_CONFIG]).items() if key != "chat_template"}
    if _CONFIG not in own or _TEMPLATE in own or _TEMPLATE in theirs or _has_own(_TEMPLATE, own):
        return None
    template = _template_in(theirs)
    if template is None:
        return None
    return {**read_json_object(own[_CONFIG]), "chat_template": template}


def _template_in(files: dict[str, Path]) -> Any:
    """Return the chat template in a tokenizer_config.json; None without one."""
    if _CONFIG in files:
        return read_json_object(files[_CONFIG]).get("chat_template")
    return None


def _check_added(config: Path, vocabulary: Path) -> None:
    """Raise UserError if an added token of an adapter's settings does not have its id in the base's tokenizer.json."""
    named = read_json_object(config).get("added_tokens_decoder")
    if not isinstance(named, dict):
        return
    known = vocabulary_ids(read_json_object(vocabulary))
    for number, entry in named.items():
        content = None
        if isinstance(entry, dict):
            content = entry.get("content")
        if not isinstance(content, str) or str(known.get(content)) != str(number):
            raise UserError(
                f"{config}: has the added token {content!r} with id {number}, which {vocabulary} does not have; put "
                "the tokenizer.json that it belongs to next to it"
            )


def vocabulary_ids(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of the tokens of a tokenizer.json; parts of another form are ignored."""
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens")
    vocabulary = None
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
    found: list[tuple[Any, Any]] = []
    if isinstance(vocabulary, dict):
        found = list(vocabulary.items())
    elif isinstance(vocabulary, list):  # pieces with their scores
        found = [(entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    entries = added if isinstance(added, list) else []
    found += [(entry.get("content"), entry.get("id")) for entry in entries if isinstance(entry, dict)]
    return {text: number for text, number in found if isinstance(text, str)}


def _in_cache(files: dict[str, Path], settings: dict[str, Any] | None) -> Path:
    """Return a directory of the cache with copies of files, named by their content."""
    parts = [(name, sha256_of(path)) for name, path in sorted(files.items())]
    digest = hashlib.sha256(json.dumps([parts, settings]).encode()).hexdigest()[:32]
    target = cache_root() / "tokenizers" / digest
    with locked(target.with_suffix(".lock")):
        if not is_dir(target) or broken_file(target) is not None:
            with committed_directory(target) as directory:
                _write(files.values(), settings, directory)
    return target


def _write(files: Iterable[Path], settings: dict[str, Any] | None, directory: Path) -> None:
    for path in files:
        copy_regular(path, directory / path.name)
    if settings is not None:
        write_json(directory / _CONFIG, settings)
