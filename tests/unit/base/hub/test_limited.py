"""Answers of a hub that are too long, too slow, or that redirect: what huggingface_hub's library takes of them."""

from __future__ import annotations

import gzip
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from llmsuite.base.errors import UserError  # noqa: E402
from llmsuite.base.hub import download, huggingface, limited  # noqa: E402
from llmsuite.base.hub.fetch import fetch  # noqa: E402
from llmsuite.base.hub.limited import file_of, limited_session  # noqa: E402
from llmsuite.base.hub.listing import Want  # noqa: E402
from llmsuite.base.hub.names import HubName  # noqa: E402
from tests.tools.hub_server import HubServer  # noqa: E402

TEXT = bytes(range(256)) * 1000


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers /text, /packed, /endless, /cut and /redirect."""
    keys: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            if self.path == "/keys":
                self._send(repr(keys).encode())
            elif self.path == "/text":
                self._send(TEXT)
            elif self.path == "/packed":
                self._send(gzip.compress(TEXT), {"Content-Encoding": "gzip"})
            elif self.path == "/cut":
                self._send(TEXT[:1000], {"Content-Length": "5000"})
                self.close_connection = True
            elif self.path == "/redirect":
                port = self.server.server_address[1]
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{port}/text")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while True:
                    self.wfile.write(b"5\r\nhello\r\n")

        def _send(self, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: the client breaks off."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["text", "packed"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_within_the_limits_is_read_as_ever(url: str, path: str, stream: bool) -> None:
    with limited_session() as session, file_of(len(TEXT)):
        answer = session.get(f"{url}/{path}", stream=stream)
        assert b"".join(answer.iter_content(1000)) == TEXT
        if not stream:
            assert answer.content == TEXT


def test_what_is_longer_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_LISTING_BYTES", 10_000)
    with limited_session() as session:
        for path in ("text", "packed", "endless"):
            with pytest.raises(requests.exceptions.RequestException, match="more than 10,000 bytes"):
                session.get(f"{url}/{path}")
        with file_of(5000):
            answer = session.get(f"{url}/endless", stream=True)
            with pytest.raises(requests.exceptions.RequestException, match="more than 5,000 bytes"):
                list(answer.iter_content(1000))


def test_what_comes_too_slowly_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Passed(limited.Deadline):
        """A deadline that passes after some pieces."""

        count = 0

        def left(self) -> float:
            self.count += 1
            if self.count > 5:
                raise TimeoutError
            return 1.0

    monkeypatch.setattr(limited, "Deadline", Passed)
    with limited_session() as session:
        with pytest.raises(requests.exceptions.RequestException, match="not answered in full within 120 s"):
            session.get(f"{url}/endless")
        answer = session.get(f"{url}/endless", stream=True)
        with pytest.raises(requests.exceptions.RequestException, match="stalls, or sends less than"):
            list(answer.iter_content(1000))


def test_a_broken_connection_is_one_of_requests(url: str) -> None:
    with limited_session() as session, pytest.raises(requests.exceptions.ChunkedEncodingError):
        session.get(f"{url}/cut")


def test_no_key_goes_to_another_host(url: str) -> None:
    with limited_session() as session:
        assert session.get(f"{url}/redirect", headers={"Authorization": "Bearer mine"}).content == TEXT
        assert session.get(f"{url}/keys").text == "['Bearer mine', None, None]"


def test_a_file_that_is_longer_than_the_hub_has_said_is_given_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.0)
    hub.add("org/model", {"config.json": b"{}" * 50_000}, told_size={"config.json": 100})
    with pytest.raises(UserError, match="config"):
        fetch(HubName("hf", "org/model"), Want.CONFIG, print)


def test_a_file_that_comes_in_single_bytes_is_given_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.0)
    hub.add("org/model", {"config.json": b"{}" * 50_000})
    hub.cuts["config.json"] = [1] * 10_000
    with pytest.raises(UserError, match=r"breaks off at byte \d+ of config.json"):
        fetch(HubName("hf", "org/model"), Want.CONFIG, print)
    assert hub.downloads("config.json") < 100


def test_a_later_huggingface_hub_needs_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.0")
    monkeypatch.setitem(sys.modules, "llmsuite.base.hub.limited", None)  # what an import without it gives
    assert huggingface._limits() is None
