"""A YAML parser with positions. It accepts what YAML 1.1 and 1.2 read alike, and numbers such as 1e-4.

PyYAML reads YAML 1.1: `no` is false, `010` is 8, `1:30` is 90 and `1e-4` is text; YAML 1.2 reads them differently.
Here PyYAML only finds words and their positions; the tables below define what a word means. Anchors, tags and several
documents are rejected: with anchors, a short untrusted file can expand to gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from llmsuite.base.errors import Problem, RecipeError
from llmsuite.recipe.source import MAX_DEPTH, MAX_INT, MIN_INT, Key, Source

_WORDS: dict[str, Any] = {"": None, "~": None}
_WORDS |= dict.fromkeys(("null", "Null", "NULL")) | dict.fromkeys(("true", "True", "TRUE"), True)
_WORDS |= dict.fromkeys(("false", "False", "FALSE"), False)
_TRUTH = {"yes": True, "on": True, "no": False, "off": False}
"""Words that are booleans in YAML 1.1 only; also written Yes or YES."""
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TWO_MEANINGS = re.compile(
    r"[-+]?(0[0-9_]+|0[box][0-9a-fA-F_]+|[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?)"
)
"""Octal, hexadecimal and sexagesimal numbers, and those with underscores."""


def parse_yaml(text: str, name: str, yaml_1_1: bool = False) -> Source:
    """Parse YAML text.

    Args:
        text: one document.
        name: name of the file, for positions.
        yaml_1_1: True to read yes, no, on and off as booleans, like programs that read YAML 1.1; else they are errors.

    Raises:
        RecipeError: the text is not YAML, or uses a rejected feature; each problem with line and column.
    """
    reader = _Reader(text, name, yaml_1_1)
    value = reader.document()
    if reader.problems:
        raise RecipeError(reader.problems)
    return Source(name, value, reader.keys, reader.values)


class _Fatal(Exception):
    """Parsing cannot continue after this problem."""


class _Reader:
    """Recursive descent parser over the events of PyYAML."""

    def __init__(self, text: str, name: str, yaml_1_1: bool):
        self.name = name
        self.yaml_1_1 = yaml_1_1
        self.has_mark = text.startswith("\ufeff")
        self.problems: list[Problem] = []
        self.keys: dict[Key, str] = {}
        self.values: dict[Key, str] = {}
        self._events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)

    def document(self) -> Any:
        try:
            if self.has_mark:
                self._fatal("starts with a byte order mark; save it as UTF-8 without one", (), None)
            next(self._events)  # start of the stream
            start = next(self._events)
            if isinstance(start, yaml.StreamEndEvent):
                self._fatal("is empty", (), start)
            if start.version or start.tags:
                self._fatal("directives such as %YAML are not supported in recipes; remove them", (), start)
            value = self._value(next(self._events), (), 1)
            next(self._events)  # end of the document
            end = next(self._events)
            if not isinstance(end, yaml.StreamEndEvent):
                self._fatal("starts a second document; a recipe is one document", (), end)
            return value
        except yaml.MarkedYAMLError as error:
            self._report(error)
        except yaml.reader.ReaderError as error:
            self.problems.append(Problem(self.name, "", f"has a character that YAML forbids: {error.character!r}"))
        except _Fatal:
            pass
        return None

    def _report(self, error: yaml.MarkedYAMLError) -> None:
        message = " ".join(part for part in (error.problem, error.context) if part)
        if "'\\t'" in message:
            message += "; indent with spaces, not with tabs"
        mark = error.problem_mark or error.context_mark
        where = self._position(mark) if mark else self.name
        self.problems.append(Problem(where, "", f"is not YAML: {message}"))

    def _value(self, event: Any, key: Key, depth: int) -> Any:
        self.values[key] = self._where(event)
        if depth > MAX_DEPTH:
            self._fatal(f"is nested deeper than {MAX_DEPTH} levels", key, event)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._fatal("anchors and aliases (&a, *a) are not supported in recipes; write the value out", key, event)
        if event.tag is not None:
            self._fatal(f"tags such as {event.tag} are not supported in recipes; remove it", key, event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(key, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(item, (*key, str(len(items))), depth + 1))
            return items
        if event.style is not None:
            return self._text(event, key)
        return self._plain(event, key)

    def _mapping(self, key: Key, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
                self._fatal("expected a key, which has to be text", key, event)
            child = (*key, self._text(event, key))
            if event.value == "<<" and event.style is None:
                self._fatal("merge keys (<<) are not supported in recipes; write the keys out", key, event)
            duplicate = child[-1] in result
            if duplicate:
                self._note(f"is given twice; it was already set at {self.keys[child]}", child, event)
            else:
                self.keys[child] = self._where(event)
            value = self._value(next(self._events), child, depth + 1)
            if not duplicate:
                result[child[-1]] = value
        return result

    def _text(self, event: Any, key: Key) -> str:
        text: str = event.value.encode("utf-8", "replace").decode("utf-8")
        if text != event.value:
            self._note("half of a surrogate pair is not a character", key, event)
        return text

    def _plain(self, event: Any, key: Key) -> Any:
        """Return the value of a word without quotes."""
        word = event.value
        if word in _WORDS:
            return _WORDS[word]
        truth = None
        if word in (word.lower(), word.capitalize(), word.upper()):
            truth = _TRUTH.get(word.lower())
        if truth is not None:
            if not self.yaml_1_1:
                plain = str(truth).lower()
                self._note(f"{word} is {plain} in YAML 1.1 and text in 1.2; write {plain}, or quote it", key, event)
            return truth
        if _TWO_MEANINGS.fullmatch(word):
            message = (
                f"{word} is one number in YAML 1.1, and another or text in 1.2; write a decimal number, or quote it"
            )
            self._note(message, key, event)
            return 0
        if _INTEGER.fullmatch(word):
            # checked by length first: int() of a very long literal is slow
            if len(word) > 20 or not MIN_INT <= int(word) <= MAX_INT:
                self._note("integer does not fit into 64 bits", key, event)
                return 0
            return int(word)
        if _FLOAT.fullmatch(word) or _NOT_FINITE.fullmatch(word):
            value = float(word) if _FLOAT.fullmatch(word) else float("inf")
            if value in (float("inf"), float("-inf")):
                self._note(f"{word} is not a finite number; write a finite one", key, event)
            return value
        return self._text(event, key)

    def _where(self, event: Any) -> str:
        return self._position(event.start_mark)

    def _position(self, mark: Any) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def _note(self, message: str, key: Key, event: Any) -> None:
        where = self._where(event) if event is not None else f"{self.name}:1:1"
        self.problems.append(Problem(where, ".".join(key), message))

    def _fatal(self, message: str, key: Key, event: Any) -> Any:
        self._note(message, key, event)
        raise _Fatal
