"""Data that lies elsewhere: fetched once, whoever asks; public sets, and archives that mean harm."""

from __future__ import annotations

import functools
import http.server
import io
import json
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import sha256_of
from llmsuite.base.redaction import Url
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.data import archives
from llmsuite.data.archives import read_members
from llmsuite.data.corpus_builder import build_corpus
from llmsuite.data.prepare import prepare
from llmsuite.data.read import read_rows
from llmsuite.data.remote import fetch, is_remote
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT

ROW = {"src": "Hi?", "tgt": "Hello."}
LINE = json.dumps(ROW) + "\n"


class Server:
    """Files of a directory over HTTP."""

    def __init__(self, directory: Path):
        self.directory = directory  # type: ignore[var-annotated]
        self.asked = []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                asked.append((self.command, self.path))

            def end_headers(self) -> None:
                path = directory / self.path.lstrip("/")
                if path.is_file():
                    self.send_header("ETag", sha256_of(path))
                super().end_headers()

        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(directory))
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    server = Server(tmp_path / "served")
    yield server
    server.stop()


def test_a_file_is_fetched_once_and_again_when_it_has_changed(server: Server) -> None:
    (server.directory / "rows.jsonl").write_text(LINE)
    reports: list[str] = []
    url = f"{server.url}/rows.jsonl"
    assert is_remote(url)
    first = fetch(url, reports.append)
    assert first.read_text() == LINE
    assert fetch(url, reports.append) == first
    assert reports == [f"fetching {url}"]
    (server.directory / "rows.jsonl").write_text(LINE * 2)
    second = fetch(url, reports.append)
    assert second.read_text() == LINE * 2
    assert first.read_text() == LINE  # of a run that still reads it
    server.stop()
    assert fetch(url, reports.append) == second
    assert "continuing with the copy that was fetched before" in reports[-1]


def test_messages_of_a_fetch_have_no_secrets(server: Server) -> None:
    (server.directory / "rows.jsonl").write_text(LINE)
    reports: list[str] = []
    url = f"{server.url}/rows.jsonl?key=s3cr3t&X-Amz-Signature=s3cr3t#s3cr3t"
    found = fetch(url, reports.append)
    assert found.name == "rows.jsonl"
    server.stop()
    assert fetch(url, reports.append) == found
    shown = f"{server.url}/rows.jsonl?key=***&X-Amz-Signature=***#***"
    assert reports[0] == f"fetching {shown}"
    assert reports[1].startswith(f"{shown}: cannot be reached (")
    assert "s3cr3t" not in "".join(reports) + (found.parents[1] / "source.json").read_text()


def test_unreachable_data_is_named(server: Server) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be fetched: "):
        fetch(f"{server.url}/absent.jsonl", print)
    with pytest.raises(UserError, match=r"nothing://a: cannot be fetched: Protocol not known: nothing"):
        fetch("nothing://a", print)


_RANK = """
import sys
from llmsuite.data.remote import fetch
print(fetch(sys.argv[1], lambda text: print(text, file=sys.stderr)))
"""


def test_processes_that_start_together_fetch_once(server: Server) -> None:
    (server.directory / "rows.jsonl").write_text(LINE * 1000)
    words = [sys.executable, "-c", _RANK, f"{server.url}/rows.jsonl"]
    ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert "".join(err for _, err in outputs).count("fetching") == 1


def test_a_recipe_reads_a_url(server: Server, write_recipe: Callable[..., Path], capsys: Any) -> None:
    (server.directory / "rows.jsonl").write_text(LINE * 3)
    recipe = write_recipe({"stage": "sft", "data.train": f"{server.url}/rows.jsonl"})
    assert main(["validate", str(recipe)]) == 0
    not_checked = f"note: data.train: not checked: {server.url}/rows.jsonl, which `llmsuite run` fetches"
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {not_checked}"]
    assert server.asked == []  # looking at a recipe asks nobody
    assert main(["data", "explain", str(recipe), "--row=3"]) == 0
    assert "rows.jsonl:3: " in capsys.readouterr().out


