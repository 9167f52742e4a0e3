"""AI Studio, through aistudio-sdk, with the user's token.

The SDK resumes no download and does not notice one that broke off, so files are compared with the sizes and digests of
the repository. AI Studio has no commits: a name is pinned to its branch only, and a resumed run is refused if the
content has changed, as with any model.
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

from llmsuite.base.errors import UserError
from llmsuite.base.hub.cache_folders import DEFAULT_BRANCH, PARTS, CacheFolders
from llmsuite.base.hub.listing import Interrupted, Kind, Listing, NotOnHub, RemoteFile, Unreachable
from llmsuite.base.hub.names import HubName
from llmsuite.base.redaction import SECRETS
from llmsuite.base.safe_files import is_file

_POINTER = re.compile(rb"version https://git-lfs[^\n]*\noid sha256:([0-9a-f]{64})\nsize (\d+)\n?")
_MAX_POINTER = 1024
_LOCK = threading.Lock()


class AIStudio(CacheFolders):
    """The hub AI Studio, an implementation of `llmsuite.base.hub.listing.Hub`."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        if kind != "model":
            raise NotOnHub(f"{name}: aistudio-sdk fetches no data sets; download it, and name the directory")
        entries = self._file_info(name, "")
        if not isinstance(entries, list):
            raise UserError(f"{name}: AI Studio answers {str(entries)[:200]}")
        files = {entry["path"]: self._remote_file(name, entry) for entry in entries if entry.get("type") == "file"}
        return Listing(name.revision or DEFAULT_BRANCH, files)

    def _remote_file(self, name: HubName, entry: dict[str, Any]) -> RemoteFile:
        """Size and digest of a file. For a large file in Git LFS the hub lists its pointer, which has both."""
        if entry["path"].endswith((".safetensors", ".json", ".model")) and entry["size"] < _MAX_POINTER:
            content = self._file_info(name, entry["path"])
            text = b""
            if isinstance(content, dict):
                text = base64.b64decode(content.get("content") or b"")
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
        if name.revision is not None and name.revision != DEFAULT_BRANCH:
            url += f"?ref={quote(name.revision, safe='')}"
        tqdm.tqdm.monitor_interval = 0  # its monitor thread would stay alive, and ranks could not be forks
        from aistudio_sdk.requests.hub import request_aistudio_git_download

        with _LOCK, contextlib.redirect_stdout(sys.stderr):  # the SDK prints; redirecting is not thread-safe
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
            raise Interrupted(f"{part.stat().st_size:,} of {file.size:,} bytes have arrived")
        part.replace(target)

    def _file_info(self, name: HubName, path: str) -> Any:
        host = _host(name)
        from aistudio_sdk.requests.hub import request_aistudio_git_file_info

        owner, _, repo = name.repo.partition("/")
        try:
            found = request_aistudio_git_file_info(host, owner, repo, path, name.revision or DEFAULT_BRANCH, _token())
        except (OSError, ValueError) as error:  # of `requests`, and invalid JSON
            raise Unreachable(f"{name}: AI Studio cannot be reached ({error}); HTTPS_PROXY names a proxy") from error
        if isinstance(found, dict) and "error_code" in found:
            _explain(found, name)
        return found


def _host(name: HubName) -> str:
    """The URL of the repositories: STUDIO_GIT_HOST, as for the SDK."""
    try:
        from aistudio_sdk import config
    except ImportError as error:
        raise NotOnHub(
            f"{name}: needs the package {error.name}; install it with: pip install 'aistudio-sdk<0.3'"
        ) from error
    return os.environ.get("STUDIO_GIT_HOST", config.STUDIO_GIT_HOST_DEFAULT)


def _token() -> str:
    """The token of the user: AISTUDIO_ACCESS_TOKEN, or the one stored by the SDK's login."""
    path = Path(os.environ.get("AISTUDIO_CACHE_HOME", "~")).expanduser() / ".cache" / "aistudio" / ".auth" / "token"
    kept = ""
    if is_file(path):
        kept = path.read_text(encoding="utf-8").strip()
    SECRETS.add(kept)
    return os.environ.get("AISTUDIO_ACCESS_TOKEN") or kept


def _explain(found: dict[str, Any], name: HubName) -> None:
    """Raise an error that the SDK has returned."""
    status = found.get("biz_code")
    text = str(found.get("error_msg", found))[:200]
    login = "set AISTUDIO_ACCESS_TOKEN to a token of aistudio.baidu.com/account/accessToken"
    if status == 404:
        raise NotOnHub(f"{name}: AI Studio has no model {name.repo} (revision {name.revision or DEFAULT_BRANCH})")
    if status in (401, 403) or found.get("error_code") == 11002:
        raise UserError(f"{name}: may not be read: {text}; {login}")
    if isinstance(status, int) and status >= 500:
        raise Interrupted(text)
    raise UserError(f"{name}: AI Studio answers: {text}")
