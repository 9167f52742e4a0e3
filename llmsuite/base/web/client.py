"""The HTTP client, for all of llmsuite's own requests to other machines.

No server is trusted. A response has a deadline for all of it and a limit of bytes. A redirect to another host is
refused (except for a file, from https to https), and no key is sent there. JSON may be nested to a limit. Errors are
`HttpFailure`s, which name the URL without its secrets.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import Url, printable, redacted
from llmsuite.base.strict_json import is_nested_deeper
from llmsuite.base.web.connection import Deadline, send

API_KEY = "LLMSUITE_API_KEY"
"""Environment variable with the API key: `llmsuite serve` requires it, and clients of llmsuite send it."""
MAX_ANSWER_BYTES = 8 << 20
"""Most bytes of an answer, unless more is expected."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects in an answer."""
_TOO_DEEP = f"answers with JSON that is nested more than {MAX_DEPTH} deep"
STALL_SECONDS = 60.0
MIN_RATE = 4096
"""Seconds that a download may stall, and the bytes per second that it needs on average."""
_MAX_ERROR_BYTES = 1 << 16
"""Most bytes that are read of an error response."""
_MAX_REDIRECTS = 5
_READ = 1 << 16
"""Bytes that are read at a time: in far less than `STALL_SECONDS`, at `MIN_RATE`."""
_CHUNK = 1 << 20
"""Bytes that are decompressed at a time."""
_SHOWN = 300
_BUSY = 429
_PORTS = {"http": 80, "https": 443}
_KEPT_IN_URLS = "%/:=&?~#+!$,;'@()*[]|"


class HttpFailure(UserError):
    """A server gives no answer, or none that is acceptable."""

    def __init__(self, url: Url, what: str, status: int | None = None, is_transient: bool = False):
        """
        Args:
            url: of the request.
            what: the error.
            status: of the response, if it is an error.
            is_transient: another attempt may succeed.
        """
        super().__init__(f"{url}: {what}")
        self.what = what
        self.status = status
        self.is_transient = is_transient


class Answer:
    """A response whose content is still to be read."""

    def __init__(self, url: Url, response: http.client.HTTPResponse, deadline: Deadline):
        self.url = url
        self.headers = response.headers
        self._response = response
        self._deadline = deadline

    def chunks(self, most: int) -> Iterator[bytes]:
        """Yield the content in chunks, decompressed where the server has compressed it.

        Raises:
            HttpFailure: it has more than `most` bytes, breaks off, or arrives too slowly.
        """
        length = self._response.length
        if length is not None and length > most:
            raise HttpFailure(self.url, f"answers with {length:,} bytes; at most {most:,} are taken")
        left = most
        for piece in self._decoded():
            left -= len(piece)
            if left < 0:
                raise HttpFailure(self.url, f"answers with more than {most:,} bytes")
            yield piece

    def _decoded(self) -> Iterator[bytes]:
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            yield from self._pieces()
        elif encoding in ("gzip", "x-gzip"):
            yield from self._unpacked()
        else:
            raise HttpFailure(self.url, f"answers with Content-Encoding {encoding!r}, which was not requested")

    def _unpacked(self) -> Iterator[bytes]:
        packed = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            for piece in self._pieces():
                unpacked = packed.decompress(piece, _CHUNK)  # bounded memory for any compression ratio
                yield unpacked
                while packed.unconsumed_tail or len(unpacked) == _CHUNK:
                    unpacked = packed.decompress(packed.unconsumed_tail, _CHUNK)
                    yield unpacked
        except zlib.error as error:
            raise HttpFailure(self.url, f"its answer cannot be unpacked: {error}") from error
        if packed.unused_data:
            raise HttpFailure(self.url, "its answer cannot be unpacked: there is more after its end")
        if not packed.eof:
            raise HttpFailure(self.url, "its answer breaks off", is_transient=True)

    def _pieces(self) -> Iterator[bytes]:
        while piece := self._read(_READ):
            self._deadline.extend(len(piece))
            yield piece
        if missing := self._response.length:
            raise HttpFailure(self.url, f"its answer breaks off; bytes missing: {missing:,}", is_transient=True)

    def _read(self, most: int) -> bytes:
        with _explained(self.url, self._deadline):
            return self._response.read(most)

    def check_status(self) -> None:
        """Raise HttpFailure for an error response, with the beginning of its text."""
        status = self._response.status
        content = b""
        if 200 <= status < 300:
            return
        with contextlib.suppress(HttpFailure):
            content = self._read(_MAX_ERROR_BYTES)
        is_transient = status == _BUSY or status >= 500
        raise HttpFailure(self.url, f"answers {status}: {_message(self.url, content)}", status, is_transient)


