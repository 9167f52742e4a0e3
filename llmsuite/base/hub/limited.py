"""Limits of what a hub answers, for huggingface_hub before version 1: bytes, time and redirects.

Its requests go through `requests`, whose timeout is of one read, and which reads answers of any size.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter

from llmsuite.base.web.client import MIN_RATE, STALL_SECONDS
from llmsuite.base.web.connection import Deadline

LISTING_SECONDS = 120.0
"""Time for the content of an answer that is no file."""
MAX_LISTING_BYTES = 64 << 20
"""Bytes of such an answer."""
_MAX_REDIRECTS = 5
_READ = 1 << 16
_MOST: contextvars.ContextVar[int | None] = contextvars.ContextVar("most", default=None)
"""Bytes of the file that this thread downloads; None where its size is not known."""


@contextlib.contextmanager
def file_of(size: int | None) -> Iterator[None]:
    """Context in which a file is downloaded that has `size` bytes; None where that is not known."""
    token = _MOST.set(size)
    try:
        yield
    finally:
        _MOST.reset(token)


class LimitedResponse(requests.Response):
    """A response that is read until a limit of bytes and a deadline."""

    def __init__(self, response: requests.Response, is_file: bool):
        """Take the content of another response, of which nothing was read."""
        super().__init__()
        self.__dict__.update(response.__dict__)
        self._most = _MOST.get() if is_file else MAX_LISTING_BYTES
        self._deadline = Deadline(STALL_SECONDS, MIN_RATE) if is_file else Deadline(LISTING_SECONDS)

    def iter_content(self, chunk_size: int | None = 1, decode_unicode: bool = False) -> Iterator[Any]:
        """Yield the content as it arrives. Raises RequestException beyond the limits, which the library does not
        repeat; and as `requests` where the connection breaks."""
        if decode_unicode:  # huggingface_hub reads bytes
            yield from super().iter_content(chunk_size, decode_unicode=True)
            return
        if self._content_consumed:
            yield from super().iter_content(chunk_size)
            return
        received = 0
        while piece := self._read():
            received += len(piece)
            if self._most is not None and received > self._most:
                self.close()
                raise requests.exceptions.RequestException(f"answers with more than {self._most:,} bytes")
            self._deadline.extend(len(piece))
            yield piece
        self._content_consumed = True

    def _read(self) -> bytes:
        try:
            self._deadline.left()
        except TimeoutError:
            self.close()
            raise requests.exceptions.RequestException(self._deadline.message) from None
        try:
            found: bytes = self.raw.read1(_READ, decode_content=True)
        except urllib3.exceptions.ProtocolError as error:
            raise requests.exceptions.ChunkedEncodingError(error) from error
        except urllib3.exceptions.DecodeError as error:
            raise requests.exceptions.ContentDecodingError(error) from error
        except urllib3.exceptions.ReadTimeoutError as error:
            raise requests.exceptions.ConnectionError(error) from error
        except urllib3.exceptions.SSLError as error:
            raise requests.exceptions.SSLError(error) from error
        return found


class LimitedAdapter(HTTPAdapter):
    """Sends requests, and limits what is read of their responses."""

    def send(self, request: Any, stream: bool = False, *args: Any, **kwargs: Any) -> requests.Response:
        """Return a `LimitedResponse`."""
        return LimitedResponse(super().send(request, stream, *args, **kwargs), is_file=stream)


def limited_session() -> requests.Session:
    """Return a session whose answers are limited. It sends no key to another host, as any session of `requests`."""
    session = requests.Session()
    session.max_redirects = _MAX_REDIRECTS
    for scheme in ("http://", "https://"):
        session.mount(scheme, LimitedAdapter())
    return session


@functools.cache
def limit_huggingface() -> None:
    """Let huggingface_hub use limited sessions."""
    from huggingface_hub import configure_http_backend
    from huggingface_hub.utils import _http

    has_own_backend = _http._GLOBAL_BACKEND_FACTORY is not _http._default_backend_factory
    has_read1 = int(importlib.metadata.version("urllib3").partition(".")[0]) >= 2
    if has_read1 and not has_own_backend:  # else the program around llmsuite has set its own, such as a proxy
        configure_http_backend(limited_session)
