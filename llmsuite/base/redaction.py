"""The filter of all text that is printed or recorded: it removes secrets and terminal control characters.

A secret is found in two ways. In a URL it is found by its position: a password, a value of a query, a fragment.
Elsewhere it is known by its value: `Secrets` has the values from URLs, options and environment variables of this
process, so that they are also removed from messages of libraries.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import IO, Any, TextIO

_URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]{0,31})://(?:(?P<user>[^\s/?#@\"'<>]*)@)?(?P<rest>[^\s?#\"'<>]*)(?P<more>[?#][^\s\"'<>]*)?"
)
"""The scheme is of a limited length: it is searched from each character of a text."""
_PART = re.compile(r"(?P<mark>[?#&;])(?:(?P<name>[^?&#;=]*)=)?(?P<value>[^?&#;]+)")
"""A value of a query or a fragment; one without a name may be a key itself."""
_PLAIN = ("split", "config", "revision", "rows")
"""Query options of data sets, which are no secrets."""
_OPTION = re.compile(r"(?i)(--[\w.-]*(?:api[_-]?key|token|secret|password)=)(.+)", re.DOTALL)
_WORD = re.compile(r"[^\s\"'<>]+")
_PATH = re.compile(r"(?<![\w:/])/")
"""The begin of a URL without its host, as libraries quote it: "Max retries exceeded with url: /a.jsonl?token=…"."""
_VARIABLE = re.compile(
    r"(?i)(?:^|_)(?:\w*keys?|\w*token|secrets?|\w*password|passwd|sshpass|passphrase|pat|auth|credentials?)(?:_\d+|_list)?$"
    r"|_pwd$"
)
_KEY = re.compile(r"(?i)(?:^|[_.-])(?:api[_-]?key|access[_-]?key|secret(?:_key)?|passw(?:or)?d|passphrase)$")
"""A key of JSON data whose text is a secret."""
_PARAMETER = re.compile(r"(?i)key|token|sig|secret|passw|credential|auth|code")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w%~+=-]{16,}")
"""A value that looks like a key, with any name of its parameter."""
_HIDDEN = "***"
_AFTER_URL = tuple(" \t\r\n\"'<>")
"""Characters that end a URL."""
_MAX_URL_CHARS = 1 << 16
"""Characters of a URL that are held until its end is written."""
_MAX_SHOWN_CHARS = 3
"""Characters of the begin of a secret that may be shown when a stream is flushed."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Secrets:
    """The values of the secrets of this process. Forks inherit them."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._compiled: re.Pattern[str] | None = None
        """Finds the values; None where they have changed since, or there are none."""
        self._by_first: dict[str, list[str]] = {}
        """The values that begin with a character."""
        self._longest = 0
        """Characters of the longest value."""

    def add(self, value: str) -> None:
        """Add a secret, in its plain and quoted forms. A word of less than 6 letters, or of less than 8 lower-case
        ones, is ignored: it would occur in common text."""
        forms = {
            value,
            value.strip(),
            urllib.parse.quote(value, safe="", errors="surrogateescape"),
            urllib.parse.unquote(value),
            json.dumps(value)[1:-1],
            repr(value)[1:-1],
            *map(_escaped, value.splitlines()),
        }
        new = {form for form in forms if _is_long(form)} - self._values
        if new:
            self._values |= new
            self._compiled = None
            self._longest = max(self._longest, *map(len, new))
            for form in new:
                self._by_first.setdefault(form[0], []).append(form)

    @property
    def _pattern(self) -> re.Pattern[str] | None:
        """A pattern of all values, compiled when it is needed: many may be added at once."""
        if self._compiled is None and self._values:
            longest_first = sorted(self._values, key=len, reverse=True)
            self._compiled = re.compile("|".join(map(re.escape, longest_first)))
        return self._compiled

    def add_url(self, url: str) -> None:
        """Add the secrets in the URLs of a text."""
        if "://" not in url:  # most texts
            return
        for found in _URL.finditer(url):
            user, colon, password = (found["user"] or "").partition(":")
            self.add(password if colon else user)
            if colon:  # the header of basic authentication
                self.add(
                    base64.b64encode(urllib.parse.unquote(found["user"]).encode("utf-8", "surrogateescape")).decode()
                )
            for part in _PART.finditer(found["more"] or ""):
                name = part["name"]
                value = part["value"]
                if part["mark"] == "#" or name is None or _PARAMETER.search(name) or _RANDOM.fullmatch(value):
                    self.add(value)

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Add the values of variables with names of keys, tokens and passwords, except paths of files, and the secrets
        in the URLs of all variables."""
        for name, value in variables.items():
            self.add_url(value)
            if _VARIABLE.search(name) and not (value.startswith(("/", "~", "./")) and os.path.lexists(value)):
                self.add(value)

    def add_words(self, words: Iterable[str]) -> None:
        """Add the secrets of a command line: those in URLs, and the values of options such as --api_key."""
        next_is_secret = False
        for word in words:
            self.add_url(word)
            found = _OPTION.fullmatch(word)
            if next_is_secret or found is not None:
                self.add(word if found is None else found[2])
            next_is_secret = _is_secret_option(word)

    def add_data(self, data: Any) -> None:
        """Add the secrets in JSON data such as a recipe: those in URLs, and strings of keys such as `api_key`."""
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

    def redact(self, text: str) -> str:
        """A text with the added values replaced by `***`."""
        pattern = self._pattern
        return text if pattern is None else pattern.sub(_HIDDEN, text)

    def unfinished(self, text: str) -> int:
        """The index from which on the end of a text may be the begin of an added value; the length of the text if it is
        not."""
        for i in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[i:]
            if any(len(value) > len(end) and value.startswith(end) for value in self._by_first.get(text[i], ())):
                return self.outside(text, i)
        return len(text)

    def outside(self, text: str, index: int) -> int:
        """The index, or the begin of the added value that it is within."""
        pattern = self._pattern
        if pattern is None:
            return index
        for found in pattern.finditer(text):
            if found.start() < index < found.end():
                return found.start()
        return index


