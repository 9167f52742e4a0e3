"""Fetches public data sets and converts them to files that recipes can read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import committed_directory, sha256_of
from llmsuite.base.redaction import redacted
from llmsuite.base.safe_files import exists
from llmsuite.contract.specs import DataFormat
from llmsuite.data.archives import read_members
from llmsuite.data.indexed_corpus import IndexedCorpus
from llmsuite.data.keys import ALL, ColumnRules
from llmsuite.data.read import read_rows
from llmsuite.data.remote import fetch

_SPLITS = {"train": "train", "dev": "eval", "eval": "eval", "test": "eval", "valid": "eval", "validation": "eval"}


@dataclasses.dataclass(frozen=True)
class PublicDataset:
    """A public data set that PaddleNLP's examples train on."""

    help: str
    url: str
    """Address of an archive; for a corpus, the prefix of its two files."""
    kind: str
    """The type of its rows, see `llmsuite.data.rows`; "corpus" for an indexed corpus."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys of its rows to rename -> the keys of our formats."""


_BOS = "https://bj.bcebos.com/paddlenlp"
DATASETS = {
    "advertisegen": PublicDataset(
        "AdvertiseGen: advertisements in Chinese, for sft",
        f"{_BOS}/datasets/examples/AdvertiseGen.tar.gz",
        "conversation",
        {"content": "src", "summary": "tgt"},
    ),
    "ultrafeedback": PublicDataset(
        "UltraFeedback, binarized: pairs of answers, for dpo",
        f"{_BOS}/datasets/examples/ultrafeedback_binarized.tar.gz",
        "preference",
    ),
    "openwebtext-100k": PublicDataset(
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
    """Fetch a data set into a new directory: train.jsonl and eval.jsonl, or corpus.bin and corpus.idx.

    Args:
        name: one of `DATASETS`.
        target: must not exist.
        formats: the registered data formats.
        report: receives progress messages for the user.
        url: of a mirror.
        sha256: expected digest of the archive, or of the .bin of a corpus.

    Raises:
        UserError: it cannot be fetched, has another digest, is unsafe to unpack, or has faulty rows.
    """
    found = DATASETS[name]
    if exists(target):
        raise UserError(f"{target}: exists; choose another --output")
    source = url or found.url
    if found.kind == "corpus":
        files = [fetch(f"{source}.{suffix}", report) for suffix in ("bin", "idx")]
    else:
        files = [fetch(source, report)]
    actual = sha256_of(files[0])
    if sha256 is not None and actual != sha256.lower():
        raise UserError(f"{source}: has sha256 {actual}, and --sha256 says {sha256}; it is damaged or another file")
    shown = redacted(source)
    comparison = "; not compared, no --sha256"
    if sha256:
        comparison = ", as --sha256 says"
    report(f"{shown}: sha256 {actual}{comparison}")
    with committed_directory(target, {"source": shown, "sha256": actual}) as directory:
        if found.kind == "corpus":
            for file in files:
                shutil.copyfile(file, directory / f"corpus{file.suffix}")
            corpus = IndexedCorpus(directory / "corpus.idx")
            report(f"{target}: {corpus.num_documents:,} documents, {len(corpus.tokens):,} tokens")
            return
        splits = _convert(files[0], directory, found.rename)
        for split in sorted(splits):
            columns = ColumnRules(ignored=(ALL,))  # which columns to ignore is the recipe's choice
            rows = read_rows(directory / f"{split}.jsonl", found.kind, "auto", formats, columns=columns)
            report(f"{target / split}.jsonl: {len(rows):,} rows")


def _convert(archive: Path, directory: Path, rename: Mapping[str, str]) -> set[str]:
    """Write the rows of every file of an archive that is named as a split. Returns the names of the splits."""
    splits: set[str] = set()
    for member, content in read_members(archive, lambda name: _split_of(name) is not None):
        split = _split_of(member)
        assert split is not None, "only splits are selected"
        if split in splits:
            raise UserError(f"{archive}: has two files for {split}, the second is {member}")
        splits.add(split)
        with open(directory / f"{split}.jsonl", "w", encoding="utf-8") as out:
            for row in _rows(content, f"{archive}: {member}"):
                out.write(json.dumps({rename.get(k, k): v for k, v in row.items()}, ensure_ascii=False) + "\n")
    if "train" not in splits:
        raise UserError(f"{archive}: has no train.json or train.jsonl")
    return splits


def _split_of(member: str) -> str | None:
    """Return the split that a file of an archive is named as; None for other files."""
    stem = PurePosixPath(member).name.partition(".")[0]
    split = _SPLITS.get(stem.partition("_")[0].lower())
    if member.endswith((".json", ".jsonl")):
        return split
    return None


def _rows(data: bytes, where: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON list or of JSON Lines, whatever the name of the file."""
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
