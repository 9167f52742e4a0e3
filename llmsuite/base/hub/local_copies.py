"""Models and data sets of hubs on this machine, and the commits that this run reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.cache import cache_root
from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, read_json_object_if_there, write_text_atomic
from llmsuite.base.hub.huggingface import HuggingFace
from llmsuite.base.hub.listing import Hub, Kind, Listing, RemoteFile, Want, missing_by_content, select
from llmsuite.base.hub.names import HubName, hub_order
from llmsuite.base.safe_files import is_dir, is_file

PINS = "LLMSUITE_HUB_PINS"


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A repository of a hub, or a part of it, on this machine."""

    name: HubName
    """The name with the hub and the commit."""
    directory: Path

    @property
    def file(self) -> Path:
        """The file, where the name is that of a file."""
        return self.directory / self.name.path


def open_hub(hub: str) -> Hub:
    """The hub of a name."""
    if hub == "ms":
        from llmsuite.base.hub.modelscope import ModelScope

        return ModelScope()
    if hub == "aistudio":
        from llmsuite.base.hub.aistudio import AIStudio

        return AIStudio()
    return HuggingFace()


def is_offline() -> bool:
    """True where no hub may be contacted: HF_HUB_OFFLINE applies to all hubs."""
    words = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.strip().upper() in ("1", "ON", "YES", "TRUE") for word in words)


def pin(given: str, fetched: HubName, kind: Kind = "model") -> None:
    """Pin the commit of a name for this process and its children."""
    known = known_pins()
    known[f"{kind} {given}"] = str(fetched)
    os.environ[PINS] = json.dumps(known)


def pinned(given: str, kind: Kind = "model") -> str:
    """The name with its pinned commit; a name that is not pinned unchanged."""
    return known_pins().get(f"{kind} {given}", given)


def known_pins() -> dict[str, str]:
    """The pinned names. Raises UserError where the variable does not have the form that `pin` gives it."""
    text = os.environ.get(PINS) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{PINS} is {text[:80]!r}; the launcher sets it for its ranks, as JSON of names: unset it")
    return found


def cached(name: HubName, want: Want, kind: Kind = "model") -> Fetched | None:
    """The repository, if all required files are on this machine; no hub is contacted."""
    for hub in [name.hub] if name.hub else hub_order():
        found = on_disk(name.at(hub, name.revision), kind)
        with contextlib.suppress(UserError):  # it lacks a required file in general, which `fetch` reports
            if found is not None and not missing_files(found, want, kind):
                return found
    return None


def on_disk(name: HubName, kind: Kind) -> Fetched | None:
    directory = open_hub(name.hub).directory(name, kind)
    if directory is None or not is_dir(directory):
        return None
    return Fetched(name.at(name.hub, directory.name), directory)


def missing_files(found: Fetched, want: Want, kind: Kind) -> list[str]:
    """Files that are missing here: by the hub's listing where llmsuite has fetched it, else by the files' content."""
    listing = known_listing(found.name, kind)
    if listing is None:
        return missing_by_content(found.directory, want, found.name.path)
    missing = []
    for path in select(found.name, listing, want):
        file = found.directory / path
        if not is_file(file) or listing.files[path].size not in (None, file.stat().st_size):
            missing.append(path)
    return missing


def is_verified(found: Fetched, want: Want, kind: Kind) -> bool:
    """True where all required files were compared with the digests of the hub."""
    listing = known_listing(found.name, kind)
    checked = verified_files(found.name, kind)
    return listing is not None and all(checked.has(found.directory / p) for p in select(found.name, listing, want))


def verified_files(name: HubName, kind: Kind) -> VerifiedFiles:
    return VerifiedFiles(listing_path(name, kind).with_suffix(".checked.json"))


def listing_path(name: HubName, kind: Kind) -> Path:
    return cache_root() / "hub" / name.hub / "--".join([f"{kind}s", *name.repo.split("/")]) / f"{name.revision}.json"


def known_listing(name: HubName, kind: Kind) -> Listing | None:
    path = listing_path(name, kind)
    if not is_file(path):
        return None
    files = read_json_object(path)["files"]
    return Listing(str(name.revision), {file: RemoteFile(**entry) for file, entry in files.items()})


class VerifiedFiles:
    """The files whose digest was compared with that of the hub, by size and modification time, so that this is done
    once."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, list[int]] = read_json_object_if_there(path)

    def has(self, file: Path) -> bool:
        return is_file(file) and self._known.get(str(file)) == self._state(file)

    def add(self, files: Sequence[Path]) -> None:
        self._known.update({str(file): self._state(file) for file in files})
        write_text_atomic(self._path, json.dumps(self._known, indent=1) + "\n")

    @staticmethod
    def _state(file: Path) -> list[int]:
        found = file.stat()
        return [found.st_size, found.st_mtime_ns]
