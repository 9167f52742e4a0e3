"""The HTTP client with malicious servers, for each reader that uses it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import Secrets, Url
from llmsuite.base.strict_json import is_nested_deeper
from llmsuite.base.web import client
from llmsuite.base.web.client import MAX_DEPTH, HttpFailure, json_of, post_json, shortened
from llmsuite.data import remote
from tests.support.liar import JSON_LIES, LIES, READERS, SECONDS, SECRET, Liar, answer

_SLACK = 3.0
"""Seconds more than the deadline, for a machine that is busy."""
_MEMORY = 200
"""MB more than before, which no lie may cost."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have a disk with little room."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMSUITE_API_KEY", SECRET)
    monkeypatch.setattr(remote, "_MAX_DISK_SHARE", 1e-4)


@pytest.fixture
def other() -> Iterator[Liar]:
    """Another host, which must not get any request."""
    found = Liar(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    yield found
    found.close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Liar], str]:
    """`refused(reader, server)` is the message of a reader, after it has refused an answer in time and without much
    memory."""

    def message(reader: str, server: Liar) -> str:
        monkeypatch.setattr(client, "STALL_SECONDS", server.seconds)  # files have the deadline of the other readers
        return _refused(reader, server)

    return message


def _refused(reader: str, server: Liar) -> str:
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as raised:
        READERS[reader](server.url, server.seconds)
    output = str(raised.value)
    assert time.monotonic() - began < server.seconds + _SLACK
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY << 10
    assert server.url in output
    assert SECRET not in output + repr(raised.value.__cause__)
    assert "\x1b" not in output
    output.encode()  # printable on a terminal
    return output


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_follows_a_lie(reader: str, lie: str, other: Liar, refused: Callable[[str, Liar], str]) -> None:
    server = LIES[lie](other.url.replace("127.0.0.1", "localhost"))
    try:
        output = refused(reader, server)
    finally:
        server.close()
    assert other.asked == []
    if "drip" in lie or lie == "silence":
        assert "timed out" in output
    if lie.startswith("another"):
        assert "redirects to" in output or "br" in output


@pytest.mark.parametrize("lie", JSON_LIES)
@pytest.mark.parametrize("reader", ["llmsuite", "reward"])
def test_no_reader_takes_other_json(reader: str, lie: str, refused: Callable[[str, Liar], str]) -> None:
    server = answer(JSON_LIES[lie])
    try:
        output = refused(reader, server)
        assert ("deep" in lie) == ("nested more than 64 deep" in output)
    finally:
        server.close()


@pytest.mark.parametrize(("lie", "why"), [("silence", "timed out"), ("a body that drips", "SSL"), ("no HTTP", "SSL")])
def test_a_server_that_only_seems_to_be_encrypted(lie: str, why: str, other: Liar) -> None:
    server = LIES[lie](other.url)
    began = time.monotonic()
    try:
        with pytest.raises(HttpFailure, match=why) as raised:
            post_json(Url(server.url.replace("http", "https")), {}, SECONDS, key=SECRET)
    finally:
        server.close()
    assert raised.value.is_transient
    assert time.monotonic() - began < SECONDS + _SLACK
    assert not any(SECRET.encode() in asked for asked in server.asked)


