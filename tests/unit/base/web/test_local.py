"""The server of local pages: nothing that a client without the token sends is more than refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from llmsuite.base.web.local import LocalHandler, LocalServer

PATHS = (
    b"/",
    b"http://[x/",
    b"//[x",
    b"/?token=%ff",
    b"/?token=a&token=b",
    b"/\x7f\xff",
    b"*",
    b"/" + b"?" * 9,
    b"/#x?token=",
)


class Page(LocalHandler):
    """Answers with the path."""

    def do_GET(self) -> None:
        place, query = self.address()
        if self.is_authorized(query.get("token", "")):
            self.answer(place)


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer(0, Page, "secret") as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: LocalServer, target: bytes, headers: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(b"GET " + target + b" HTTP/1.1\r\n" + headers + b"\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("headers", [b"", b"Host: localhost:1\r\n", b"Host: else.where\r\n", b"Host: \xff\r\n"])
def test_odd_requests_are_refused_without_a_word(
    server: LocalServer, capsys: pytest.CaptureFixture[str], target: bytes, headers: bytes
) -> None:
    assert b" 403 " in ask(server, target, headers).split(b"\r\n")[0]
    assert capsys.readouterr() == ("", "")


def test_a_request_with_the_token_is_answered(server: LocalServer) -> None:
    answer = ask(server, b"/a/b?x=1&token=secret", b"Host: localhost:1\r\n")
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert answer.endswith(b"/a/b")