def post_json(url: Url, body: Any, seconds: float, most: int = MAX_ANSWER_BYTES, key: str | None = None) -> Any:
    """Post JSON data. Returns the JSON data of the response.

    Args:
        url: of the request. No redirect is followed.
        body: JSON data to send.
        seconds: from the first attempt to connect to the last byte of the response.
        most: largest size of the response in bytes.
        key: sent as a bearer token.

    Raises:
        HttpFailure: there is no such response.
    """
    deadline = Deadline(seconds)
    request = _request(url, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    request.add_header("Content-Type", "application/json")
    if key:
        if not (key.isascii() and key.isprintable()):
            raise HttpFailure(url, "its key has a line break, or another character that no key has")
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    with _sent(url, request, deadline) as response:
        if place := _redirect(url, response):
            raise HttpFailure(url, f"redirects to {place}, which is not followed; name that address")
        answer = Answer(url, response, deadline)
        answer.check_status()
        return json_of(url, b"".join(answer.chunks(most)))


@contextlib.contextmanager
def get(url: Url) -> Iterator[Answer]:
    """Download a file. Its content has to arrive at `MIN_RATE` at least, and must not stall for `STALL_SECONDS`.

    Redirects are followed on the same host, and from https to any host with https, as public hubs redirect to their
    storage; a user and password in the URL are sent to its own host only.

    Raises:
        HttpFailure: the file cannot be downloaded.
    """
    deadline = Deadline(STALL_SECONDS, MIN_RATE)
    at = url
    with contextlib.ExitStack() as stack:
        for _ in range(_MAX_REDIRECTS + 1):
            response = stack.enter_context(_sent(at, _request(at), deadline))
            place = _redirect(at, response)
            if place is None:
                answer = Answer(at, response, deadline)
                answer.check_status()
                yield answer
                return
            response.close()
            _check_redirect(at, place)
            at = place
    raise HttpFailure(url, f"redirects more than {_MAX_REDIRECTS} times")


def json_of(url: Url, data: bytes) -> Any:
    """The JSON data of an answer. Raises HttpFailure where it is no JSON, or nested too deeply."""
    try:
        # NaN is accepted, as the rest of an answer may be valid: readers of numbers check them
        found = json.loads(data.decode())
    except RecursionError as error:
        raise HttpFailure(url, _TOO_DEEP) from error
    except ValueError as error:
        raise HttpFailure(url, f"answers with no JSON: {shortened(data.decode('utf-8', 'replace'))}") from error
    if is_nested_deeper(found, MAX_DEPTH):
        raise HttpFailure(url, _TOO_DEEP)
    return found


def shortened(answer: Any) -> str:
    """The beginning of an answer, for a message, without control characters."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    text = redacted(text)  # before it is cut: the begin of a key is not known as one
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return printable(text.encode("utf-8", "backslashreplace").decode())  # JSON may have halves of surrogate pairs


# requests


def _request(url: Url, data: bytes | None = None) -> urllib.request.Request:
    """A request, with the user and password of the URL. Raises HttpFailure for a URL that is not of HTTP."""
    parts = _parts(url)
    user, _, place = parts.netloc.rpartition("@")
    try:
        host = place.encode("idna").decode()
    except UnicodeError as error:
        raise HttpFailure(url, "is no address: its host is none") from error
    path = quote(parts.path or "/", safe=_KEPT_IN_URLS)
    query = quote(parts.query, safe=_KEPT_IN_URLS)
    plain = urlunsplit((parts.scheme, host, path, query, ""))
    request = urllib.request.Request(plain, data, {"User-Agent": "llmsuite"})
    if user:
        basic = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    return request


def _parts(url: Url) -> SplitResult:
    """The parts of a URL. Raises HttpFailure for a URL that is not of HTTP."""
    try:
        parts = urlsplit(url.full)
        is_valid = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not chained: its text may contain a part of a password
        is_valid = False
    if not is_valid:
        raise HttpFailure(url, "is no address; one begins with http://HOST or https://HOST")
    return parts


@contextlib.contextmanager
def _sent(url: Url, request: urllib.request.Request, deadline: Deadline) -> Iterator[http.client.HTTPResponse]:
    """The response to a request, of any status."""
    with _explained(url, deadline):
        response = send(request, deadline)
    with response:
        yield response


@contextlib.contextmanager
def _explained(url: Url, deadline: Deadline) -> Iterator[None]:
    """Convert errors of a connection to HttpFailure."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a chunk of a negative size
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError) and reason.errno is None:
            raise HttpFailure(url, deadline.message, is_transient=True) from error
        text = str(reason) if isinstance(reason, (OSError, str)) else repr(reason)
        raise HttpFailure(url, shortened(text), is_transient=True) from error


def _redirect(url: Url, response: http.client.HTTPResponse) -> Url | None:
    """The target of a redirect; None for another response. Raises HttpFailure where the target is no URL."""
    place = response.headers.get("Location")
    if place is None or response.status not in (301, 302, 303, 307, 308):
        return None
    try:
        return Url(urljoin(url.full, place))
    except ValueError as error:
        raise HttpFailure(url, f"redirects to no address: {error}") from error


def _check_redirect(url: Url, to: Url) -> None:
    """Raise HttpFailure where a redirect of a file to another URL is not allowed."""
    old = _parts(url)
    try:
        new = _parts(to)
    except HttpFailure as error:
        raise HttpFailure(url, f"redirects to {to}, which {error.what}") from error
    to_same = _host(old) == _host(new) or (old.hostname == new.hostname and _upgrades(old, new))
    if not to_same and not old.scheme == new.scheme == "https":
        raise HttpFailure(
            url, f"redirects to {to}, another host or one without https, which is not followed; name that address"
        )


def _host(parts: SplitResult) -> tuple[str, str | None, int]:
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


def _upgrades(old: SplitResult, new: SplitResult) -> bool:
    """True for a redirect from the standard port of http to that of https."""
    return _host(old)[::2] == ("http", _PORTS["http"]) and _host(new)[::2] == ("https", _PORTS["https"])


def _message(url: Url, content: bytes) -> str:
    """The message of an error response, in OpenAI's form or any other."""
    try:
        return shortened(json_of(url, content)["error"]["message"])
    except (HttpFailure, TypeError, KeyError, IndexError):
        return shortened(content.decode("utf-8", "replace"))