NO_ADDRESSES = [
    *("http://", "http://[", "http://a:b", "http://u:s3cr3t#@h:x/", "ftp://h/a", "file:///etc/passwd"),
    *("http://" + "é" * 70, "http://" + "a" * 70, "http://a..b"),
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_malformed_urls_are_refused(address: str) -> None:
    with pytest.raises(HttpFailure, match="is no address"):
        post_json(Url(address), {}, 1.0)


def test_a_malformed_key_is_refused() -> None:
    with pytest.raises(HttpFailure, match="its key has a line break") as raised:
        post_json(Url("http://127.0.0.1:9/"), {}, 1.0, key=f"{SECRET}\n")
    assert SECRET not in str(raised.value)


# what is no lie


class _Handler(http.server.BaseHTTPRequestHandler):
    """Redirects to a file in some steps, and requires a password for it; or answers requests."""

    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        packed = self.path.startswith("/packed")
        body = gzip.compress(b"{}\n" * 1_000_000) if packed else b"{}\n"
        self.send_response(302 if self.path == "/a" else 200)
        self.send_header("Content-Length", str(len(body)))
        if self.path == "/a":
            self.send_header("Location", "/%E6%95%B0/rows%20b.jsonl")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def honest() -> Iterator[Any]:
    handler = type("Handler", (_Handler,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_is_followed_on_its_host_with_its_password(honest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{honest.server_port}"
    found = remote.fetch(f"http://user:p%40ss@{address}/a", lambda text: None)
    assert found.read_bytes() == b"{}\n"
    basic = "Basic " + base64.b64encode(b"user:p@ss").decode()
    asked = honest.RequestHandlerClass.asked
    assert asked == [("/a", basic), ("/%E6%95%B0/rows%20b.jsonl", basic)]
    asked.clear()
    remote.fetch(f"http://{address}/数/rows b.jsonl?x=é", lambda text: None)
    assert asked == [("/%E6%95%B0/rows%20b.jsonl?x=%C3%A9", None)]


def test_compressed_content_is_decompressed(honest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MAX_DISK_SHARE", 0.9)
    found = remote.fetch(f"http://127.0.0.1:{honest.server_port}/packed", lambda text: None)
    assert found.read_bytes() == b"{}\n" * 1_000_000


def test_a_key_is_hidden_before_an_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets()
    secrets.add("sk-0123456789abcdefghij")
    monkeypatch.setattr("llmsuite.base.redaction.SECRETS", secrets)
    assert "sk-0" not in shortened("x" * 285 + "sk-0123456789abcdefghij")


@pytest.mark.parametrize(
    ("at", "to", "may"),
    [
        ("https://a/x", "https://b/y", True),
        ("https://a/x", "https://a:8443/y", True),
        ("http://a/x", "https://a/y", True),
        ("http://a:80/x", "http://a/y", True),
        ("http://a/x", "http://A/y", True),
        ("https://a/x", "http://a/y", False),
        ("https://a/x", "http://b/y", False),
        ("http://a/x", "http://b/y", False),
        ("http://a/x", "http://a:81/y", False),
        ("http://a/x", "https://b/y", False),
        ("http://a:81/x", "https://a/y", False),
        ("http://a/x", "http://a.b/y", False),
    ],
)
def test_allowed_redirects_of_files(at: str, to: str, may: bool) -> None:
    if may:
        client._check_redirect(Url(at), Url(to))
    else:
        with pytest.raises(HttpFailure, match="another host or one without https"):
            client._check_redirect(Url(at), Url(to))


def test_a_file_that_comes_fast_enough_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline of all of it would end at a third."""
    monkeypatch.setattr(client, "MIN_RATE", 100)
    monkeypatch.setattr(client, "_READ", 100)
    monkeypatch.setattr(remote, "_MAX_DISK_SHARE", 0.9)
    pieces = 24
    size = 50
    server = Liar(f"HTTP/1.1 200 OK\r\nContent-Length: {pieces * size}\r\n\r\n".encode(), b" " * size, pause=0.05)
    try:
        assert remote.fetch(f"{server.url}/rows.jsonl", lambda text: None).stat().st_size == pieces * size
    finally:
        server.close()


# JSON


_SIMPLE = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(st.sampled_from('[]{}"\\ a,é'), max_size=6)


def _depth(data: Any) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _within(inner: Any) -> Any:
    names = st.text(st.sampled_from('[}"\\'), max_size=3)
    return st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)


@given(st.recursive(_SIMPLE, _within, max_leaves=12), st.integers(0, 6))
def test_the_depth_of_json(data: Any, most: int) -> None:
    assert is_nested_deeper(data, most) == (_depth(data) > most)


@given(st.binary(max_size=40) | st.text(st.sampled_from('[]{}"\\,:1'), max_size=3000).map(str.encode))
def test_any_bytes_are_json_or_refused(data: bytes) -> None:
    with contextlib.suppress(HttpFailure):
        found = json_of(Url("http://a"), data)
        assert repr(found) == repr(json.loads(data))
        assert _depth(found) <= MAX_DEPTH