SECRETS = Secrets()
"""The secrets of this process."""


def _is_long(value: str) -> bool:
    return len(value) >= 8 or (len(value) >= 6 and not (value.isalpha() and value.islower()))


def _escaped(value: str) -> str:
    """A value as in JSON and in Python's repr."""
    return value.encode("unicode_escape").decode("ascii")


def _is_secret_option(word: str) -> bool:
    return "=" not in word and _OPTION.fullmatch(word + "=x") is not None


def redacted(text: str) -> str:
    """A text without the secrets of this process, and without passwords and values of queries and fragments (which may
    be signatures) in its URLs."""

    def url(found: re.Match[str]) -> str:
        user = f"{_HIDDEN}@" if found["user"] else ""
        return f"{found['scheme']}://{user}{found['rest']}{_PART.sub(value, found['more'] or '')}"

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        if name in _PLAIN and found["mark"] != "#":
            return found[0]
        return found["mark"] + ("" if name is None else f"{name}=") + _HIDDEN

    def word(found: re.Match[str]) -> str:
        before, mark, more = found[0].partition("?")
        if "=" not in more or _PATH.search(before.rpartition("#")[2]) is None:
            return found[0]
        return before + _PART.sub(value, mark + more)

    text = SECRETS.redact(text)
    if "://" in text:
        text = _URL.sub(url, text)
    return _WORD.sub(word, text) if "?" in text else text


def unfinished(text: str) -> int:
    """The index from which on the end of a text may be a part of a secret, or of a URL, that is continued."""
    begin = SECRETS.unfinished(text)
    word = max(map(text.rfind, _AFTER_URL)) + 1
    at = text.find("://", word)
    if at >= 0 and len(text) - at < _MAX_URL_CHARS:
        while at > word and (text[at - 1].isalnum() or text[at - 1] in "_+.-"):
            at -= 1
        begin = min(begin, at)
    return SECRETS.outside(text, begin)


@dataclasses.dataclass(frozen=True, repr=False)
class Url:
    """The URL of remote data, which may have secrets. `str` of it is `redacted`."""

    full: str
    """The URL with its secrets, to be opened."""

    def __post_init__(self) -> None:
        SECRETS.add_url(self.full)  # a library that opens it may quote its parts

    def __str__(self) -> str:
        return redacted(self.full)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def name(self) -> str:
        """The last part of its path."""
        return urllib.parse.urlsplit(self.full).path.rpartition("/")[2]


