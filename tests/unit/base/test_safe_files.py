"""Only regular files are read, by every reader of untrusted data, and only a directory's own files are copied."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_file
from llmsuite.base.safe_files import (
    copy_regular,
    exists,
    is_dir,
    is_file,
    listed,
    open_regular,
    path_name_error,
    read_regular,
)
from llmsuite.checkpoint.convert.gguf_header import check_header
from llmsuite.checkpoint.convert.pickled import read_pickle
from llmsuite.checkpoint.stored import read_header
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.data.archives import read_members
from llmsuite.data.indexed_corpus import IndexedCorpus
from llmsuite.data.read import raw_rows
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import DATA


@contextlib.contextmanager
def pipe(path: Path) -> Iterator[Path]:
    """A pipe that a reader would find empty, so that one that opens it does not wait for ever."""
    os.mkfifo(path)

    def write() -> None:
        while not done.is_set():
            with open(path, "wb"):
                pass

    done = threading.Event()
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        done.set()
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        thread.join(30)
        os.close(descriptor)


def corpus(path: Path) -> None:
    path.with_suffix(".bin").write_bytes(b"\0\0")
    IndexedCorpus(path)


def tensors(path: Path) -> None:
    weights = {"weight_map": {"a": path.name}}
    (path.parent / "model.safetensors.index.json").write_text(json.dumps(weights))
    TensorFiles(path.parent, "model").spec("a")


def vocabulary(path: Path) -> None:
    (path.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    TextTokenizer(path.parent)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("model.safetensors", read_header),
    ("model-1.safetensors", tensors),
    ("config.json", read_json_file),
    ("tokenizer_config.json", read_json_file),
    ("sentencepiece.bpe.model", vocabulary),
    ("model.gguf", check_header),
    ("model.pdparams", read_pickle),
    ("rows.jsonl", lambda path: list(raw_rows(path))),
    ("rows.jsonl.gz", lambda path: list(raw_rows(path))),
    ("rows.json", lambda path: list(raw_rows(path))),
    ("rows.parquet", lambda path: list(raw_rows(path))),
    ("web.idx", corpus),
    ("set.tar.gz", lambda path: list(read_members(path))),
]


@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_no_reader_waits_for_a_pipe(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    with pipe(tmp_path / name), pytest.raises(UserError, match=rf"{name}: .*is a pipe, not a regular file"):
        read(tmp_path / name)


@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_no_reader_reads_a_device(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=rf"{name}: .*is a device, not a regular file"):
        read(tmp_path / name)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert (read_regular(tmp_path / "file"), read_regular(tmp_path / "link", 7)) == (b"content", b"content")
    with pytest.raises(OSError, match="has 7 bytes; at most 6 are read"):
        read_regular(tmp_path / "file", 6)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


def test_links_within_a_directory_or_a_hubs_cache_are_copied(tmp_path: Path) -> None:
    blobs = tmp_path / "model" / "blobs"
    snapshot = tmp_path / "model" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "a.json").symlink_to("../../blobs/1")
    (snapshot / "b.json").symlink_to("a.json")
    for name in ("a.json", "b.json"):
        copy_regular(snapshot / name, tmp_path / name)
        assert (tmp_path / name).read_text() == "{}"
        assert not (tmp_path / name).is_symlink()


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "chat_template.jinja", "special_tokens_map.json"])
def test_what_lies_elsewhere_is_not_copied(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("{}")
    source = tmp_path / "source"
    target = tmp_path / "target"
    shutil.copytree(DATA / "tokenizer", source)
    target.mkdir()
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(UserError, match=rf"{name}: cannot be copied: is a link to .*secret; put a copy"):
        copy_tokenizer(source, target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("text", ["root:x:0:0", "[]", '"text"', "{"])
def test_what_is_no_tokenizer_is_not_copied(tmp_path: Path, text: str) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    shutil.copytree(DATA / "tokenizer", source)
    target.mkdir()
    (source / "special_tokens_map.json").write_text(text)
    with pytest.raises(UserError, match=r"special_tokens_map\.json: is (not JSON|.*not an object)"):
        copy_tokenizer(source, target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "a\0b", "\ud800", "file/x", "none", "loop"])
def test_impossible_names_do_not_exist(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    assert (is_file(path), is_dir(path), exists(path), listed(path)) == (False, False, False, [])
    with pytest.raises(UserError, match="cannot be read"):
        read_json_file(path)
    assert (path_name_error(path) is None) == (name in ("file/x", "none", "loop"))


def test_existing_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("b")
    found = {path.name: (is_file(path), is_dir(path), exists(path)) for path in listed(tmp_path)}
    assert found == {"a": (False, True, True), "b": (True, False, True), "link": (True, False, True)}


def test_a_missing_permission_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match="x: cannot be looked at: Permission denied"):
        is_file(tmp_path / "x")
