"""Uploads a model to Hugging Face's hub, through huggingface_hub with the user's token."""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.hub.huggingface import endpoint, is_broken_connection, reason, status_of, token
from llmsuite.base.hub.listing import Listing, RemoteFile, Report, Want, select
from llmsuite.base.hub.names import HUBS, HubName, hub_name
from llmsuite.base.safe_files import is_file, listed

_EXTRA_FILES = ("README.md", "LICENSE", "NOTICE")
_NOT_OF_MODEL = ("optimizer", "critic")
"""Prefixes of files that are needed only for resuming a run."""


def pushed_files(directory: Path, name: HubName) -> list[str]:
    """The files of a model directory to upload: safetensors, config, tokenizer, and README or licence files.

    Raises:
        UserError: it holds no model.
    """
    here = {path.name: RemoteFile(path.stat().st_size) for path in listed(directory) if is_file(path)}
    of_model = {path: file for path, file in here.items() if not path.startswith(_NOT_OF_MODEL)}
    try:
        found = select(name, Listing("", of_model), Want.MODEL)
    except UserError as error:
        raise UserError(f"{directory}: has no safetensors to push; it has {', '.join(sorted(here)[:20])}") from error
    if "base.json" in found and hub_name(str(read_json_object(directory / "base.json").get("path"))) is None:
        found.remove("base.json")  # a path of this machine is useless elsewhere
    return [*found, *(path for path in _EXTRA_FILES if path in here)]


def push(directory: Path, name: HubName, private: bool, message: str, report: Report) -> HubName:
    """Upload a model directory to a repository, which is created if it does not exist. Returns its name at the new
    commit.

    Args:
        directory: with the model, or adapters.
        name: of the repository; with a revision, of the branch.
        private: make a new repository private.
        message: of the commit.
        report: receives lines about the progress.

    Raises:
        UserError: the user is not logged in or has no write permission, or the hub cannot be reached.
    """
    if name.hub != "hf":
        where = HUBS.get(name.hub, "a name without a hub")
        raise UserError(f"{name}: a model can be pushed to Hugging Face only, as hf:ORG/NAME, not to {where}")
    if name.path or name.query:
        raise UserError(f"{name}: only a complete model can be pushed, as hf:ORG/NAME or hf:ORG/NAME@BRANCH")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    files = pushed_files(directory, name)
    login = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
    if token() is None:
        raise UserError(f"{name}: you are not logged in; {login}")
    size = sum((directory / path).stat().st_size for path in files)
    report(f"pushing {directory} to {endpoint()}/{name.repo}: {len(files)} files, {size / 1e6:,.1f} MB")
    disable_progress_bars()
    api = HfApi(endpoint=endpoint(), library_name="llmsuite")
    try:
        api.create_repo(name.repo, private=private, exist_ok=True)
        if name.revision is not None:
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name.repo,
            folder_path=directory,
            allow_patterns=files,
            commit_message=message,
            revision=name.revision,
        )
    except Exception as error:  # of many libraries
        if status_of(error) in (401, 403):
            text = f"{name}: {endpoint()} does not let this token write there: {reason(error)}; {login}"
            raise UserError(text) from error
        if is_broken_connection(error):
            text = f"{name}: {endpoint()} cannot be reached ({reason(error)})"
            raise UserError(f"{text}; files that have arrived are not sent again{_without_xet(error)}") from error
        if isinstance(error, HFValidationError) or status_of(error) is not None:
            raise UserError(f"{name}: {endpoint()} does not accept it: {reason(error)}") from error
        raise
    return name.at("hf", commit.oid)


def _without_xet(error: Exception) -> str:
    """Advice for a hub without Xet storage, such as a mirror: huggingface_hub from 1.0 on does not go on without it by
    itself."""
    return "; if it has no Xet storage, set HF_HUB_DISABLE_XET=1" if "xet" in str(error) else ""