def redacted_words(words: list[str]) -> list[str]:
    """The words of a command line without secrets, values of options such as --api_key included."""
    redact = []
    next_is_secret = False
    for word in words:
        redact.append(_HIDDEN if next_is_secret else _OPTION.sub(rf"\g<1>{_HIDDEN}", redacted(word)))
        next_is_secret = _is_secret_option(word)
    return redact


def redacted_data(data: Any) -> Any:
    """JSON data with all strings `redacted`, and those of keys such as `api_key` replaced by `***`."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, dict):
        return {
            redacted(str(key)): _HIDDEN if _is_secret(key, value) else redacted_data(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [redacted_data(value) for value in data]
    return data


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _KEY.search(str(key)) is not None


class FilteredStream(io.TextIOWrapper):
    """A text stream without the secrets of this process, also where a secret is written in several parts.

    The end of a text that may be the begin of a secret is held until the next text, or the end of the stream, shows
    what it is.
    """

    def __init__(self, stream: IO[bytes], hides_urls: bool, **options: Any):
        """
        Args:
            stream: to write to.
            hides_urls: True to hide passwords and values in all URLs, as `redacted`; False for a stream of results, in
                which only secrets that are known by value are hidden.
            options: of TextIOWrapper.
        """
        super().__init__(stream, **options)
        self._redact_text = SECRETS.redact
        self._unfinished = SECRETS.unfinished
        if hides_urls:
            self._redact_text = redacted
            self._unfinished = unfinished
        self._held = ""
        self._shown = ""
        """The begin of the held text that is written already."""

    def write(self, text: str) -> int:
        whole = self._held + text
        shown = self._shown
        end = self._unfinished(whole)
        self._held = whole[end:]
        self._shown = shown[end:]
        if end > len(shown):
            super().write(self._redact_text(whole[:end]).removeprefix(shown))
        return len(text)

    def flush(self) -> None:
        # a few characters, such as those of a word that is printed in parts, tell nothing of a secret
        if self._held and not self._shown and len(self._held) <= _MAX_SHOWN_CHARS:
            self._shown = self._held
            super().write(self._held)
        super().flush()

    def close(self) -> None:
        if self._held and not self._shown and not self.closed:
            held, self._held = self._held, ""
            text = self._redact_text(held)
            begin = SECRETS.unfinished(text)
            super().write(text if begin == len(text) else text[:begin] + _HIDDEN)
        super().close()


def install_redaction(words: Iterable[str]) -> None:
    """Redact the secrets of a command line, and of this process's environment variables, in its output from here on.
    stderr is `redacted`. In stdout, which has results such as generated text, URLs stay; only secrets that are known by
    value are removed."""
    SECRETS.add_words(words)
    SECRETS.add_variables(os.environ)
    sys.stdout = _filtered(sys.stdout, hides_urls=False)
    sys.stderr = _filtered(sys.stderr, hides_urls=True)


def _filtered(stream: TextIO, hides_urls: bool) -> TextIO:
    """A filtered stream instead of a standard one; a stream that has replaced the standard one, or None, is returned
    unchanged."""
    if not isinstance(stream, io.TextIOWrapper) or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    buffering = 0 if stream.write_through else -1  # as with PYTHONUNBUFFERED
    return FilteredStream(
        open(stream.fileno(), "wb", buffering, closefd=False),
        hides_urls,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def json_type_name(value: Any) -> str:
    """The type of a JSON value, in the words of JSON rather than Python's."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    for kinds, name in ((str, "a string"), (int, "an integer"), (float, "a number"), (dict, "an object")):
        if isinstance(value, kinds):
            return name
    return "a list"


def printable(text: str) -> str:
    """A text with control characters (except newlines and tabs) escaped, as a terminal would obey some of them; and
    with halves of surrogate pairs escaped, as they cannot be encoded."""

    def written(found: re.Match[str]) -> str:
        number = ord(found[0])
        return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"

    return _CONTROL.sub(written, text)
