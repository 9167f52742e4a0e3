"""AI Studio, through aistudio-sdk (which paddlenlp needs too), with the token that is its users'.

The SDK goes on with no download and does not notice one that broke off, so files are compared with the sizes and
digests that the repository tells. It tells no commits: a name is pinned to its branch only, and a resumed run is
refused if the content has changed, as with any model.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llmsuite.errors import UserError
from llmsuite.hub.folder import DEFAULT_BRANCH, PARTS, Folders
from llmsuite.hub.listing import Interrupted, Kind, Listing, NotThere, RemoteFile, Unreachable
from llmsuite.hub.names import HubName
from llmsuite.regular import is_file
from llmsuite.shown import SECRETS

_POINTER = re.compile(rb"version https://git-lfs[^\n]*\noid sha256:([0-9a-f]{64})\nsize (\d+)\n?")
_MOST_POINTER = 1024
_ONE_AT_A_TIME = threading.Lock()


class AIStudio(Folders):
    """See `llmsuite.hub.listing.Hub`."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        if kind != "model":
            raise NotThere(f"{name}: aistudio-sdk fetches no data sets; download it, and name the directory")
        entries = self._information(name, "")
        if not isinstance(entries, list):
            raise UserError(f"{name}: AI Studio answers {str(entries)[:200]}")
        files = {entry["path"]: self._described(name, entry) for entry in entries if entry.get("type") == "file"}
        return Listing(name.revision or DEFAULT_BRANCH, files)

    def _described(self, name: HubName, entry: dict[str, Any]) -> RemoteFile:
        """Size and digest of a file: a large one is told as the few bytes that point to it."""
        if entry["path"].endswith((".safetensors", ".json", ".model")) and entry["size"] < _MOST_POINTER:
            content = self._information(name, entry["path"])
            text = base64.b64decode(content.get("content") or b"") if isinstance(content, dict) else b""
            if match := _POINTER.fullmatch(text):
                return RemoteFile(int(match[2]), f"sha256:{match[1].decode()}")
        return RemoteFile(entry["size"], f"git:{entry['sha']}")

    def download(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        import tqdm

        directory = self.directory(name, kind)
        assert directory is not None, "begin() has made it"
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}{PARTS[0]}")
        owner, _, repo = name.repo.partition("/")
        url = f"{_host(name)}/api/v1/repos/{quote(owner)}/{quote(repo)}/media/{quote(path, safe='')}"
        url += f"?ref={quote(name.revision, safe='')}" if name.revision not in (None, DEFAULT_BRANCH) else ""
        tqdm.tqdm.monitor_interval = 0  # its thread would stay, and ranks could not be forks
        from aistudio_sdk.requests.hub import request_aistudio_git_download

        with _ONE_AT_A_TIME, contextlib.redirect_stdout(sys.stderr):  # it prints
            try:
                found = request_aistudio_git_download(url, part, _token())
            except OSError as error:
                if error.errno is not None and not isinstance(error, ConnectionError):
                    raise
                raise Interrupted(str(error)) from error
        if found:
            part.unlink(missing_ok=True)
            _explain(found, name)
        if file.size is not None and part.stat().st_size < file.size:
            raise Interrupted(f"{part.stat().st_size:,} of {file.size:,} bytes have come")
        part.replace(target)

    def _information(self, name: HubName, path: str) -> Any:
        host = _host(name)
        from aistudio_sdk.requests.hub import request_aistudio_git_file_info

        owner, _, repo = name.repo.partition("/")
        try:
            found = request_aistudio_git_file_info(host, owner, repo, path, name.revision or DEFAULT_BRANCH, _token())
        except (OSError, ValueError) as error:  # of `requests`, and what is no JSON
            raise Unreachable(f"{name}: AI Studio cannot be reached ({error}); HTTPS_PROXY names a proxy") from error
        if isinstance(found, dict) and "error_code" in found:
            _explain(found, name)
        return found


def _host(name: HubName) -> str:
    """The address of the repositories; STUDIO_GIT_HOST, as for the SDK."""
    try:
        from aistudio_sdk import config
    except ImportError as error:
        raise NotThere(
            f"{name}: needs the package {error.name}; install it with: pip install 'aistudio-sdk<0.3'"
        ) from error
    return os.environ.get("STUDIO_GIT_HOST", config.STUDIO_GIT_HOST_DEFAULT)


def _token() -> str:
    """The token of the user: AISTUDIO_ACCESS_TOKEN, or what the SDK's login has kept."""
    path = Path(os.environ.get("AISTUDIO_CACHE_HOME", "~")).expanduser() / ".cache" / "aistudio" / ".auth" / "token"
    kept = path.read_text(encoding="utf-8").strip() if is_file(path) else ""
    SECRETS.add(kept)
    return os.environ.get("AISTUDIO_ACCESS_TOKEN") or kept


def _explain(found: dict[str, Any], name: HubName) -> None:
    """Raise what the SDK returns as an error."""
    status, text = found.get("biz_code"), str(found.get("error_msg", found))[:200]
    login = "set AISTUDIO_ACCESS_TOKEN to a token of aistudio.baidu.com/account/accessToken"
    if status == 404:
        raise NotThere(f"{name}: AI Studio has no model {name.repo} (revision {name.revision or DEFAULT_BRANCH})")
    if status in (401, 403) or found.get("error_code") == 11002:
        raise UserError(f"{name}: may not be read: {text}; {login}")
    if isinstance(status, int) and status >= 500:
        raise Interrupted(text)
    raise UserError(f"{name}: AI Studio answers: {text}")
