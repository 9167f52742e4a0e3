"""Text of strangers that is shown or recorded: without secrets of URLs, and without what drives a terminal."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from typing import Any

_URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#@\"'<>]*)@)?(?P<rest>[^\s?#\"'<>]*)(?P<more>[?#][^\s\"'<>]*)?"
)
_PART = re.compile(r"(?P<mark>[?#&;])(?:(?P<name>[^?&#;=]*)=)?(?P<value>[^?&#;]+)")
"""A value of a query or a fragment; one without a name is a word that may be the key."""
_PLAIN = ("split", "config", "revision", "rows")
"""Options of data sets, which are no secrets."""
_OPTION = re.compile(r"(?i)(--[\w.-]*(?:api_?key|token|secret|password)=)(.+)", re.DOTALL)
_HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def redacted(text: str) -> str:
    """A text whose URLs have neither passwords nor values of queries and fragments, which may be signatures."""

    def url(found: re.Match[str]) -> str:
        user = f"{_HIDDEN}@" if found["user"] else ""
        return f"{found['scheme']}://{user}{found['rest']}{_PART.sub(value, found['more'] or '')}"

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        if name in _PLAIN and found["mark"] != "#":
            return found[0]
        return found["mark"] + ("" if name is None else f"{name}=") + _HIDDEN

    return _URL.sub(url, text) if "://" in text else text


@dataclasses.dataclass(frozen=True, repr=False)
class Url:
    """The address of remote data, which may have secrets. As a text it is `redacted`."""

    whole: str
    """The address as it was given, to be opened."""

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
        next_is_secret = _OPTION.fullmatch(word + "=x") is not None and "=" not in word
    return hidden


def redacted_data(data: Any) -> Any:
    """JSON data whose texts are `redacted`."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, dict):
        return {redacted(str(key)): redacted_data(value) for key, value in data.items()}
    return [redacted_data(value) for value in data] if isinstance(data, list | tuple) else data


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
