"""The port of a server whose model is being loaded: what clients get, and how the server takes it over."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from llmsuite.base.errors import UserError
from llmsuite.serving.loading import LoadingPort


@pytest.fixture
def port() -> Iterator[LoadingPort]:
    with contextlib.closing(LoadingPort("127.0.0.1", 0)) as opened:
        yield opened


def connect(port: LoadingPort) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(port.address, timeout=60)


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", b"{}" * 1000), ("HEAD", None)])
def test_requests_are_told_to_come_again(port: LoadingPort, method: str, body: bytes | None) -> None:
    with contextlib.closing(connect(port)) as connection:
        connection.request(method, "/v1/chat/completions", body)
        response = connection.getresponse()
        text = response.read()
    assert response.status == 503
    assert int(response.headers["Retry-After"]) > 0
    if method == "HEAD":
        assert text == b""
    else:
        assert json.loads(text)["error"]["code"] == "loading"


def test_a_client_that_sends_nothing_keeps_no_other_waiting(port: LoadingPort) -> None:
    address = ("127.0.0.1", int(port.address.rpartition(":")[2]))
    with socket.create_connection(address), contextlib.closing(connect(port)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503


def test_connections_wait_for_the_server_that_takes_over(port: LoadingPort) -> None:
    (listening,) = port.hand_over()
    with contextlib.closing(connect(port)) as connection:
        connection.request("GET", "/health")
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1000).startswith(b"GET /health")
            accepted.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert connection.getresponse().status == 204


def test_a_port_is_free_again_when_it_is_closed() -> None:
    with contextlib.closing(LoadingPort("127.0.0.1", 0)) as first:
        number = int(first.address.rpartition(":")[2])
        with pytest.raises(UserError, match=f"^--host 127.0.0.1 --port {number}: cannot listen there: Address already"):
            LoadingPort("127.0.0.1", number)
    LoadingPort("127.0.0.1", number).close()


def test_all_addresses_of_a_host_have_the_same_port() -> None:
    with contextlib.closing(LoadingPort("localhost", 0)) as opened:
        assert len({listening.getsockname()[1] for listening in opened.hand_over()}) == 1
