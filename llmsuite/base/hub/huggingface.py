"""Hugging Face's hub, through huggingface_hub: with the same endpoint, proxies, tokens and cache as other programs.

HF_ENDPOINT, HF_HOME or HF_HUB_CACHE, HF_TOKEN or `hf auth login`, HTTPS_PROXY and HF_HUB_OFFLINE work as they do there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.hub.listing import Interrupted, Kind, Listing, NotOnHub, RemoteFile, Unreachable
from llmsuite.base.hub.names import HubName
from llmsuite.base.redaction import SECRETS
from llmsuite.base.safe_files import is_dir, is_file

_SECONDS = 20.0


class HuggingFace:
    """Hugging Face's hub, an implementation of `llmsuite.base.hub.listing.Hub`."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        from huggingface_hub import HfApi

        _limits()
        api = HfApi(endpoint=endpoint(), library_name="llmsuite")
        try:
            found = api.repo_info(
                name.repo, repo_type=kind, revision=name.revision, files_metadata=True, timeout=_SECONDS
            )
        except Exception as error:  # of many libraries
            _explain(error, name, kind)
            raise
        files = {sibling.rfilename: _file(sibling) for sibling in found.siblings or ()}
        if found.sha is None:
            raise UserError(f"{name}: {endpoint()} reports no commit; this hub cannot be used")
        return Listing(found.sha, files)

    def directory(self, name: HubName, kind: Kind) -> Path | None:
        storage = _storage(name, kind)
        if name.is_pinned:
            return storage / "snapshots" / str(name.revision)
        reference = storage / "refs" / (name.revision or "main")
        if is_file(reference):
            return storage / "snapshots" / reference.read_text().strip()
        directory = storage / "snapshots" / (name.revision or "main")
        return directory if is_dir(directory) else None

    def begin(self, name: HubName, kind: Kind, listing: Listing) -> Path:
        storage = _storage(name, kind)
        directory = storage / "snapshots" / listing.revision
        directory.mkdir(parents=True, exist_ok=True)
        if not name.is_pinned:  # as the library does, so that the name can be resolved offline
            reference = storage / "refs" / (name.revision or "main")
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(listing.revision)
        return directory

    def download(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        import tqdm
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        limits = _limits()
        tqdm.tqdm.monitor_interval = 0  # its monitor thread would stay alive, and ranks could not be forks
        disable_progress_bars()  # the bytes are counted for all files together
        try:
            with limits.file_of(file.size) if limits is not None else contextlib.nullcontext():
                hf_hub_download(
                    name.repo,
                    path,
                    repo_type=kind,
                    revision=name.revision,
                    endpoint=endpoint(),
                    cache_dir=str(_cache()),
                    library_name="llmsuite",
                )
        except Exception as error:  # of many libraries
            if is_broken_connection(error):
                raise Interrupted(reason(error)) from error
            _explain(error, name, kind)
            raise

    def received(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> int:
        return sum(found.stat().st_size for found in _blobs(name, kind, file) if is_file(found))

    def discard(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        directory = self.directory(name, kind)
        if directory is not None:
            link = directory / path
            target = link.resolve()
            link.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
        for found in _blobs(name, kind, file):
            found.unlink(missing_ok=True)


def _limits() -> Any:
    """Limit what the hub answers. Returns `llmsuite.base.hub.limited`; None with huggingface_hub from version 1 on,
    which uses httpx in place of `requests`."""
    if int(importlib.metadata.version("huggingface_hub").partition(".")[0]) >= 1:
        return None
    from llmsuite.base.hub import limited

    limited.limit_huggingface()
    return limited


def endpoint() -> str:
    """The URL of the hub: HF_ENDPOINT where a mirror is set."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def token() -> str | None:
    """The token of the user: HF_TOKEN, or the one stored by `hf auth login`."""
    from huggingface_hub import get_token

    found = get_token()
    SECRETS.add(found or "")
    return found


def _cache() -> Path:
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _storage(name: HubName, kind: Kind) -> Path:
    """The directory of a repository in the cache, in the library's layout."""
    return _cache() / "--".join([f"{kind}s", *name.repo.split("/")])


def _blobs(name: HubName, kind: Kind, file: RemoteFile) -> Iterator[Path]:
    """The blobs of a file in the cache, finished or not."""
    if file.digest is not None:
        yield from (_storage(name, kind) / "blobs").glob(f"{file.digest.partition(':')[2]}*")


def _file(sibling: Any) -> RemoteFile:
    if sibling.lfs is not None:
        return RemoteFile(sibling.lfs.size, f"sha256:{sibling.lfs.sha256}")
    return RemoteFile(sibling.size, f"git:{sibling.blob_id}" if sibling.blob_id else None)


def _connection_errors() -> tuple[type[BaseException], ...]:
    """The exceptions of a broken connection: huggingface_hub uses `httpx` since version 1, before that `requests`;
    its Xet storage has Python's own."""
    found: list[type[BaseException]] = [ConnectionError]
    with contextlib.suppress(ImportError):
        import requests

        found.append(requests.exceptions.RequestException)
    with contextlib.suppress(ImportError):
        import httpx

        found.append(httpx.TransportError)
    return tuple(found)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a hub has answered with, if that was the error."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def is_broken_connection(error: BaseException) -> bool:
    """True where another attempt may succeed: the connection broke, or the hub is busy."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):  # no request was possible
        return not isinstance(error.__cause__, ValueError)
    status = status_of(error)
    if status is not None:
        return status in (408, 416, 429) or status >= 500
    is_short = isinstance(error, OSError) and error.errno is None and "Consistency check failed" in str(error)
    return is_short or isinstance(error, _connection_errors())


def _explain(error: Exception, name: HubName, kind: Kind) -> None:
    """Raise an error of the library as one for the user; return for an error that the user cannot correct."""
    from huggingface_hub import errors

    what = "model" if kind == "model" else "data set"
    section = "datasets/" if kind == "dataset" else ""
    page = f"{endpoint()}/{section}{name.repo}"
    is_known = token() is not None
    status = status_of(error)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        who = "you are not logged in"
        if is_known:
            who = "the account of this token has no access"
        raise UserError(f"{name}: is gated, and {who}: accept its licence at {page}, then {login}") from error
    if isinstance(error, errors.RevisionNotFoundError):
        text = f"{name}: {page} has no revision {name.revision!r}; name a branch, a tag or a commit"
        raise NotOnHub(text) from error
    if status == 401 and "Invalid" in str(error) and is_known:
        raise UserError(f"{name}: {endpoint()} refuses the token: {_first_line(error)}; {login}") from error
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        private = f"if it is private, {login}"
        if is_known:
            private = "it may be private, without access for this token"
        raise NotOnHub(f"{name}: {endpoint()} has no {what} {name.repo}; {private}") from error
    if status == 403:
        raise UserError(f"{name}: {page} may not be read: {_first_line(error)}; {login}") from error
    if isinstance(error, errors.HFValidationError):
        raise UserError(f"{name}: is no name that {endpoint()} accepts: {_first_line(error)}") from error
    if is_broken_connection(error) or isinstance(error, errors.OfflineModeIsEnabled):
        raise Unreachable(
            f"{name}: {endpoint()} cannot be reached ({reason(error)}); HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"
        ) from error


def reason(error: BaseException) -> str:
    """The reason why a connection failed: the message of the system, without those of libraries around it."""
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", f"{error} {error.__cause__ or ''}")
    return found[1] if found else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
