"""The files of a repository of a hub, and the selection of those that a run needs."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_weight_map, sha256_of
from llmsuite.base.hub.names import HubName
from llmsuite.base.safe_files import is_file

Kind = Literal["model", "dataset"]
_CHUNK = 1 << 20


class Want(enum.Enum):
    """The part of a repository that is needed."""

    CONFIG = "config"
    TOKENIZER = "tokenizer"
    MODEL = "model"
    FILE = "file"
    ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    size: int | None
    digest: str | None = None
    """`sha256:HEX` of its content, or `git:HEX`, its blob id in git; None where the hub does not report one."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    revision: str
    """The commit; the name of a branch where a hub reports no commit."""
    files: Mapping[str, RemoteFile]


class Unreachable(UserError):
    """A hub does not answer: files fetched before may be used."""


class NotOnHub(UserError):
    """A hub has no such repository: another one may have it."""


class Interrupted(Exception):
    """A download broke off; the part that has arrived is kept, and another attempt resumes from there."""


class Hub(Protocol):
    """The interface to the library of a hub. Every method raises UserError, which says how to correct the input."""

    def listing(self, name: HubName, kind: Kind) -> Listing:
        """Request the files of a repository. Raises also NotOnHub or Unreachable."""

    def directory(self, name: HubName, kind: Kind) -> Path | None:
        """Return the directory of a revision on this machine, which may not exist yet, without contacting the hub; None
        where it is unknown."""

    def begin(self, name: HubName, kind: Kind, listing: Listing) -> Path:
        """Make the directory for files of this revision."""

    def download(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        """Fetch one file, resuming an earlier attempt. Raises Interrupted when it breaks off."""

    def received(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> int:
        """Return the bytes of a file that are on disk, finished or not."""

    def discard(self, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
        """Remove a file that differs from that of the hub, finished or not."""


_CONFIGS = ("config.json", "adapter_config.json", "lora_config.json", "base.json", "generation_config.json")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
              "*.tiktoken", "chat_template*", "sentencepiece*", "spiece*")  # fmt: skip
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_TENSORS = (".safetensors", ".safetensors.index.json")
_COMPRESSIONS = ("", ".gz", ".zst")
_ROWS = tuple(f"*.{kind}{packed}" for kind in ("json", "jsonl", "parquet") for packed in _COMPRESSIONS)
_TABLES = tuple(f"*.{kind}{packed}" for kind in ("csv", "tsv") for packed in _COMPRESSIONS)
"""Tables are often lists of the other files, so they are rows only where there are no other files."""


def select(name: HubName, listing: Listing, want: Want) -> list[str]:
    """The required files: of a model the safetensors, config and tokenizer at the top; no copies in other formats.

    Raises:
        UserError: the repository has none; the message lists its files.
    """
    everything = sorted(listing.files)
    if want is Want.FILE:
        if name.path not in listing.files:
            near = ", ".join(path for path in everything if Path(path).suffix == Path(name.path).suffix)
            raise UserError(f"{name}: has no file {name.path}; it has {near or ', '.join(everything[:20])}")
        return [name.path]
    if want is Want.ROWS:
        shown = [path for path in everything if not path.startswith(".")]
        found = [path for path in shown if _matches(Path(path).name, _ROWS)]
        plain = [path for path in found if Path(path).name not in ("dataset_infos.json", "dataset_info.json")]
        plain = plain or [path for path in shown if _matches(Path(path).name, _TABLES)]
        if not plain:
            raise UserError(
                f"{name}: has no .json, .jsonl, .parquet, .csv or .tsv file; it has {', '.join(everything[:20])}"
            )
        return plain
    top = [path for path in everything if "/" not in path]
    configs = [path for path in top if path in _CONFIGS]
    if want is Want.CONFIG:
        if not configs:
            raise UserError(f"{name}: has no config.json; it has {', '.join(everything[:20])}")
        return configs
    small = [path for path in top if path in _CONFIGS or _matches(path, _TOKENIZER)]
    if want is Want.TOKENIZER:
        if not any(_matches(path, _TOKENIZER) for path in top):
            raise UserError(f"{name}: has no tokenizer; it has {', '.join(everything[:20])}")
        return small
    return sorted({*small, *_tensors(name, top, everything)})


def _tensors(name: HubName, top: Sequence[str], everything: Sequence[str]) -> list[str]:
    found = [path for path in top if path.endswith(_TENSORS) and not path.startswith("consolidated")]
    if any(_SHARD.fullmatch(path) for path in found):  # there may also be variants such as model.fp16.safetensors
        found = [p for p in found if not re.match(r"model[.-]", p) or _SHARD.fullmatch(p) or p.endswith(".index.json")]
        found = [p for p in found if p in ("model.safetensors.index.json",) or not re.match(r"model\..*\.index", p)]
    if "model.safetensors.index.json" in found:  # then model.safetensors is a copy of all shards
        found = [path for path in found if path != "model.safetensors"]
    if any(path.endswith(".safetensors") for path in found):
        return found
    if packed := [path for path in everything if path.endswith(".gguf")]:
        file = dataclasses.replace(name, path=packed[0])
        hint = f"import one of its GGUF files: llmsuite import {file} -o DIR"
    elif any(path.endswith((".bin", ".pth", ".pt", ".pdparams")) for path in everything):
        hint = (
            "its weights are pickles, which can run code when they are read; choose a revision or a copy of it with "
            "safetensors (many have one as @refs/pr/N)"
        )
    else:
        hint = f"it has {', '.join(everything[:20]) or 'no files'}"
    raise UserError(f"{name}: has no safetensors; {hint}")


def missing_by_content(directory: Path, want: Want, path: str = "") -> list[str]:
    """The files that a directory lacks, as far as its own files show; for files that another program has fetched."""
    here = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if is_file(p)}
    if want is Want.FILE:
        return [] if path in here else [path]
    if want is Want.ROWS:
        if any(_matches(Path(p).name, _ROWS) for p in here):
            return []
        return ["files with rows"]
    has_config = any(name in here for name in _CONFIGS[:3])
    if want is Want.TOKENIZER:
        if any(p in here for p in ("tokenizer.json", "tokenizer_config.json")):
            return []
        return ["tokenizer.json"]
    lacking = [] if has_config else ["config.json"]
    if want is Want.CONFIG:
        return lacking
    for index in (p for p in here if p.endswith(".safetensors.index.json")):
        try:
            expected = set(read_weight_map(directory / index).values())
        except UserError:  # reported when the model is read
            expected = {index}
        lacking += sorted(expected - here)
    if not any(p.endswith(".safetensors") for p in here):
        lacking.append("model.safetensors")
    return lacking


def matches_digest(path: Path, file: RemoteFile) -> bool:
    """True where a file has the size and the digest on its hub, as far as they are known."""
    if file.size is not None and path.stat().st_size != file.size:
        return False
    if file.digest is None:
        return True
    kind, _, expected = file.digest.partition(":")
    return (sha256_of(path) if kind == "sha256" else git_digest(path)) == expected


def git_digest(path: Path) -> str:
    """The blob id of a file in git."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


Report = Callable[[str], None]
