"""The one filter of what is shown or recorded: text without secrets, and without what drives a terminal.

A secret is found in two ways. In the address of something it is told by its place: a password, a value of a query, a
fragment. Elsewhere it is known by its value: `Secrets` has those of the addresses, options and variables that this
process was given, so that a library may quote them as it likes.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, TextIO

_URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#@\"'<>]*)@)?(?P<rest>[^\s?#\"'<>]*)(?P<more>[?#][^\s\"'<>]*)?"
)
_PART = re.compile(r"(?P<mark>[?#&;])(?:(?P<name>[^?&#;=]*)=)?(?P<value>[^?&#;]+)")
"""A value of a query or a fragment; one without a name is a word that may be the key."""
_PLAIN = ("split", "config", "revision", "rows")
"""Options of data sets, which are no secrets."""
_OPTION = re.compile(r"(?i)(--[\w.-]*(?:api_?key|token|secret|password)=)(.+)", re.DOTALL)
_PATH = re.compile(r"(?<![\w:/])(?P<path>/[^\s?#\"'<>]*)(?P<more>\?[^\s\"'<>]*=[^\s\"'<>]*)")
"""An address without its host, as libraries quote it: "Max retries exceeded with url: /a.jsonl?token=…"."""
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:\w*key|token|secret|password|passwd|passphrase|pat|auth|credentials?)$")
_KEY = re.compile(r"(?i)(?:^|[_.-])(?:api_?key|access_?key|secret(?:_key)?|passw(?:or)?d|passphrase)$")
"""A key of JSON data whose text is a secret."""
_PARAMETER = re.compile(r"(?i)key|token|sig|secret|passw|credential|auth|code")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w%~+=-]{16,}")
"""A value that looks like a key, whatever its parameter is called."""
_HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Secrets:
    """The secrets that this process was given, by their values. Forks inherit them."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    def add(self, value: str) -> None:
        """Keep a value out of what is shown, as it is and as URLs quote it. A word of less than 6 letters, or of less
        than 8 lower-case ones, is no secret: it would be found in common text."""
        forms = {
            value,
            urllib.parse.quote(value, safe=""),
            urllib.parse.unquote(value),
            *map(_escaped, value.split("\n")),
        }
        new = {form for form in forms if _is_long(form)} - self._values
        if new:
            self._values |= new
            longest_first = sorted(self._values, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def add_url(self, url: str) -> None:
        """Keep out the secrets in a URL, or in each of a text with several."""
        for found in _URL.finditer(url) if "://" in url else ():
            user, colon, password = (found["user"] or "").partition(":")
            self.add(password if colon else user)
            if colon:  # the header of basic authentication
                self.add(base64.b64encode(urllib.parse.unquote(found["user"]).encode()).decode())
            for part in _PART.finditer(found["more"] or ""):
                name, value = part["name"], part["value"]
                if part["mark"] == "#" or name is None or _PARAMETER.search(name) or _RANDOM.fullmatch(value):
                    self.add(value)

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Keep out the values of variables that are called as keys, tokens and passwords are, but for names of files,
        and the secrets in URLs of any."""
        for name, value in variables.items():
            self.add_url(value)
            if _VARIABLE.search(name) and not (value.startswith(("/", "~", "./")) and os.path.lexists(value)):
                self.add(value)

    def add_words(self, words: Iterable[str]) -> None:
        """Keep out the secrets of a command line: those in URLs, and the values of options such as --api_key."""
        next_is_secret = False
        for word in words:
            self.add_url(word)
            found = _OPTION.fullmatch(word)
            if next_is_secret or found is not None:
                self.add(word if found is None else found[2])
            next_is_secret = _is_secret_option(word)

    def add_data(self, data: Any) -> None:
        """Keep out the secrets in JSON data such as a recipe: those in URLs, and texts of keys such as `api_key`."""
        if isinstance(data, str):
            self.add_url(data)
        elif isinstance(data, dict):
            for key, value in data.items():
                self.add_data(key)
                self.add_data(value)
                if _is_secret(key, value):
                    self.add(value)
        elif isinstance(data, list | tuple):
            for value in data:
                self.add_data(value)

    def hidden(self, text: str) -> str:
        """A text without the values that were added."""
        return text if self._pattern is None else self._pattern.sub(_HIDDEN, text)


SECRETS = Secrets()
"""The secrets of this process."""


def _is_long(value: str) -> bool:
    return len(value) >= 8 or (len(value) >= 6 and not (value.isalpha() and value.islower()))


def _escaped(value: str) -> str:
    """A value as JSON and Python's repr show it."""
    return value.encode("unicode_escape").decode("ascii")


def _is_secret_option(word: str) -> bool:
    return "=" not in word and _OPTION.fullmatch(word + "=x") is not None


def redacted(text: str) -> str:
    """A text without the secrets of this process. Its URLs have neither passwords nor values of queries and fragments,
    which may be signatures."""

    def url(found: re.Match[str]) -> str:
        user = f"{_HIDDEN}@" if found["user"] else ""
        return f"{found['scheme']}://{user}{found['rest']}{_PART.sub(value, found['more'] or '')}"

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        if name in _PLAIN and found["mark"] != "#":
            return found[0]
        return found["mark"] + ("" if name is None else f"{name}=") + _HIDDEN

    def path(found: re.Match[str]) -> str:
        return found["path"] + _PART.sub(value, found["more"])

    text = SECRETS.hidden(text)
    if "://" in text:
        text = _URL.sub(url, text)
    return _PATH.sub(path, text) if "?" in text else text


@dataclasses.dataclass(frozen=True, repr=False)
class Url:
    """The address of remote data, which may have secrets. As a text it is `redacted`."""

    whole: str
    """The address as it was given, to be opened."""

    def __post_init__(self) -> None:
        SECRETS.add_url(self.whole)  # whatever opens it may quote its parts

    def __str__(self) -> str:
        return redacted(self.whole)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def name(self) -> str:
        """The last part of its path."""
        return urllib.parse.urlsplit(self.whole).path.rpartition("/")[2]


def redacted_words(words: list[str]) -> list[str]:
    """The words of a command line without secrets, also those of options such as --api_key."""
    hidden, next_is_secret = [], False
    for word in words:
        hidden.append(_HIDDEN if next_is_secret else _OPTION.sub(rf"\g<1>{_HIDDEN}", redacted(word)))
        next_is_secret = _is_secret_option(word)
    return hidden


def redacted_data(data: Any) -> Any:
    """JSON data whose texts are `redacted`, and those of keys such as `api_key` hidden."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, dict):
        return {
            redacted(str(key)): _HIDDEN if _is_secret(key, value) else redacted_data(value)
            for key, value in data.items()
        }
    return [redacted_data(value) for value in data] if isinstance(data, list | tuple) else data


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _KEY.search(str(key)) is not None


class Shown(io.TextIOWrapper):
    """A stream of text that goes through a filter."""

    def __init__(self, stream: IO[bytes], shown: Callable[[str], str], **options: Any):
        """
        Args:
            stream: to write to.
            shown: what is written of a text.
            options: of TextIOWrapper.
        """
        super().__init__(stream, **options)
        self._shown = shown

    def write(self, text: str) -> int:
        super().write(self._shown(text))
        return len(text)


def hide_secrets(words: Iterable[str]) -> None:
    """Keep the secrets of a command line, and of this process's variables, out of what it prints from here on: its
    errors are `redacted`. What a user asked for, such as a text that a model has drawn, goes to the standard output and
    may have URLs; these stay, but for the secrets that are known by value."""
    SECRETS.add_words(words)
    SECRETS.add_variables(os.environ)
    sys.stdout, sys.stderr = _filtered(sys.stdout, SECRETS.hidden), _filtered(sys.stderr, redacted)


def _filtered(stream: TextIO, shown: Callable[[str], str]) -> TextIO:
    """A stream in place of one of the standard ones; another that somebody has put there, or none, is left alone."""
    if not isinstance(stream, io.TextIOWrapper) or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    buffering = 0 if stream.write_through else -1  # as with PYTHONUNBUFFERED
    return Shown(
        open(stream.fileno(), "wb", buffering, closefd=False),
        shown,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def kind_of_json(value: Any) -> str:
    """What a value of JSON is, in the words of JSON rather than Python's."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    for kinds, name in ((str, "a string"), (int, "an integer"), (float, "a number"), (dict, "an object")):
        if isinstance(value, kinds):
            return name
    return "a list"


def printable(text: str) -> str:
    """A text whose control characters but newlines and tabs are written out, as a terminal obeys some of them, and so
    are halves of surrogate pairs, as no output takes them."""

    def written(found: re.Match[str]) -> str:
        number = ord(found[0])
        return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"

    return _CONTROL.sub(written, text)
