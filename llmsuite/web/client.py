"""The HTTP client: whatever llmsuite itself asks another machine over HTTP goes through here.

No server is trusted. An answer has a deadline as a whole and a limit of bytes. A redirect leads to no other host (but
that of a file may, from https to https), and no key goes along. JSON may be nested to a limit. What fails is an
`HttpFailure`, which names the address without its secrets.
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

from llmsuite.errors import UserError
from llmsuite.shown import Url, printable
from llmsuite.strict_json import is_deeper
from llmsuite.web.connection import Deadline, send

API_KEY = "LLMSUITE_API_KEY"
"""Variable with the key of servers: `llmsuite serve` asks for it, and what asks servers has it along."""
MOST_ANSWER = 8 << 20
"""Bytes of an answer, unless more is expected."""
MOST_DEPTH = 64
"""Lists and objects in each other in an answer."""
_TOO_DEEP = f"answers with JSON that is nested more than {MOST_DEPTH} deep"
PATIENCE, LEAST_RATE = 60.0, 4096
"""Seconds that a file may stand still, and bytes a second that have to come of it on average."""
_MOST_SAID = 1 << 16
"""Bytes that are read of an answer that is an error."""
_MOST_REDIRECTS = 5
_READ = 1 << 16
"""Bytes that are read at a time: in far less than `PATIENCE`, at the least rate."""
_CHUNK = 1 << 20
"""Bytes that are unpacked at a time."""
_SHOWN = 300
_BUSY = 429
_PORTS = {"http": 80, "https": 443}
_KEPT_IN_URLS = "%/:=&?~#+!$,;'@()*[]|"


class HttpFailure(UserError):
    """A server gives no answer, or none that may be taken."""

    def __init__(self, url: Url, what: str, status: int | None = None, may_pass: bool = False):
        """
        Args:
            url: that was asked.
            what: is wrong with the answer.
            status: of the answer, if it is an error.
            may_pass: whether another try may succeed.
        """
        super().__init__(f"{url}: {what}")
        self.what, self.status, self.may_pass = what, status, may_pass


class Answer:
    """A file that a server has begun to send."""

    def __init__(self, url: Url, response: http.client.HTTPResponse, deadline: Deadline):
        self.url, self.headers = url, response.headers
        self._response, self._deadline = response, deadline

    def chunks(self, most: int) -> Iterator[bytes]:
        """The content, piece by piece; what was compressed for the way is unpacked.

        Raises:
            HttpFailure: it has more than `most` bytes, breaks off, or comes too slowly.
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
            raise HttpFailure(self.url, f"answers with Content-Encoding {encoding!r}, which was not asked for")

    def _unpacked(self) -> Iterator[bytes]:
        packed = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            for piece in self._pieces():
                unpacked = packed.decompress(piece, _CHUNK)  # so much at a time, whatever it unpacks to
                yield unpacked
                while packed.unconsumed_tail or len(unpacked) == _CHUNK:
                    unpacked = packed.decompress(packed.unconsumed_tail, _CHUNK)
                    yield unpacked
        except zlib.error as error:
            raise HttpFailure(self.url, f"its answer cannot be unpacked: {error}") from error
        if packed.unused_data:
            raise HttpFailure(self.url, "its answer cannot be unpacked: there is more behind its end")
        if not packed.eof:
            raise HttpFailure(self.url, "its answer breaks off", may_pass=True)

    def _pieces(self) -> Iterator[bytes]:
        while piece := self._read(_READ):
            self._deadline.came(len(piece))
            yield piece
        if missing := self._response.length:
            raise HttpFailure(self.url, f"its answer breaks off; bytes missing: {missing:,}", may_pass=True)

    def _read(self, most: int) -> bytes:
        with _explained(self.url, self._deadline):
            return self._response.read(most)

    def check_status(self) -> None:
        """Raises HttpFailure for an answer that is an error, with the beginning of what it says."""
        status, said = self._response.status, b""
        if 200 <= status < 300:
            return
        with contextlib.suppress(HttpFailure):
            said = self._read(_MOST_SAID)
        may_pass = status == _BUSY or status >= 500
        raise HttpFailure(self.url, f"answers {status}: {_message(self.url, said)}", status, may_pass)