def test_a_url_is_shown_without_secrets_until_it_is_fetched(
    server: Server, write_recipe: Callable[..., Path], registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    (server.directory / "rows.jsonl").write_text(LINE * 3)
    recipe = write_recipe({"stage": "sft", "data.train": f"{server.url}/rows.jsonl?token=s3cr3t"})
    plan = plan_run(recipe, [], registry)
    assert plan.data.train_file == Url(f"{server.url}/rows.jsonl?token=s3cr3t"), "and no path, which has one slash"
    assert str(plan.data.train_file) == f"{server.url}/rows.jsonl?token=***"
    assert "s3cr3t" not in repr(plan.data.train_file)
    assert plan.fetched(lambda text: None).data.train_path.read_text() == LINE * 3
    for words in (["show", str(recipe)], ["validate", str(recipe)], ["plan", str(recipe)]):
        assert main(words) == 0
        said = capsys.readouterr()
        assert "s3cr3t" not in said.out + said.err


def test_data_sets_of_the_hugging_face_library_are_read(server: Server, tmp_path: Path, registry: Registry) -> None:
    found = datasets.Dataset.from_list([ROW] * 5)
    found.save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    found.to_parquet(tmp_path / "files" / "train.parquet")
    for name, count in (
        (str(tmp_path / "saved"), 5),
        (f"hf://{tmp_path / 'files'}?split=train", 5),
        (f"hf://{tmp_path / 'files'}?split=train&rows=2", 2),  # streamed
    ):
        assert is_remote(name)
        path = fetch(name, print)
        assert fetch(name, print) == path
        assert len(read_rows(path, "conversation", "auto", registry.data_formats)) == count
    splits = tmp_path / "splits"
    datasets.DatasetDict(train=found, test=found).save_to_disk(splits)
    with pytest.raises(UserError) as caught:
        read_rows(splits, "conversation", "auto", registry.data_formats)
    assert str(caught.value).endswith(f"splits; name one of them: {splits / 'test'}, {splits / 'train'}")
    assert not is_remote(str(tmp_path / "files"))
    assert len(read_rows(tmp_path / "files", "conversation", "auto", registry.data_formats)) == 5
    for name, reason in (
        (f"hf://{tmp_path / 'files'}", "has the splits train; add [?]split="),
        (f"hf://{tmp_path / 'files'}?splits=a", "has no option 'splits'"),
        (f"hf://{tmp_path / 'files'}?split=train&rows=few", "rows is 'few', not a number"),
        (f"hf://{tmp_path / 'absent'}?split=train", "cannot be read"),
    ):
        with pytest.raises(UserError, match=reason):
            fetch(name, print)


# public sets


def tarred(path: Path, files: dict[str, bytes], **special: bytes) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            if name in special:
                entry.type = special[name]
            tar.addfile(entry, io.BytesIO(content))


PAIR = {"src": ["Hi?"], "tgt": [], "response": ["Good.", "Bad."], "sort": [1, 0]}


def test_public_sets_are_converted(server: Server, tmp_path: Path, registry: Registry) -> None:
    said = json.dumps({"content": "type#skirt", "summary": "A skirt."}) + "\n"
    tarred(server.directory / "a.tar.gz", {
        "AdvertiseGen/train.json": said.encode() * 3, "AdvertiseGen/dev.json": said.encode(), "AdvertiseGen/.x": b"",
    })  # fmt: skip
    with zipfile.ZipFile(server.directory / "u.zip", "w") as archive:
        archive.writestr("ultrafeedback_binarized/train.jsonl", json.dumps(PAIR) + "\n")
    digest = sha256_of(server.directory / "a.tar.gz")
    words = ["data", "prepare", "advertisegen", "-o", str(tmp_path / "a"), "--url", f"{server.url}/a.tar.gz"]
    assert main([*words, "--sha256", "0" * 64]) == 2
    assert not (tmp_path / "a").exists()
    assert main([*words, "--sha256", digest]) == 0
    (row, *_) = rows = read_rows(tmp_path / "a" / "train.jsonl", "conversation", "auto", registry.data_formats)
    assert len(rows) == 3
    assert [message.content for message in row.messages] == ["type#skirt", "A skirt."]
    assert len((tmp_path / "a" / "eval.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["sha256"] == digest
    prepare("ultrafeedback", tmp_path / "u", registry.data_formats, print, f"{server.url}/u.zip")
    assert len(read_rows(tmp_path / "u" / "train.jsonl", "preference", "auto", registry.data_formats)) == 1
    with pytest.raises(UserError, match="exists; choose another --output"):
        prepare("ultrafeedback", tmp_path / "u", registry.data_formats, print, f"{server.url}/u.zip")


def test_a_corpus_is_fetched_unchanged(server: Server, tmp_path: Path, registry: Registry) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n\ntwo\n")
    build_corpus([text], server.directory / "web", TextTokenizer(ROOT / "data" / "tokenizer"))
    reports: list[str] = []
    prepare("openwebtext-100k", tmp_path / "c", registry.data_formats, reports.append, f"{server.url}/web")
    assert reports[-1].startswith(f"{tmp_path / 'c'}: 2 documents, ")


def test_prepare_refuses_faulty_archives(server: Server, tmp_path: Path, capsys: Any, registry: Registry) -> None:
    assert main(["data", "prepare", "nothing", "-o", "a"]) == 2
    assert "'nothing' is no known data set; there are: advertisegen (AdvertiseGen" in capsys.readouterr().err
    assert main(["data", "prepare", "advertisegen"]) == 2
    for files, reason in (
        ({"train.json": b'{"a": 1}\n'}, "keys ['a'] fit no format with conversation rows"),
        ({"train.json": b"{"}, "train.json: is not JSON"),
        ({"train.json": b"[1]"}, "row 1: is a int, not an object"),
        ({"readme.md": b""}, "has no train.json or train.jsonl"),
        ({"a/train.json": LINE.encode(), "b/train.jsonl": LINE.encode()}, "has two files for train"),
    ):
        tarred(server.directory / "a.tar.gz", files)
        with pytest.raises(UserError) as caught:
            prepare("advertisegen", tmp_path / "a", registry.data_formats, print, f"{server.url}/a.tar.gz")
        assert reason in str(caught.value)
        assert not (tmp_path / "a").exists()


# archives that mean harm


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil.json", "a/../../evil", "C:\\evil", "..\\evil.json"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_out_of_an_archive_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("train.json", LINE)
            archive.writestr(name, LINE)
    else:
        tarred(path, {"train.json": LINE.encode(), name: LINE.encode()})
    with pytest.raises(UserError, match="leads out of the archive; nothing was unpacked"):
        list(read_members(path))


@pytest.mark.parametrize("special", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_archives_are_refused(special: bytes, tmp_path: Path) -> None:
    tarred(tmp_path / "a.tar.gz", {"train.json": b""}, **{"train.json": special})
    with pytest.raises(UserError, match=r"'train\.json' is a link or a device"):
        list(read_members(tmp_path / "a.tar.gz"))


def test_bombs_and_damaged_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MIN_BUDGET_BYTES", 1 << 20)
    tarred(tmp_path / "a.tar.gz", {"train.json": bytes(3 << 20)})
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.json", bytes(3 << 20))
    for name in ("a.tar.gz", "a.zip"):
        with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
            list(read_members(tmp_path / name))
    tarred(tmp_path / "b.tar.gz", {"train.json": LINE.encode() * 1000})
    (tmp_path / "b.tar.gz").write_bytes((tmp_path / "b.tar.gz").read_bytes()[:-30])
    (tmp_path / "c.tar.gz").write_bytes(b"plain")
    for name in ("b.tar.gz", "c.tar.gz"):
        with pytest.raises(UserError, match=r"is not a complete \.tar, \.tar\.gz or \.zip"):
            list(read_members(tmp_path / name))
