"""The files that a model's tokenizer is made of: copied along with what is written, and those of an adapter joined with
its base's."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.cache import cache_root, locked
from llmsuite.errors import UserError
from llmsuite.files import broken_file, committed_directory, read_json_object, sha256_of, write_json
from llmsuite.regular import check_own, copy_regular, is_dir, is_file, listed

_CONFIG, _TOKENS, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _GENERATION = "chat_template.jinja", "generation_config.json"
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
"""Ends of the names of further files with a vocabulary."""
TOKENIZER_FILES = (*_VOCABULARY, _CONFIG, _TOKENS, _ADDED, _TEMPLATE, _GENERATION)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files a tokenizer is made of. Raises UserError as `check_tokenizer`, before any is copied."""
    for path in check_tokenizer(source):
        copy_regular(path, target / path.name)


def check_tokenizer(source: Path) -> list[Path]:
    """The files a tokenizer is made of.

    Raises:
        UserError: one is not what its name says, or lies elsewhere, so that another file would be handed on with what
            is written.
    """
    further = [path.name for path in listed(source) if path.suffix in _SUFFIXES]
    found = [path for name in dict.fromkeys((*TOKENIZER_FILES, *further)) if is_file(path := source / name)]
    for path in found:
        try:
            check_own(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be copied: {error.strerror}") from error
        if path.suffix == ".json":
            _check_object(path, path.stat().st_mtime_ns)
    return found


@functools.lru_cache(maxsize=64)
def _check_object(path: Path, changed: int) -> None:
    """Raises UserError when a file is no JSON object; `changed` is when it was written."""
    read_json_object(path)


def tokenizer_of_adapter(adapter: Path, base: Path) -> Path:
    """The directory of the tokenizer that a model has with an adapter.

    Vocabulary, settings, chat template and generation_config.json are each the adapter's where it brings them, and the
    base's where it does not. So it is one of the two directories, or one of the cache with files of both. An adapter
    with a vocabulary and settings has a whole tokenizer, to which the base adds no chat template.

    Args:
        adapter: the directory of the adapter.
        base: of its model.

    Raises:
        UserError: as `check_tokenizer`; or settings name added tokens that the base's vocabulary does not have.
    """
    own = {path.name: path for path in check_tokenizer(adapter)}
    if not own:
        return base
    theirs = {path.name: path for path in check_tokenizer(base)}
    taken = {name: path for name, path in theirs.items() if name not in own and not _has_own(name, own)}
    settings = _joined_settings(own, theirs)
    if settings is None and not taken:
        return adapter
    if _CONFIG in own and "tokenizer.json" in taken:
        _check_added(own[_CONFIG], taken["tokenizer.json"])
    return _in_cache({**taken, **own}, settings)


def _is_vocabulary(name: str) -> bool:
    return name in _VOCABULARY or name.endswith(_SUFFIXES)


def _has_own(name: str, own: dict[str, Path]) -> bool:
    """Whether an adapter's files are in place of a file of the base that it does not have itself."""
    has_vocabulary = any(map(_is_vocabulary, own))
    if name == _TEMPLATE:
        return (has_vocabulary and _CONFIG in own) or _template_in(own) is not None
    if name in (_CONFIG, _TOKENS):
        return _CONFIG in own
    return has_vocabulary and (name == _ADDED or _is_vocabulary(name))


def _joined_settings(own: dict[str, Path], theirs: dict[str, Path]) -> dict[str, Any] | None:
    """The adapter's tokenizer_config.json with the base's chat template, where that is in the base's; else None."""
    if _CONFIG not in own or _TEMPLATE in own or _TEMPLATE in theirs or _has_own(_TEMPLATE, own):
        return None
    template = _template_in(theirs)
    return None if template is None else {**read_json_object(own[_CONFIG]), "chat_template": template}


def _template_in(files: dict[str, Path]) -> Any:
    """The chat template in a tokenizer_config.json; None without one."""
    return read_json_object(files[_CONFIG]).get("chat_template") if _CONFIG in files else None


def _check_added(config: Path, vocabulary: Path) -> None:
    """Raise UserError for added tokens of an adapter's settings that its base's tokenizer.json does not have so."""
    named = read_json_object(config).get("added_tokens_decoder")
    known = ids_of_tokens(read_json_object(vocabulary))
    for number, entry in named.items() if isinstance(named, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or str(known.get(content)) != str(number):
            raise UserError(
                f"{config}: has the added token {content!r} with id {number}, which {vocabulary} does not have so; put "
                "the tokenizer.json that it belongs to beside it"
            )


def ids_of_tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the tokens of a tokenizer.json, as far as it has the form of one."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: list[tuple[Any, Any]] = []
    if isinstance(vocabulary, dict):
        found = list(vocabulary.items())
    elif isinstance(vocabulary, list):  # pieces with their scores
        found = [(entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    entries = added if isinstance(added, list) else []
    found += [(entry.get("content"), entry.get("id")) for entry in entries if isinstance(entry, dict)]
    return {text: number for text, number in found if isinstance(text, str)}


def _in_cache(files: dict[str, Path], settings: dict[str, Any] | None) -> Path:
    """A directory of the cache with copies of files, named by their content."""
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