def post_json(url: Url, body: Any, seconds: float, most: int = MOST_ANSWER, key: str | None = None) -> Any:
    """The answer to JSON data, as JSON data.

    Args:
        url: to send it to. No redirect is followed.
        body: to send.
        seconds: from the first attempt to connect to the last byte of the answer.
        most: bytes of the answer.
        key: goes along as a bearer token.

    Raises:
        HttpFailure: there is no such answer.
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
    """A file, whose content has to come at `LEAST_RATE` at least, and never to stand still for `PATIENCE`.

    Redirects are followed on the same host, and from https to any host with https, as public hubs lead to their stores;
    a user and password in the address go to its own host only.

    Raises:
        HttpFailure: there is none.
    """
    deadline, at = Deadline(PATIENCE, LEAST_RATE), url
    with contextlib.ExitStack() as stack:
        for _ in range(_MOST_REDIRECTS + 1):
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
    raise HttpFailure(url, f"redirects more than {_MOST_REDIRECTS} times")


def json_of(url: Url, data: bytes) -> Any:
    """The JSON data of an answer. Raises HttpFailure where it is none, or too deep."""
    try:
        # NaN is read, as the rest of an answer may be good: whoever reads a number checks it
        found = json.loads(data.decode())
    except RecursionError as error:
        raise HttpFailure(url, _TOO_DEEP) from error
    except ValueError as error:
        raise HttpFailure(url, f"answers with no JSON: {shortened(data.decode('utf-8', 'replace'))}") from error
    if is_deeper(found, MOST_DEPTH):
        raise HttpFailure(url, _TOO_DEEP)
    return found


def shortened(answer: Any) -> str:
    """The beginning of an answer, for a message: no terminal obeys it."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return printable(text.encode("utf-8", "backslashreplace").decode())  # JSON may have halves of characters


# requests


def _request(url: Url, data: bytes | None = None) -> urllib.request.Request:
    """A request, with the user and the password that the address has. Raises HttpFailure where it is none of HTTP."""
    parts = _parts(url)
    user, _, place = parts.netloc.rpartition("@")
    try:
        host = place.encode("idna").decode()
    except UnicodeError as error:
        raise HttpFailure(url, "is no address: its host is none") from error
    path, query = (quote(part, safe=_KEPT_IN_URLS) for part in (parts.path or "/", parts.query))
    plain = urlunsplit((parts.scheme, host, path, query, ""))
    request = urllib.request.Request(plain, data, {"User-Agent": "llmsuite"})
    if user:
        basic = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    return request


def _parts(url: Url) -> SplitResult:
    """The parts of an address. Raises HttpFailure where it is none of HTTP."""
    try:
        parts = urlsplit(url.whole)
        is_one = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # whose text may have a part of a password
        is_one = False
    if not is_one:
        raise HttpFailure(url, "is no address; one begins with http://HOST or https://HOST")
    return parts


@contextlib.contextmanager
def _sent(url: Url, request: urllib.request.Request, deadline: Deadline) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, whatever its status."""
    with _explained(url, deadline):
        response = send(request, deadline)
    with response:
        yield response


@contextlib.contextmanager
def _explained(url: Url, deadline: Deadline) -> Iterator[None]:
    """Raises what goes wrong with a connection as HttpFailure."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError) and reason.errno is None:
            raise HttpFailure(url, deadline.missed, may_pass=True) from error
        text = str(reason) if isinstance(reason, (OSError, str)) else repr(reason)
        raise HttpFailure(url, shortened(text), may_pass=True) from error


def _redirect(url: Url, response: http.client.HTTPResponse) -> Url | None:
    """Where an answer leads to, if it does. Raises HttpFailure where that is no address."""
    place = response.headers.get("Location")
    if place is None or response.status not in (301, 302, 303, 307, 308):
        return None
    try:
        return Url(urljoin(url.whole, place))
    except ValueError as error:
        raise HttpFailure(url, f"redirects to no address: {error}") from error


def _check_redirect(url: Url, to: Url) -> None:
    """Raises HttpFailure where a file may not come from another address."""
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
    """Whether the ports are those of http, and then of https."""
    return _host(old)[::2] == ("http", _PORTS["http"]) and _host(new)[::2] == ("https", _PORTS["https"])


def _message(url: Url, said: bytes) -> str:
    """The text of an error, in OpenAI's form or any other."""
    try:
        return shortened(json_of(url, said)["error"]["message"])
    except (HttpFailure, TypeError, KeyError, IndexError):
        return shortened(said.decode("utf-8", "replace"))
