"""ModelScope, through modelscope-hub: its endpoint (MODELSCOPE_ENDPOINT) and tokens are those of all its users."""

from __future__ import annotations

import os
import re
from typing import Any

from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.hub.folder import DEFAULT_BRANCH, Folders
from llmsuite.hub.huggingface import reason
from llmsuite.hub.listing import Interrupted, Kind, Listing, NotThere, RemoteFile, Unreachable
from llmsuite.hub.names import HubName


class ModelScope(Folders):
    """See `llmsuite.hub.listing.Hub`."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        asked = name.revision or DEFAULT_BRANCH
        api = _api(name)
        try:
            entries = [e for e in api.legacy.list_repo_files(name.repo, kind, asked) if e.get("Type") != "tree"]
        except Exception as error:  # of several libraries
            _explain(error, name, kind)
            raise
        files = {
            entry["Path"]: RemoteFile(entry.get("Size"), f"sha256:{entry['Sha256']}" if entry.get("Sha256") else None)
            for entry in entries
        }
        return Listing(_commit(entries) or asked, files)

    def download(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        directory = self.directory(name, kind)
        assert directory is not None, "begin() has made it"
        sha256 = file.digest.partition(":")[2] if file.digest else None
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
                raise UserError(f"{name}: {path} is not what ModelScope tells, again and again: {error}") from error
            if _is_broken_connection(error):
                raise Interrupted(reason(error)) from error
            _explain(error, name, kind)
            raise


def _api(name: HubName) -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError as error:
        raise NotThere(f"{name}: needs the package {error.name}; install it with: {install_command('ms')}") from error
    return HubApi(endpoint=os.environ.get("MODELSCOPE_ENDPOINT"))  # its default is that of the first call


def _commit(entries: list[dict[str, Any]]) -> str | None:
    """The newest commit of a file: ModelScope tells none of the repository."""
    known = [e for e in entries if re.fullmatch(r"[0-9a-f]{40}", str(e.get("Revision")))]
    return max(known, key=lambda e: e.get("CommittedDate") or 0)["Revision"] if len(known) == len(entries) > 0 else None


def _is_broken_connection(error: BaseException) -> bool:
    import requests
    from modelscope_hub.errors import HubError, NetworkError, ServerError

    if isinstance(error, HubError):
        return isinstance(error, (NetworkError, ServerError)) or error.retryable
    return isinstance(error, requests.exceptions.RequestException)


def _explain(error: Exception, name: HubName, kind: Kind) -> None:
    """Raise an error of the library as one for the user; nothing, where the user can do nothing about it."""
    from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

    what = "model" if kind == "model" else "data set"
    login = "log in with `modelscope login`, or set MODELSCOPE_API_TOKEN"
    if isinstance(error, NotExistError):
        revision = f" at {name.revision}" if name.revision else ""
        raise NotThere(f"{name}: ModelScope has no {what} {name.repo}{revision}; if it is private, {login}") from error
    if isinstance(error, (AuthenticationError, PermissionDeniedError)):
        raise UserError(f"{name}: may not be read: {error}; ask for access on its page, then {login}") from error
    if _is_broken_connection(error):
        raise Unreachable(
            f"{name}: ModelScope cannot be reached ({reason(error)}); HTTPS_PROXY names a proxy"
        ) from error
    if isinstance(error, HubError):
        raise UserError(f"{name}: ModelScope answers: {error}") from error
