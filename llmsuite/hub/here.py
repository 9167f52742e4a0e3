"""What of the hubs is on this machine, and the commits that this run reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from llmsuite.cache import cache_root
from llmsuite.errors import UserError
from llmsuite.files import read_json_object, write_text_atomic
from llmsuite.hub.huggingface import HuggingFace
from llmsuite.hub.listing import Hub, Kind, Listing, RemoteFile, Want, missing_parts, select
from llmsuite.hub.names import HubName, hub_order
from llmsuite.regular import is_dir, is_file

PINS = "LLMSUITE_HUB_PINS"


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Something of a hub on this machine."""

    name: HubName
    """Its name with the hub and the commit."""
    directory: Path

    @property
    def file(self) -> Path:
        """The file, where the name is that of one."""
        return self.directory / self.name.path


def open_hub(hub: str) -> Hub:
    """The hub of a name."""
    if hub == "ms":
        from llmsuite.hub.modelscope import ModelScope

        return ModelScope()
    if hub == "aistudio":
        from llmsuite.hub.aistudio import AIStudio

        return AIStudio()
    return HuggingFace()


def is_offline() -> bool:
    """Whether no hub may be asked: HF_HUB_OFFLINE, for all of them."""
    words = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.strip().upper() in ("1", "ON", "YES", "TRUE") for word in words)


def pin(given: str, fetched: HubName, kind: Kind = "model") -> None:
    """Remember for this process and those it starts which commit a name stands for."""
    known = known_pins()
    known[f"{kind} {given}"] = str(fetched)
    os.environ[PINS] = json.dumps(known)


def pinned(given: str, kind: Kind = "model") -> str:
    """A name with the commit it was pinned to; any other unchanged."""
    return known_pins().get(f"{kind} {given}", given)


def known_pins() -> dict[str, str]:
    """The pinned names. Raises UserError where the variable was set by hand, and not as `pin` does."""
    told = os.environ.get(PINS) or "{}"
    try:
        found = json.loads(told)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{PINS} is {told[:80]!r}; the launcher sets it for its ranks, as JSON of names: unset it")
    return found


def cached(name: HubName, want: Want, kind: Kind = "model") -> Fetched | None:
    """What is needed of a repository, if all of it is on this machine; no hub is asked."""
    for hub in [name.hub] if name.hub else hub_order():
        found = on_disk(name.at(hub, name.revision), kind)
        with contextlib.suppress(UserError):  # it never has what is needed, which fetching it will tell
            if found is not None and not lacking_files(found, want, kind):
                return found
    return None


def on_disk(name: HubName, kind: Kind) -> Fetched | None:
    directory = open_hub(name.hub).directory(name, kind)
    if directory is None or not is_dir(directory):
        return None
    return Fetched(name.at(name.hub, directory.name), directory)


def lacking_files(found: Fetched, want: Want, kind: Kind) -> list[str]:
    """The files that are not here: by the hub's list where llmsuite has fetched it, else by the files' own words."""
    listing = known_listing(found.name, kind)
    if listing is None:
        return missing_parts(found.directory, want, found.name.path)
    return [
        path
        for path in select(found.name, listing, want)
        if not is_file(found.directory / path)
        or listing.files[path].size not in (None, (found.directory / path).stat().st_size)
    ]


def is_checked(found: Fetched, want: Want, kind: Kind) -> bool:
    """Whether all that is needed was compared with the digests of the hub."""
    listing, checked = known_listing(found.name, kind), checked_files(found.name, kind)
    return listing is not None and all(checked.has(found.directory / p) for p in select(found.name, listing, want))


def checked_files(name: HubName, kind: Kind) -> Checked:
    return Checked(note_of(name, kind).with_suffix(".checked.json"))


def note_of(name: HubName, kind: Kind) -> Path:
    return cache_root() / "hub" / name.hub / "--".join([f"{kind}s", *name.repo.split("/")]) / f"{name.revision}.json"


def known_listing(name: HubName, kind: Kind) -> Listing | None:
    path = note_of(name, kind)
    if not is_file(path):
        return None
    files = read_json_object(path)["files"]
    return Listing(str(name.revision), {file: RemoteFile(**entry) for file, entry in files.items()})


class Checked:
    """The files whose digest was compared with that of the hub, by size and time, so that it is done once."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, list[int]] = read_json_object(path) if is_file(path) else {}

    def has(self, file: Path) -> bool:
        return is_file(file) and self._known.get(str(file)) == self._state(file)

    def add(self, files: Sequence[Path]) -> None:
        self._known.update({str(file): self._state(file) for file in files})
        write_text_atomic(self._path, json.dumps(self._known, indent=1) + "\n")

    @staticmethod
    def _state(file: Path) -> list[int]:
        found = file.stat()
        return [found.st_size, found.st_mtime_ns]
