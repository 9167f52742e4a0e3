"""Remote data, fetched to files of the cache: URLs, and data sets of the Hugging Face library.

    hf:OWNER/NAME?split=train                           a data set of a hub; also config=, revision=, rows=
    hf:OWNER/NAME/rows.jsonl, ms:OWNER/NAME             a file of one, or all its files with rows: see `llmsuite.hub`
    https://host/rows.jsonl, s3://bucket/rows.parquet   https, or what fsspec opens; each start asks for a newer version
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

from llmsuite.cache import cache_root, locked
from llmsuite.errors import UserError
from llmsuite.files import sha256_of
from llmsuite.hub.fetch import fetch as fetch_hub
from llmsuite.hub.fetch import find_commit
from llmsuite.hub.here import pin, pinned
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.regular import is_file, listed, open_regular
from llmsuite.shown import Url, redacted
from llmsuite.web.client import HttpFailure, get

Report = Callable[[str], None]
_Source = tuple[str, Callable[[int], Iterator[bytes]]]
"""The version of a file, and what gives its content in so many bytes at most."""
_OPTIONS = ("split", "config", "revision", "rows")
_SHARE_OF_DISK = 0.9
_PIECE = 1 << 20


def is_remote(name: str) -> bool:
    """Whether data of this name has to be fetched to a file first."""
    return "://" in name or is_file(Path(name) / "state.json") or hub_name(name) is not None


def saved_rows(name: str) -> Iterator[tuple[str, Any, str | None]] | None:
    """As `llmsuite.data.read.raw_rows`, of a directory that `Dataset.save_to_disk` wrote, without a copy of it; None
    for any other name. Raises UserError when it cannot be read."""
    return _saved_rows(Path(name)) if is_file(Path(name) / "state.json") else None


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
                        # as `_converted` writes it
                        yield f"{directory}: row {number}", json.loads(json.dumps(row, default=str)), None
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{directory}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def pin_data(given: str, report: Report) -> str:
    """The name of data with its hub and the commit that is there now; what is on no hub unchanged.

    Raises:
        UserError: no hub has it or can be asked, and it was never fetched before.
    """
    name = hub_name(pinned(given, "dataset"))
    if name is None or name.is_pinned:
        return str(name or given)
    exact = find_commit(name, report)
    pin(given, exact, "dataset")
    return str(exact)


def fetch(name: str, report: Report) -> Path:
    """The file of the cache with this data; what `report` is told has no secrets of its address.

    Raises:
        UserError: it cannot be reached and is not in the cache, or a package is missing that reads it.
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
    source = _load_dataset if is_set else None if "://" in name else _load_saved
    directory = cache_root() / "remote" / hashlib.sha256(name.encode()).hexdigest()[:32]
    with locked(directory / "lock"):
        if source is not None:
            return _converted(name, directory, source, report)
        return _downloaded(Url(name), directory, report)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What was fetched of an address before."""

    version: str
    file: Path


class _NotFetched(Exception):
    """Data that does not come; the text says why."""


def _downloaded(url: Url, directory: Path, report: Report) -> Path:
    """The file of an address, fetched where there is another version than the one that was."""
    note, part = directory / "source.json", directory / "part"
    known = _known(note)
    source = _by_http if url.whole.lower().startswith(("http://", "https://")) else _by_fsspec
    try:
        with source(url) as (version, pieces):
            if known is not None and known.version == version:
                return known.file
            report(f"fetching {url}")
            _write(part, pieces)
    except _NotFetched as error:
        part.unlink(missing_ok=True)
        if known is not None:
            report(f"{url}: cannot be reached ({error}); going on with what was fetched before")
            return known.file
        raise UserError(f"{url}: cannot be fetched: {error}") from None  # a traceback would show the whole address
    file = _kept(part, directory, url.name or "data")
    note.write_text(json.dumps({"url": str(url), "version": version, "file": str(file)}))
    return file


def _known(note: Path) -> _Known | None:
    if not is_file(note):
        return None
    found = json.loads(note.read_text())
    known = _Known(found["version"], Path(found["file"]))
    return known if is_file(known.file) else None


def _write(part: Path, pieces: Callable[[int], Iterator[bytes]]) -> None:
    """Write what comes into a file; it may take `_SHARE_OF_DISK` of what is free. Raises _NotFetched."""
    most = int(shutil.disk_usage(part.parent).free * _SHARE_OF_DISK)
    try:
        with open(part, "wb") as out:
            for piece in pieces(most):
                out.write(piece)
    except OSError as error:
        raise _NotFetched(f"{part}: {error.strerror or error}") from error


@contextlib.contextmanager
def _by_http(url: Url) -> Iterator[_Source]:
    """The version of a file, and its content in so many bytes at most. Raises _NotFetched."""
    try:
        with get(url) as answer:
            headers = {name: answer.headers[name] for name in ("ETag", "Last-Modified")}
            yield _version({**headers, "size": answer.headers["Content-Length"]}), answer.chunks
    except HttpFailure as error:
        raise _NotFetched(error.what) from error


@contextlib.contextmanager
def _by_fsspec(url: Url) -> Iterator[_Source]:
    """The same, of whatever other protocol."""
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"{url}: needs the package fsspec; install it with: pip install fsspec") from error

    def pieces(most: int) -> Iterator[bytes]:
        left = most
        with _explained(), system.open(path, "rb") as file:
            while piece := file.read(_PIECE):
                left -= len(piece)
                if left < 0:
                    raise _NotFetched(f"it has more than {most:,} bytes, which is what the disk has room for")
                yield piece

    with _explained():
        system, path = fsspec.core.url_to_fs(url.whole)
        version = _version(system.info(path))
    yield version, pieces


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises errors of fsspec as _NotFetched."""
    try:
        yield
    except _NotFetched:
        raise
    except Exception as error:  # each protocol has errors of its own
        raise _NotFetched(redacted(str(error)) or type(error).__name__) from error


def _version(info: dict[str, Any]) -> str:
    """A text that differs between versions of a remote file, as far as its protocol shows them."""
    keys = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "size")
    return json.dumps({key: str(info[key]) for key in keys if info.get(key) is not None})


def _kept(part: Path, directory: Path, name: str) -> Path:
    """The file under the name of its content, so that whoever reads an older version keeps it."""
    file = directory / sha256_of(part)[:16] / name
    file.parent.mkdir(exist_ok=True)
    part.replace(file)
    return file


def _converted(name: str, directory: Path, load: Callable[[str], Any], report: Report) -> Path:
    """Rows of a data set as JSON Lines."""
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
    except Exception as error:  # the library raises errors of many others
        raise UserError(f"{name}: cannot be read: {error or type(error).__name__}") from error
    if load is _load_dataset:
        return part.replace(found)
    return _kept(part, directory, "rows.jsonl")


def _load_dataset(name: str) -> Any:
    """A data set of the hub, or of a directory of files: `hf:///DIRECTORY`."""
    import datasets

    found = hub_name(name)
    parts = urllib.parse.urlsplit(name if found is None else f"hf://{found.repo}?{found.query}")
    query = dict(urllib.parse.parse_qsl(parts.query))
    if unknown := sorted(query.keys() - set(_OPTIONS)):
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
