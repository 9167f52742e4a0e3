"""Only regular files are read, by every reader of untrusted data, and only a directory's own files are copied."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_file
from llmsuite.base.safe_files import (
    copy_regular,
    exists,
    is_dir,
    is_file,
    listed,
    open_at_once,
    open_regular,
    path_name_error,
    read_regular,
)
from llmsuite.checkpoint.convert.gguf_header import check_header
from llmsuite.checkpoint.convert.pickled import read_pickle
from llmsuite.checkpoint.stored import read_header
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.cli.evaluate import read_texts
from llmsuite.contract.given import load_file
from llmsuite.data.archives import read_members
from llmsuite.data.indexed_corpus import IndexedCorpus
from llmsuite.data.read import raw_rows
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.observe.completions import sampled_completions
from llmsuite.observe.events import read_events
from llmsuite.observe.generations import sampled_generations
from llmsuite.observe.runs import read_run
from llmsuite.recipe.document import read_document
from tests.support.paths import DATA, ROOT


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


def in_seconds(act: Callable[[], Any], seconds: int = 30) -> Any:
    """What an act gives, which must not hang."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return act()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def odd(kind: str, path: Path) -> None:
    """Something in the place of a file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # the name of a socket may have 107 bytes
            made.bind(path.name)


RUN_FILES = ("environment.json", "events.jsonl", "completions.jsonl", "generations/step-1.jsonl", "report.html")


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("kind", ["pipe", "loop", "socket"])
def test_a_run_with_an_odd_file_is_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / "generations").mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"schema": 1, "step": 1, "loss": 2.0}\n')
    odd(kind, run / name)

    def read() -> Any:
        found = read_run(run)
        return [found.steps, read_events(run), sampled_completions(run, 3, 3), sampled_generations(run, 3, 3)]

    assert in_seconds(read)[0][0]["loss"] == 2.0


@pytest.mark.parametrize("kind", ["pipe", "loop", "socket"])
def test_a_named_file_that_is_odd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("recipe.json", "texts.txt", "plugin.py"):
        odd(kind, tmp_path / name)
    with pytest.raises(UserError):
        in_seconds(lambda: read_document(tmp_path / "recipe.json"))
    if kind != "pipe":
        with pytest.raises(UserError):
            in_seconds(lambda: read_texts(tmp_path / "texts.txt", "text"))
    with pytest.raises(UserError, match="is not a Python file"):
        in_seconds(lambda: load_file(tmp_path / "plugin.py"))


def test_a_pipe_of_a_shell_is_read_to_its_end(tmp_path: Path) -> None:
    """As by `llmsuite validate <(command)`."""
    read, write = os.pipe()
    os.write(write, b"[1, 2]")
    os.close(write)
    with open_at_once(f"/dev/fd/{read}") as file:
        assert file.read() == b"[1, 2]"
    os.close(read)


def test_links_of_others_are_followed_by_real_path_alone() -> None:
    """`Path.resolve` raises RuntimeError for a loop, before Python 3.13."""
    own = {"base/resources.py", "base/cache.py", "observe/loggers.py", "base/hub/huggingface.py"}
    for path in (ROOT / "llmsuite").rglob("*.py"):
        text = path.read_text(encoding="utf-8").replace('bundled("data").resolve()', "")
        name = path.relative_to(ROOT / "llmsuite").as_posix()
        assert ".resolve()" not in text or name in own, f"{name}: use real_path"
