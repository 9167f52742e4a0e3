"""Public sets of data, fetched and brought into shapes that recipes read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from llmsuite.data.indexed import IndexedCorpus
from llmsuite.data.read import read_rows
from llmsuite.data.remote import fetch
from llmsuite.errors import UserError
from llmsuite.files import committed_directory, sha256_of
from llmsuite.specs import DataFormat

_SPLITS = {"train": "train", "dev": "eval", "eval": "eval", "test": "eval", "valid": "eval", "validation": "eval"}
_MOST_RATIO, _ALWAYS_FINE = 100, 64 << 20


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """A public data set that PaddleNLP's examples train on."""

    help: str
    url: str
    """Address of an archive; for a corpus, the prefix of its two files."""
    kind: str
    """The type of its rows, see `llmsuite.data.rows`; "corpus" for an indexed corpus."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys of its rows to rename, with the names of our formats."""


_BOS = "https://bj.bcebos.com/paddlenlp"
SETS = {
    "advertisegen": PublicSet(
        "AdvertiseGen: advertisements in Chinese, for sft",
        f"{_BOS}/datasets/examples/AdvertiseGen.tar.gz",
        "conversation",
        {"content": "src", "summary": "tgt"},
    ),
    "ultrafeedback": PublicSet(
        "UltraFeedback, binarized: pairs of answers, for dpo",
        f"{_BOS}/datasets/examples/ultrafeedback_binarized.tar.gz",
        "preference",
    ),
    "openwebtext-100k": PublicSet(
        "100,000 documents of OpenWebText with the tokens of Llama, for pretraining",
        f"{_BOS}/models/transformers/llama/data/llama_openwebtext_100k",
        "corpus",
    ),
}


def prepare(
    name: str,
    target: Path,
    formats: Mapping[str, DataFormat],
    report: Callable[[str], None],
    url: str | None = None,
    sha256: str | None = None,
) -> None:
    """Fetch a set and write it into a new directory: train.jsonl and eval.jsonl, or corpus.bin and corpus.idx.

    Args:
        name: one of SETS.
        target: must not exist.
        formats: the registered data formats.
        report: tells the user what happens.
        url: of a mirror.
        sha256: expected digest of the archive, or of the .bin of a corpus.

    Raises:
        UserError: it cannot be fetched, is not the one that was meant, is unsafe to unpack, or has faulty rows.
    """
    found = SETS[name]
    if target.exists():
        raise UserError(f"{target}: exists; choose another --output")
    source = url or found.url
    if found.kind == "corpus":
        files = [fetch(f"{source}.{suffix}", report) for suffix in ("bin", "idx")]
    else:
        files = [fetch(source, report)]
    actual = sha256_of(files[0])
    if sha256 is not None and actual != sha256.lower():
        raise UserError(f"{source}: has sha256 {actual}, and --sha256 says {sha256}; it is damaged or another file")
    report(f"{source}: sha256 {actual}" + (", as --sha256 says" if sha256 else "; not compared, no --sha256"))
    with committed_directory(target, {"source": source, "sha256": actual}) as directory:
        if found.kind == "corpus":
            for file in files:
                shutil.copyfile(file, directory / f"corpus{file.suffix}")
            corpus = IndexedCorpus(directory / "corpus.idx")
            report(f"{target}: {corpus.num_documents:,} documents, {len(corpus.tokens):,} tokens")
            return
        splits = _convert(files[0], directory, found.rename)
        for split in sorted(splits):
            rows = read_rows(directory / f"{split}.jsonl", found.kind, "auto", formats)
            report(f"{target / split}.jsonl: {len(rows):,} rows")


def _convert(archive: Path, directory: Path, rename: Mapping[str, str]) -> set[str]:
    """The rows of every file of an archive that is named as a split."""
    splits: set[str] = set()
    for member, stream in members(archive):
        stem = PurePosixPath(member).name.partition(".")[0]
        split = _SPLITS.get(stem.partition("_")[0].lower())
        if split is None or not member.endswith((".json", ".jsonl")):
            continue
        if split in splits:
            raise UserError(f"{archive}: has two files for {split}, the second is {member}")
        splits.add(split)
        with open(directory / f"{split}.jsonl", "w", encoding="utf-8") as out:
            for row in _rows(stream, f"{archive}: {member}"):
                out.write(json.dumps({rename.get(k, k): v for k, v in row.items()}, ensure_ascii=False) + "\n")
    if "train" not in splits:
        raise UserError(f"{archive}: has no train.json or train.jsonl")
    return splits


def _rows(stream: IO[bytes], where: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSON list or of JSON Lines, whatever the file is called."""
    data = stream.read()
    try:
        if data.lstrip()[:1] == b"[":
            rows = json.loads(data)
        else:
            rows = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{where}: row {number}: is a {type(row).__name__}, not an object")
        yield row


def members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a .tar, .tar.gz or .zip, each to be read before the next. Nothing is unpacked to disk.

    Raises:
        UserError: it is no archive, has a name that leads out of it, a link or a device, or unpacks to far more bytes.
    """
    most = max(_ALWAYS_FINE, _MOST_RATIO * archive.stat().st_size)
    with contextlib.ExitStack() as stack:
        try:
            entries: list[_Entry]
            if zipfile.is_zipfile(archive):
                zipped = stack.enter_context(zipfile.ZipFile(archive))
                entries = [_Entry(i.filename, i.file_size, not i.is_dir()) for i in zipped.infolist()]
                opened: Callable[[str], Any] = zipped.open
            else:
                tar = stack.enter_context(tarfile.open(archive))
                entries = []
                for i in tar:
                    entries.append(_Entry(i.name, i.size, i.isreg(), is_special=not (i.isreg() or i.isdir())))
                    _check(archive, entries, most)  # a bomb is noticed before it is read through
                opened = tar.extractfile
            _check(archive, entries, most)
            for entry in entries:
                if entry.is_file:
                    with opened(entry.name) as stream:
                        yield entry.name, stream
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise UserError(f"{archive}: is no whole .tar, .tar.gz or .zip: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Entry:
    name: str
    size: int
    is_file: bool
    is_special: bool = False


def _check(archive: Path, entries: Sequence[_Entry], most: int) -> None:
    for entry in entries:
        path = PurePosixPath(entry.name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in entry.name:
            raise UserError(f"{archive}: {entry.name!r} leads out of the archive; nothing was unpacked")
        if entry.is_special:
            raise UserError(f"{archive}: {entry.name!r} is a link or a device, as no set of data has")
    if sum(entry.size for entry in entries) > most:
        raise UserError(f"{archive}: unpacks to more than {_MOST_RATIO} times its size, as no text does")
