"""ModelScope and AI Studio: their libraries through the same interface, with a server on this machine."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.base.errors import UserError
from llmsuite.base.hub import download
from llmsuite.base.hub.fetch import fetch
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import cached
from llmsuite.base.hub.names import HubName
from tests.support.hub_model import FILES, NEEDED, WEIGHTS

COMMIT = "5" * 40


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Others:
    """Both hubs with one model; `cuts` as those of `HubServer`."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.cuts = list[int]()
        self.tokens: set[str] = set()
        others = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                path = urllib.parse.unquote(parts.path)
                query = dict(urllib.parse.parse_qsl(parts.query))
                others.tokens.add(self.headers.get("Authorization", ""))
                if "/org/model" not in path and "checkPermit" not in path:
                    self._json({"Code": 404, "Message": "record not found", "Success": False}, 404)
                elif path == "/api/v1/models/org/model/repo/files":
                    self._json({"Code": 200, "Success": True, "Data": {"Files": others.modelscope()}})
                elif path == "/api/v1/models/org/model/repo":
                    self._content(others.files[query["FilePath"]], query["FilePath"])
                elif path == "/api/v1/repos/org/model/contents/":
                    self._json([others.gitea(name) for name in others.files if "/" not in name])
                elif path.startswith("/api/v1/repos/org/model/contents/"):
                    self._json(others.gitea(path.rpartition("/")[2]))
                elif path.startswith("/api/v1/repos/org/model/media/"):
                    name = path.removeprefix("/api/v1/repos/org/model/media/")
                    self._content(others.files[name], name)
                else:
                    self._json({"Code": 200, "Success": True, "Data": {}, "errorCode": 0})

            def _json(self, found: Any, status: int = 200) -> None:
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _content(self, content: bytes, name: str) -> None:
                first = 0
                status = 200
                if (given := self.headers.get("Range", "")).startswith("bytes="):
                    first = int(given[6:].partition("-")[0])
                    status = 206
                body = content[first:]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 206:
                    self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
                self.end_headers()
                is_cut = name == "model.safetensors" and self.command == "GET" and others.cuts
                self.wfile.write(body[: others.cuts.pop(0)] if is_cut else body)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def modelscope(self) -> list[dict[str, Any]]:
        return [
            {
                "Path": name,
                "Name": name.rpartition("/")[2],
                "Size": len(content),
                "Sha256": hashlib.sha256(content).hexdigest(),
                "Type": "blob",
                "Revision": COMMIT,
                "CommittedDate": 1,
            }
            for name, content in self.files.items()
        ]

    def gitea(self, name: str) -> dict[str, Any]:
        stored = self.files[name]
        if name.endswith(".safetensors"):  # in LFS: the repository has a pointer
            digest = hashlib.sha256(FILES[name]).hexdigest()
            stored = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(stored)}\n".encode()
        content = base64.b64encode(stored).decode()
        return {"path": name, "type": "file", "size": len(stored), "sha": git_name(stored), "content": content}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    server = Others()
    for name in ("MODELSCOPE_ENDPOINT", "STUDIO_GIT_HOST", "STUDIO_MODEL_API_URL_PREFIX"):
        monkeypatch.setenv(name, server.url)
    for name in ("MODELSCOPE_CACHE", "MODELSCOPE_HOME", "AISTUDIO_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / "cache")))
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.01)
    yield server
    server.stop()


@pytest.mark.parametrize(("hub", "revision"), [("ms", COMMIT), ("aistudio", "master")])
def test_a_model_is_fetched(others: Others, hub: str, revision: str) -> None:
    others.cuts = [150_000]
    found = fetch(HubName(hub, "org/model"), Want.MODEL, print)
    assert {path.name for path in found.directory.iterdir()} == NEEDED
    assert (found.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert found.name == HubName(hub, "org/model", revision=revision)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        assert fetch(HubName(hub, "org/model"), Want.MODEL, print).directory == found.directory
    finally:
        del os.environ["HF_HUB_OFFLINE"]
    others.stop()
    reports: list[str] = []
    assert fetch(HubName(hub, "org/model"), Want.MODEL, reports.append).directory == found.directory
    assert "continuing with the files fetched before" in reports[0]


@pytest.mark.parametrize("hub", ["ms", "aistudio"])
def test_a_missing_repository_is_reported(others: Others, hub: str) -> None:
    with pytest.raises(UserError, match=f"{hub}:org/none: .* has no model org/none"):
        fetch(HubName(hub, "org/none"), Want.MODEL, print)
    assert cached(HubName(hub, "org/none"), Want.MODEL) is None


def test_a_damaged_file_of_ai_studio(others: Others) -> None:
    others.files["model.safetensors"] = b"x" * len(WEIGHTS)
    with pytest.raises(UserError, match=r"model\.safetensors has another size or digest than on AI Studio, twice"):
        fetch(HubName("aistudio", "org/model"), Want.MODEL, print)
