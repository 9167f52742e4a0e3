"""A strict JSON parser that records the line and column of every key and value.

`json.loads` keeps the last of two equal keys, accepts NaN, and loses positions. Error messages about recipes need
positions, so recipes are parsed here; problems that do not stop the parser are collected and raised together.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]  # not in the type stubs
from pathlib import Path
from typing import Any

from llmsuite.base.errors import Problem, RecipeError, UserError, reason_of
from llmsuite.base.resources import find
from llmsuite.base.safe_files import open_at_once

MAX_BYTES = 200_000
MAX_DEPTH = 64
MIN_INT = -(2**63)
MAX_INT = 2**63 - 1

Key = tuple[str, ...]

_SPACE = re.compile(r"[ \t\n\r]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[\w+\-.]+")  # one word, valid JSON or not
_LITERALS = {"true": True, "false": False, "null": None}
_NEVER_JSON = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"}


@dataclasses.dataclass
class Source:
    """A parsed document: its plain value and the position of each part."""

    name: str
    """File name as the user gave it."""
    value: Any
    keys: dict[Key, str]
    """Position of each key (`file:line:col`)."""
    values: dict[Key, str]
    """Position of each value."""


def read_text(path: str | Path) -> str:
    """Return the text of a recipe; a relative path is also looked up among the bundled files.

    Raises:
        UserError: the file cannot be read, or is too long.
        RecipeError: it is not UTF-8.
    """
    try:
        with open_at_once(find(str(path))) as file:
            raw = file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a directory; a recipe is a file, in a run recipe.json") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: `~USER` without a home directory
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: is too long; a recipe has at most {MAX_BYTES:,} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        before = raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8")
        where = f"{path}:{line}:{len(before) + 1}"
        raise RecipeError([Problem(where, "", f"is not UTF-8 ({error.reason})")]) from error


def parse_json(text: str, name: str, comments: bool = False) -> Source:
    """Parse JSON text strictly; with `comments`, JSONC.

    Raises:
        RecipeError: with every problem found, each with line and column.
    """
    reader = _Reader(text, name, comments)
    value = reader.document()
    if reader.problems:
        raise RecipeError(reader.problems)
    return Source(name, value, reader.keys, reader.values)


class _Fatal(Exception):
    """Parsing cannot continue after this problem."""


class _Reader:
    """Recursive descent parser; `_at` is the offset of the next character."""

    def __init__(self, text: str, name: str, comments: bool):
        self.text = text
        self.name = name
        self.comments = comments
        self.problems: list[Problem] = []
        self.keys: dict[Key, str] = {}
        self.values: dict[Key, str] = {}
        self._at = 0
        self._line_starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def document(self) -> Any:
        try:
            if self.text.startswith("\ufeff"):
                self._fatal("starts with a byte order mark; save it as UTF-8 without one", ())
            value = self._value((), 1)
            self._skip()
            if self._at < len(self.text):
                self._fatal("has text after the end of the document", ())
            return value
        except _Fatal:
            return None

    def _value(self, key: Key, depth: int) -> Any:
        self._skip()
        self.values[key] = self._where()
        if depth > MAX_DEPTH:
            self._fatal(f"is nested deeper than {MAX_DEPTH} levels", key)
        head = self.text[self._at : self._at + 1]
        if head == "{":
            return self._object(key, depth)
        if head == "[":
            return self._array(key, depth)
        if head == '"':
            return self._string(key)
        number = _NUMBER.match(self.text, self._at)
        word = _WORD.match(self.text, self._at)
        if number and word and number.end() == word.end():
            return self._number(number, key)
        if word and word[0] in _LITERALS:
            self._at = word.end()
            return _LITERALS[word[0]]
        if word and word[0] in _NEVER_JSON:
            self._note(f"{word[0]} is not a JSON number; write a finite one", key)
            self._at = word.end()
            return 0.0
        start = word[0] if word else head
        found = repr(start) if head else "the end of the file"
        self._fatal(f"expected a value, found {found}{_hint(start)}", key)

    def _object(self, key: Key, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self._at += 1
        while not self._closes("}", "key", bool(result), key):
            position = self._where()
            if self.text[self._at : self._at + 1] != '"':
                self._fatal("expected a key in double quotes", key)
            name = self._string(key)
            child = (*key, name)
            duplicate = name in result
            if duplicate:
                self._note(f"is given twice; it was already set at {self.keys[child]}", child, position)
            else:
                self.keys[child] = position
            self._skip()
            if self.text[self._at : self._at + 1] != ":":
                self._fatal("expected ':' after the key", child)
            self._at += 1
            value = self._value(child, depth + 1)
            if not duplicate:
                result[name] = value
        return result

    def _array(self, key: Key, depth: int) -> list[Any]:
        result: list[Any] = []
        self._at += 1
        while not self._closes("]", "value", bool(result), key):
            result.append(self._value((*key, str(len(result))), depth + 1))
        return result

    def _closes(self, bracket: str, what: str, some: bool, key: Key) -> bool:
        """Skip the separator before the next item; return True if the container ends instead."""
        self._skip()
        if self.text[self._at : self._at + 1] == bracket:
            self._at += 1
            return True
        if some:
            comma = self._at
            if self.text[self._at : self._at + 1] != ",":
                self._fatal(f"expected ',' or '{bracket}'", key)
            self._at += 1
            self._skip()
            if self.text[self._at : self._at + 1] == bracket:
                if not self.comments:
                    self._note(f"trailing comma; remove it or add the missing {what}", key, self._where(comma))
                self._at += 1
                return True
        return False

    def _string(self, key: Key) -> str:
        position = self._where()
        try:
            value, self._at = scanstring(self.text, self._at + 1, True)
        except JSONDecodeError as error:
            self._at = error.pos
            reason = error.msg.lower().removesuffix(" at").removesuffix(" starting")
            self._fatal(f"bad string: {reason}", key)
        text = value.encode("utf-8", "replace").decode("utf-8")
        if text != value:
            self._note("half of a surrogate pair is not a character", key, position)
        return text

    def _number(self, match: re.Match[str], key: Key) -> int | float:
        token = match[0]
        if match[1] is None and match[2] is None:
            # checked by length first: int() of a very long literal is slow
            if len(token) > 20 or not MIN_INT <= int(token) <= MAX_INT:
                self._note("integer does not fit into 64 bits", key)
                token = "0"
            value: int | float = int(token)
        else:
            value = float(token)
            if value in (float("inf"), float("-inf")):
                self._note(f"{token} is too large for a number", key)
        self._at = match.end()
        return value

    def _skip(self) -> None:
        match = _SPACE.match(self.text, self._at)
        while match is not None:
            self._at = match.end()
            comment = None
            if self.comments:
                comment = _COMMENT.match(self.text, self._at)
            match = None
            if comment is not None:
                match = _SPACE.match(self.text, comment.end())
        if self.text.startswith(("//", "/*", "#"), self._at):
            if not self.comments:
                self._fatal("JSON has no comments; name the file .jsonc, or write YAML into a .yaml", ())
            found = self.text[self._at : self._at + 2]
            message = "comments of JSONC are // and /* */"
            if found == "/*":
                message = "starts a comment that does not end"
            self._fatal(message, ())

    def _where(self, at: int | None = None) -> str:
        at = self._at if at is None else at
        line = bisect.bisect_right(self._line_starts, at)
        return f"{self.name}:{line}:{at - self._line_starts[line - 1] + 1}"

    def _note(self, message: str, key: Key, where: str | None = None) -> None:
        self.problems.append(Problem(where or self._where(), ".".join(key), message))

    def _fatal(self, message: str, key: Key) -> Any:
        self._note(message, key)
        raise _Fatal


def _hint(word: str) -> str:
    """Return a hint for a word that is not a JSON value."""
    meant = {"True": "true", "False": "false", "None": "null"}.get(word)
    if meant:
        return f"; write {meant}"
    if re.match(r"[-+.0-9]", word):
        return "; numbers look like 10, -0.5 or 1e-6"
    if word[:1] == "'" or word[:1].isalpha():
        return "; strings need double quotes"
    return ""
