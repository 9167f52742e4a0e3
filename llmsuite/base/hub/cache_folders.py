"""The part of llmsuite's cache for hubs whose library does not separate commits: a directory for each revision."""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.cache import cache_root
from llmsuite.base.hub.listing import Kind, Listing, RemoteFile
from llmsuite.base.hub.names import HubName
from llmsuite.base.safe_files import is_file

DEFAULT_BRANCH = "master"
PARTS = (".incomplete", ".parallel_tmp")
"""Suffixes of unfinished files."""


class CacheFolders:
    """The methods of `llmsuite.base.hub.listing.Hub` for files on this machine."""

    def directory(self, name: HubName, kind: Kind) -> Path | None:
        reference = self._reference(name, kind)
        if is_file(reference):
            return self._root(name, kind) / "snapshots" / reference.read_text(encoding="utf-8").strip()
        if name.revision:
            return self._root(name, kind) / "snapshots" / name.revision
        return None

    def begin(self, name: HubName, kind: Kind, listing: Listing) -> Path:
        directory = self._root(name, kind) / "snapshots" / listing.revision
        directory.mkdir(parents=True, exist_ok=True)
        if name.revision != listing.revision:
            reference = self._reference(name, kind)
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(listing.revision, encoding="utf-8")
        return directory

    def received(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> int:
        return sum(found.stat().st_size for found in self._parts(name, kind, path) if is_file(found))

    def discard(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        for found in self._parts(name, kind, path):
            found.unlink(missing_ok=True)

    def _parts(self, name: HubName, kind: Kind, path: str) -> list[Path]:
        directory = self.directory(name, kind)
        if directory is None:
            return []
        return [directory / f"{path}{end}" for end in ("", *PARTS)]

    def _root(self, name: HubName, kind: Kind) -> Path:
        return cache_root() / "hub" / name.hub / "--".join([f"{kind}s", *name.repo.split("/")])

    def _reference(self, name: HubName, kind: Kind) -> Path:
        return self._root(name, kind) / "refs" / (name.revision or DEFAULT_BRANCH)
