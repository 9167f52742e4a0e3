"""Fetches remote data to files of the cache: URLs, and data sets of the Hugging Face library.

    hf:OWNER/NAME?split=train                           a data set of a hub; also config=, revision=, rows=
    hf:OWNER/NAME/rows.jsonl, ms:OWNER/NAME             one of its files, or all with rows: see `llmsuite.base.hub`
    https://host/rows.jsonl, s3://bucket/rows.parquet   https, or any URL of fsspec; checked for updates at each start
    hf://OWNER/NAME?split=train                         the same as hf:OWNER/NAME?split=train
    DIRECTORY                                           one that `Dataset.save_to_disk` wrote

Of processes that start together on an empty cache one fetches; the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmsuite.base.cache import cache_root, locked
from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.files import sha256_of
from llmsuite.base.hub.fetch import fetch as fetch_hub
from llmsuite.base.hub.fetch import find_commit
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import pin, pinned
from llmsuite.base.hub.names import hub_name
from llmsuite.base.redaction import Url, redacted
from llmsuite.base.safe_files import is_file, listed, open_regular
from llmsuite.base.web.client import HttpFailure, get

Report = Callable[[str], None]
_Source = tuple[str, Callable[[int], Iterator[bytes]]]
"""The version of a file, and a function that yields its content, limited to a number of bytes."""
_OPTIONS = ("split", "config", "revision", "rows")
_MAX_DISK_SHARE = 0.9
"""Part of the free disk that a file may take."""
_PIECE = 1 << 20


def is_remote(name: str) -> bool:
    """Return True if data of this name has to be fetched to a file first."""
    return "://" in name or is_file(Path(name) / "state.json") or hub_name(name) is not None


def saved_rows(name: str) -> Iterator[tuple[str, Any, str | None]] | None:
    """Return the rows of a directory that `Dataset.save_to_disk` wrote; None for any other name.

    They have the form of `llmsuite.data.read.raw_rows`, and no copy is made. Raises UserError when they cannot be read.
    """
    if is_file(Path(name) / "state.json"):
        return _saved_rows(Path(name))
    return None


def _saved_rows(directory: Path) -> Iterator[tuple[str, Any, str | None]]:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{directory}: needs the package datasets; install it with: pip install datasets") from error
    number = 0
    for file in listed(directory, "data-*.arrow"):
        try:
            with open_regular(file) as opened, pyarrow.ipc.open_stream(opened) as stream:
                for batch in stream:
                    for row in batch.to_pylist():
                        number += 1
                        # through JSON, so that a row is equal to its copy by `_converted`
                        yield f"{directory}: row {number}", json.loads(json.dumps(row, default=str)), None
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{directory}: cannot be read: {reason_of(error)}") from error


def pin_data(given: str, report: Report) -> str:
    """Return the name of data with its hub and current commit; a name that is on no hub is unchanged.

    Raises:
        UserError: no hub has it or can be reached, and it was never fetched before.
    """
    name = hub_name(pinned(given, "dataset"))
    if name is None or name.is_pinned:
        return str(name or given)
    exact = find_commit(name, report)
    pin(given, exact, "dataset")
    return str(exact)


def fetch(name: str, report: Report) -> Path:
    """Fetch data to a file of the cache.

    Args:
        name: address of the data.
        report: receives messages, which have no secrets of the address.

    Raises:
        UserError: it cannot be reached and is not in the cache, or a package to read it is missing.
    """
    found = hub_name(pinned(name, "dataset"))
    if found is not None:
        if not found.is_pinned:
            found = find_commit(found, report)
        if found.path or found.hub != "hf":
            here = fetch_hub(found, Want.FILE if found.path else Want.ROWS, report, "dataset")
            return here.file if found.path else here.directory
        name = str(found)
    is_set = found is not None or (name.startswith("hf://") and not name.startswith("hf://datasets/"))
    directory = cache_root() / "remote" / hashlib.sha256(name.encode()).hexdigest()[:32]
    with locked(directory / "lock"):
        if is_set:
            return _converted(name, directory, _load_dataset, report)
        if "://" not in name:
            return _converted(name, directory, _load_saved, report)
        return _downloaded(Url(name), directory, report)


@dataclasses.dataclass(frozen=True)
class _CacheEntry:
    """The last fetched version of an address."""

    version: str
    file: Path


class _NotFetched(Exception):
    """Data cannot be fetched; the text has the reason."""


def _downloaded(url: Url, directory: Path, report: Report) -> Path:
    """Return the file of an address, fetched if its version is not the cached one."""
    note = directory / "source.json"
    part = directory / "part"
    cached = _read_entry(note)
    source = _by_fsspec
    if url.full.lower().startswith(("http://", "https://")):
        source = _by_http
    try:
        with source(url) as (version, pieces):
            if cached is not None and cached.version == version:
                return cached.file
            report(f"fetching {url}")
            _write(part, pieces)
    except _NotFetched as error:
        part.unlink(missing_ok=True)
        if cached is not None:
            report(f"{url}: cannot be reached ({error}); continuing with the copy that was fetched before")
            return cached.file
        raise UserError(f"{url}: cannot be fetched: {error}") from None  # a traceback would show the full address
    file = _store(part, directory, url.name or "data")
    note.write_text(json.dumps({"url": str(url), "version": version, "file": str(file)}))
    return file


def _read_entry(note: Path) -> _CacheEntry | None:
    if not is_file(note):
        return None
    found = json.loads(note.read_text())
    cached = _CacheEntry(found["version"], Path(found["file"]))
    return cached if is_file(cached.file) else None


def _write(part: Path, pieces: Callable[[int], Iterator[bytes]]) -> None:
    """Write the content to a file; it may take `_MAX_DISK_SHARE` of the free disk. Raises _NotFetched."""
    limit = int(shutil.disk_usage(part.parent).free * _MAX_DISK_SHARE)
    try:
        with open(part, "wb") as out:
            for piece in pieces(limit):
                out.write(piece)
    except OSError as error:
        raise _NotFetched(f"{part}: {error.strerror or error}") from error


@contextlib.contextmanager
def _by_http(url: Url) -> Iterator[_Source]:
    """Open a file by HTTP. Raises _NotFetched."""
    try:
        with get(url) as answer:
            headers = {name: answer.headers[name] for name in ("ETag", "Last-Modified")}
            yield _version({**headers, "size": answer.headers["Content-Length"]}), answer.chunks
    except HttpFailure as error:
        raise _NotFetched(error.what) from error


@contextlib.contextmanager
def _by_fsspec(url: Url) -> Iterator[_Source]:
    """Open a file by any protocol of fsspec. Raises _NotFetched."""
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"{url}: needs the package fsspec; install it with: pip install fsspec") from error

    def pieces(limit: int) -> Iterator[bytes]:
        left = limit
        with _explained(), system.open(path, "rb") as file:
            while piece := file.read(_PIECE):
                left -= len(piece)
                if left < 0:
                    raise _NotFetched(f"it has more than {limit:,} bytes, which is what the disk has room for")
                yield piece

    with _explained():
        system, path = fsspec.core.url_to_fs(url.full)
        version = _version(system.info(path))
    yield version, pieces


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of fsspec as _NotFetched."""
    try:
        yield
    except _NotFetched:
        raise
    except Exception as error:  # each protocol has its own errors
        raise _NotFetched(redacted(str(error)) or type(error).__name__) from error


