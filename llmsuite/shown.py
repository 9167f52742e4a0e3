"""Text of strangers that is shown or recorded: without secrets of URLs, and without what drives a terminal."""

from __future__ import annotations

import re
from typing import Any

_URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#@\"'<>]*)@)?(?P<rest>[^\s?#\"'<>]*)(?P<more>[?#][^\s\"'<>]*)?"
)
_VALUE = re.compile(r"(?P<name>[^?&#=]+)=(?P<value>[^&#]*)")
_PLAIN = ("split", "config", "revision", "rows")
"""Options of data sets, which are no secrets."""
_OPTION = re.compile(r"(?i)(--[\w.-]*(?:api_?key|token|secret|password)=)(.+)", re.DOTALL)
_HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def redacted(text: str) -> str:
    """A text whose URLs have neither passwords nor values of queries, which may be signatures."""

    def url(found: re.Match[str]) -> str:
        user = f"{_HIDDEN}@" if found["user"] else ""
        more = _VALUE.sub(value, found["more"] or "")
        if more and "=" not in more:  # one word, which may be the key
            more = more[0] + _HIDDEN if len(more) > 1 else more
        return f"{found['scheme']}://{user}{found['rest']}{more}"

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        return found[0] if name in _PLAIN else f"{name}={_HIDDEN}"

    return _URL.sub(url, text) if "://" in text else text


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
    """A text whose control characters but newlines and tabs are written out: a terminal obeys some of them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
