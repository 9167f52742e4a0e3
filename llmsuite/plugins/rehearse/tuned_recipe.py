"""The recipe with the layout that was found, with everything else as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import os_errors
from llmsuite.base.locks import scratch_directory
from llmsuite.base.redaction import SECRETS
from llmsuite.base.safe_files import exists
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import Section, as_plain, changed_keys, value_at
from llmsuite.recipe.document import YAML, read_document
from llmsuite.recipe.edit import edited
from llmsuite.recipe.load import REMOVE, load
from llmsuite.recipe.source import Key, read_text


def check_output(recipe: str, output: str | None) -> None:
    """Raise UserError for a file that cannot be written, or is of another format than the recipe."""
    if output is None:
        return
    if exists(Path(output)):
        raise UserError(f"{output} exists; choose another --output, or remove it first")
    suffixes = [Path(name).suffix.lower() for name in (recipe, output)]
    is_yaml = [suffix in YAML for suffix in suffixes]
    if is_yaml[0] != is_yaml[1] or (suffixes[0] == ".jsonc") > (suffixes[1] == ".jsonc"):
        raise UserError(f"--output: {output} has to end with {suffixes[0]}, as the recipe does, whose text is kept")
    if not exists(Path(output).absolute().parent):
        raise UserError(f"--output: the directory of {output} does not exist; create it first")


def tuned_text(recipe: str, words: Sequence[str], registry: Registry) -> str:
    """The text of a recipe in which overrides are written.

    Args:
        recipe: its file.
        words: overrides, valid with this recipe.
        registry: registered stages and model families.

    Raises:
        UserError: the text cannot have them without other changes.
    """
    loaded = load(recipe, words, registry)
    before = dict(_leaves(read_document(recipe).value))
    changes: dict[Key, Any] = {key: REMOVE for key in before if key not in loaded.given}
    for key in sorted(loaded.given):
        if not loaded.origin(key).startswith("--"):
            continue
        value = _value(loaded.recipe, key)
        parent = value_at(loaded.recipe, *key[:-1])
        is_default = isinstance(parent, Section) and key[-1] not in changed_keys(parent)
        if before.get(key, REMOVE) != value and not (is_default and key not in before):
            changes[key] = value
    text = edited(read_text(recipe), recipe, changes)
    with scratch_directory("llmsuite-tune-") as scratch:
        path = scratch / f"recipe{Path(recipe).suffix}"
        path.write_text(text, encoding="utf-8")
        if as_plain(load(path, [], registry).recipe) != as_plain(loaded.recipe):
            raise UserError(
                f"{recipe}: these keys cannot be written into its text without changing others; write the recipe as "
                "JSON, with one key a line, and tune that"
            )
    return text


def output_tuned(text: str, output: str | None) -> None:
    """Write a recipe to a file and report it, or print it without secrets."""
    if output is None:
        print(text, end="")
        if SECRETS.redact(text) != text:
            print("note: secrets are not printed; write the recipe with --output to keep them", file=sys.stderr)
        return
    path = Path(output)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os_errors(path):
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    print(f"wrote {output}")


def _value(recipe: Section, key: Key) -> Any:
    """The value of a key; below a section there may be a plain object, such as `model.config`."""
    found: Any = as_plain(recipe)
    for name in key:
        found = found[name]
    return found


def _leaves(tree: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The keys of a document that have no keys below them, with their values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value