def _version(info: dict[str, Any]) -> str:
    """Return a text that differs between versions of a remote file, as far as its protocol shows them."""
    keys = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "size")
    return json.dumps({key: str(info[key]) for key in keys if info.get(key) is not None})


def _store(part: Path, directory: Path, name: str) -> Path:
    """Move a file to a directory named by its content, so that processes that read an older version keep it."""
    file = directory / sha256_of(part)[:16] / name
    file.parent.mkdir(exist_ok=True)
    part.replace(file)
    return file


def _converted(name: str, directory: Path, load: Callable[[str], Any], report: Report) -> Path:
    """Write the rows of a data set to JSON Lines."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: needs the package datasets; install it with: pip install datasets") from error
    found = directory / "rows.jsonl"
    if load is _load_dataset and is_file(found):
        return found
    report(f"reading {redacted(name)}")
    datasets.disable_progress_bars()
    part = directory / f"part-{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as out:
            for row in load(name):
                out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    except UserError:
        raise
    except Exception as error:  # the library raises errors of many other libraries
        raise UserError(f"{name}: cannot be read: {error or type(error).__name__}") from error
    if load is _load_dataset:
        return part.replace(found)
    return _store(part, directory, "rows.jsonl")


def _load_dataset(name: str) -> Any:
    """Load a data set of the hub, or of a directory of files: `hf:///DIRECTORY`."""
    import datasets

    found = hub_name(name)
    parts = urllib.parse.urlsplit(name if found is None else f"hf://{found.repo}?{found.query}")
    query = dict(urllib.parse.parse_qsl(parts.query))
    unknown = sorted(query.keys() - set(_OPTIONS))
    if unknown:
        raise UserError(f"{name}: has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}")
    rows = query.get("rows")
    if rows is not None and not rows.isdecimal():
        raise UserError(f"{name}: rows is {rows!r}, not a number")
    rows_of = datasets.load_dataset(
        parts.netloc + parts.path,
        query.get("config"),
        split=query.get("split"),
        revision=query.get("revision") or (found.revision if found is not None else None),
        streaming=rows is not None,
    )
    if isinstance(rows_of, dict):
        raise UserError(f"{name}: has the splits {', '.join(rows_of)}; add ?split= with one of them")
    return rows_of if rows is None else rows_of.take(int(rows))


def _load_saved(name: str) -> Any:
    import datasets

    return datasets.load_from_disk(name)
