"""ModelScope, through modelscope-hub: with the same endpoint (MODELSCOPE_ENDPOINT) and tokens as other programs."""

from __future__ import annotations

import os
import re
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.hub.cache_folders import DEFAULT_BRANCH, CacheFolders
from llmsuite.base.hub.huggingface import reason
from llmsuite.base.hub.listing import Interrupted, Kind, Listing, NotOnHub, RemoteFile, Unreachable
from llmsuite.base.hub.names import HubName


class ModelScope(CacheFolders):
    """The hub ModelScope, an implementation of `llmsuite.base.hub.listing.Hub`."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        revision = name.revision or DEFAULT_BRANCH
        api = _api(name)
        try:
            entries = [e for e in api.legacy.list_repo_files(name.repo, kind, revision) if e.get("Type") != "tree"]
        except Exception as error:  # of several libraries
            _explain(error, name, kind)
            raise
        files = {}
        for entry in entries:
            digest = None
            if entry.get("Sha256"):
                digest = f"sha256:{entry['Sha256']}"
            files[entry["Path"]] = RemoteFile(entry.get("Size"), digest)
        return Listing(_commit(entries) or revision, files)

    def download(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        directory = self.directory(name, kind)
        assert directory is not None, "begin() has made it"
        sha256 = None
        if file.digest:
            sha256 = file.digest.partition(":")[2]
        try:
            _api(name).download_file(
                name.repo,
                kind,
                path,
                revision=name.revision,
                local_dir=directory,
                expected_sha256=sha256,
                file_size=file.size,
            )
        except Exception as error:  # of several libraries
            from modelscope_hub.errors import FileIntegrityError

            if isinstance(error, FileIntegrityError):
                raise UserError(f"{name}: {path} differs from its digest on ModelScope, repeatedly: {error}") from error
            if _is_broken_connection(error):
                raise Interrupted(reason(error)) from error
            _explain(error, name, kind)
            raise


def _api(name: HubName) -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError as error:
        raise NotOnHub(f"{name}: needs the package {error.name}; install it with: {install_command('ms')}") from error
    return HubApi(
        endpoint=os.environ.get("MODELSCOPE_ENDPOINT")
    )  # given, as the library keeps the default of its first call


def _commit(entries: list[dict[str, Any]]) -> str | None:
    """The newest commit of all files: ModelScope reports none of the repository."""
    known = [e for e in entries if re.fullmatch(r"[0-9a-f]{40}", str(e.get("Revision")))]
    if not entries or len(known) < len(entries):
        return None
    newest = max(known, key=lambda e: e.get("CommittedDate") or 0)
    return str(newest["Revision"])


def _is_broken_connection(error: BaseException) -> bool:
    import requests
    from modelscope_hub.errors import HubError, NetworkError, ServerError

    if isinstance(error, HubError):
        return isinstance(error, (NetworkError, ServerError)) or error.retryable
    return isinstance(error, requests.exceptions.RequestException)


def _explain(error: Exception, name: HubName, kind: Kind) -> None:
    """Raise an error of the library as one for the user; return for an error that the user cannot correct."""
    from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

    what = "model" if kind == "model" else "data set"
    login = "log in with `modelscope login`, or set MODELSCOPE_API_TOKEN"
    if isinstance(error, NotExistError):
        revision = ""
        if name.revision:
            revision = f" at {name.revision}"
        raise NotOnHub(f"{name}: ModelScope has no {what} {name.repo}{revision}; if it is private, {login}") from error
    if isinstance(error, (AuthenticationError, PermissionDeniedError)):
        raise UserError(f"{name}: may not be read: {error}; ask for access on its page, then {login}") from error
    if _is_broken_connection(error):
        raise Unreachable(
            f"{name}: ModelScope cannot be reached ({reason(error)}); HTTPS_PROXY names a proxy"
        ) from error
    if isinstance(error, HubError):
        raise UserError(f"{name}: ModelScope answers: {error}") from error
