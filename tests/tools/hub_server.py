"""A hub on this machine, with what `huggingface_hub` asks of one: repositories in memory, and faults on demand.

    python -m tests.tools.hub_server ORG/NAME=DIRECTORY...

serves directories as models until it is stopped; set HF_ENDPOINT to the address that it prints.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.server
import json
import re
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any

_LARGE = 1000
"""Files from this size on are in LFS, which names them by their sha256."""


@dataclasses.dataclass
class Repository:
    """A model or data set at one commit."""

    files: dict[str, bytes]
    commit: str = ""
    branches: tuple[str, ...] = ("main",)
    gated: bool = False
    """Whether only the token "allowed" may read it."""
    private: bool = False
    """Whether others learn that it is there."""
    told_size: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes that the list of files tells, where they are wrong."""

    def __post_init__(self) -> None:
        if not self.commit:
            self.renew()

    def renew(self) -> None:
        """Make a commit of what is there now."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + hashlib.sha256(content).digest())
        self.commit = digest.hexdigest()

    def etag(self, path: str) -> str:
        content = self.files[path]
        if len(content) >= _LARGE:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        size = self.told_size.get(path, len(self.files[path]))
        found: dict[str, Any] = {"rfilename": path, "size": size, "blobId": self.etag(path)}
        if len(self.files[path]) >= _LARGE:
            found["lfs"] = {"sha256": self.etag(path), "size": size, "pointerSize": 130}
        return found


class HubServer:
    """The hub; stop it after use."""

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.cuts: dict[str, list[int]] = {}
        """By file: each request for it is answered with so many bytes, and then the connection breaks."""
        self.sent: dict[str, list[bytes]] = {}
        """By file: each request for it gets this content instead, with the same digest in its header."""
        self.slow: dict[str, float] = {}
        """By file: seconds to wait after each 64 kB."""
        self.status: int | None = None
        """Answer everything with this."""
        self.asked: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.tokens: set[str] = set()
        """What clients have sent as Authorization."""
        self.uploads: dict[str, bytes] = {}
        server = self

        class Handler(_Handler):
            hub = server

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, repo: str, files: dict[str, bytes], **more: Any) -> Repository:
        self.models[repo] = Repository(files, **more)
        return self.models[repo]

    def downloads(self, path: str) -> int:
        """The requests for the content of a file."""
        return sum(method == "GET" and asked.endswith(f"/{path}") for method, asked in self.asked)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that breaks off is what tests are about."""


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(self._route)

    def do_GET(self) -> None:
        self._answer(self._route)

    def do_POST(self) -> None:
        self._answer(self._route_post)

    def do_PUT(self) -> None:
        self.hub.asked.append(("PUT", self.path))
        self.hub.uploads[self.path.rpartition("/")[2]] = self._body()
        self._send(200, b"")

    def _answer(self, route: Any) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if "Authorization" in self.headers:
            self.hub.tokens.add(self.headers["Authorization"])
        if self.hub.status is not None:
            self._send(self.hub.status, b"busy")
            return
        route(path)

    def _route(self, path: str) -> None:
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            repo = self._repository(match[1], match[2], match[3])
            if repo is not None:
                files = [repo.entry(name) for name in sorted(repo.files)]
                self._json({"id": match[2], "sha": repo.commit, "siblings": files, "private": False, "tags": []})
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            repo = self._repository(match[1], match[2], match[3])
            if repo is not None:
                self._tree(repo, match[4] or "")
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._repository("datasets" if match[1] else "models", match[2], match[3])
            if repo is not None:
                self._file(repo, match[4])
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _tree(self, repo: Repository, folder: str) -> None:
        found = []
        for path in sorted(repo.files):
            if path.startswith(f"{folder}/" if folder else ""):
                entry = repo.entry(path)
                more = {"lfs": {"oid": entry["lfs"]["sha256"], **entry["lfs"]}} if "lfs" in entry else {}
                found.append({"type": "file", "path": path, "size": entry["size"], "oid": entry["blobId"], **more})
        self._json(found)

    def _repository(self, kind: str, name: str, revision: str | None) -> Repository | None:
        repo = (self.hub.models if kind == "models" else self.hub.datasets).get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo is None or (repo.private and token != "allowed"):
            self._send(404 if token else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, repo.commit, *repo.branches):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif repo.gated and token != "allowed" and "/resolve/" in self.path:
            self._send(403 if token else 401, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            return repo
        return None

    def _file(self, repo: Repository, path: str) -> None:
        if path not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            return
        content = repo.files[path]
        if self.command == "GET" and self.hub.sent.get(path):
            content = self.hub.sent[path].pop(0)
        headers = {"ETag": f'"{repo.etag(path)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        status = 200
        first = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status = 206
            first = int(match[1])
            if first >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(status, content[first:], headers, path)

    def _json(self, found: Any) -> None:
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, path: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(path)
        end = cuts.pop(0) if cuts else len(body)
        for at in range(0, end, 1 << 16):
            try:
                self.wfile.write(body[at : min(end, at + (1 << 16))])
                self.wfile.flush()
            except OSError:  # the client is gone
                self.close_connection = True
                return
            if path in self.hub.slow:
                threading.Event().wait(self.hub.slow[path])
        if end < len(body):
            self.close_connection = True

    # uploads

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _route_post(self, path: str) -> None:
        body = self._body()
        if self.headers.get("Authorization") != "Bearer allowed":
            self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            exists = name in self.hub.models
            is_private = bool(asked.get("private")) or asked.get("visibility") == "private"  # from 1.0 on
            self.hub.models.setdefault(name, Repository({}, private=is_private))
            self._send(409 if exists else 200, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            self._json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": mode[f["size"] >= _LARGE], "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{self.hub.url}/upload/{o['oid']}"}}} for o in objects]
            self._json({"transfer": "basic", "objects": actions})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(match[1], body)
        else:
            self._send(404, b"{}")

    def _commit(self, name: str, body: bytes) -> None:
        repo = self.hub.models[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.uploads[value["oid"]]
        repo.renew()
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.commit}", "commitOid": repo.commit})


def main() -> None:
    hub = HubServer()
    for word in sys.argv[1:]:
        repo, _, directory = word.partition("=")
        root = Path(directory)
        files = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        hub.add(repo, files)
    print(hub.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
