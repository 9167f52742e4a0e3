"""Indexed corpora: those of PaddleNLP are read, and what is written here PaddleNLP reads."""

from __future__ import annotations

import functools
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.locks import remove_abandoned
from llmsuite.base.progress import track_bytes
from llmsuite.cli.main import main
from llmsuite.data.corpus_builder import build_cached_corpus, build_corpus
from llmsuite.data.documents import Division, read_documents
from llmsuite.data.faults import OnBadRow
from llmsuite.data.indexed_corpus import CorpusWriter, IndexedCorpus, index_path, token_dtype
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import ROOT

TEXT = ROOT / "data" / "pretrain" / "train.txt"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(ROOT / "data" / "tokenizer")


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> IndexedCorpus:
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, dtype).tobytes(), np.array([len(document)], "<i4").tobytes())
        writer.commit()
    return IndexedCorpus(index_path(prefix))


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=9), min_size=1, max_size=9),
    dtype=st.sampled_from(["<u2", "<i4"]),
)
def test_written_corpora_are_read_by_paddlenlp(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    from paddlenlp.data.indexed_dataset import MMapIndexedDataset

    prefix = tmp_path_factory.mktemp("corpus") / "some.name"
    ours = write(prefix, documents, dtype)
    theirs = MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.doc_idx.tolist() == list(range(len(documents) + 1))
    assert [ours.document(i).tolist() for i in range(ours.num_documents)] == documents
    assert ours.tokens.dtype == theirs[0].dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_corpora_of_paddlenlp_are_read(tmp_path: Path, dtype: type) -> None:
    from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder

    builder = MMapIndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype)
    for document in ([[1, 2, 3], [4]], [[5]], [[6, 7], [8], [9]]):  # of sentences
        for sentence in document:
            builder.add_item(sentence)
        builder.end_document()
    builder.finalize(str(tmp_path / "c.idx"))
    corpus = IndexedCorpus(tmp_path / "c.idx")
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == [[1, 2, 3, 4], [5], [6, 7, 8, 9]]
    assert [corpus.first_token(i) for i in range(4)] == [0, 4, 5, 9]


def test_dtype_is_megatrons() -> None:
    assert [token_dtype(size) for size in (512, 65499, 65500, 151936)] == ["<u2", "<u2", "<i4", "<i4"]


def test_damaged_corpora_are_named(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", [[1, 2, 3], [4, 5]])
    index = tmp_path / "c.idx"
    tokens = tmp_path / "c.bin"
    good = index.read_bytes()
    for bad, reason in (
        (b"", "is no index of a corpus"),
        (b"TNTIDX\0\0\0" + good[9:], "is no index of a corpus"),
        (good[:9] + b"\2" + good[10:], "has version 2"),
        (good[:17] + b"\7" + good[18:], "dtype 7"),
        (good[:-1], "is cut short"),
    ):
        index.write_bytes(bad)
        with pytest.raises(UserError, match=reason):
            IndexedCorpus(index)
    index.write_bytes(good)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"has 8 bytes, c\.idx expects 10"):
        IndexedCorpus(index)
    tokens.unlink()
    with pytest.raises(UserError, match=r"c\.bin: cannot be read"):
        IndexedCorpus(index)
    assert corpus.num_documents == 2


@pytest.mark.parametrize(
    ("at", "number", "said"),
    [
        (34, struct.pack("<i", -3), "do not follow one another"),  # the sizes [3, 2]
        (38, struct.pack("<i", 4), r"has 10 bytes, c\.idx expects 14"),
        (42, struct.pack("<q", 2), "do not follow one another"),  # the offsets [0, 6]
        (50, struct.pack("<q", 2**62), "do not follow one another"),
        (58, struct.pack("<q", 1), "not all of its sequences, in their order"),  # the bounds [0, 1, 2]
        (66, struct.pack("<q", 9), "not all of its sequences, in their order"),
        (66, struct.pack("<q", -1), "not all of its sequences, in their order"),
    ],
)
def test_offsets_outside_the_file_are_refused(tmp_path: Path, at: int, number: bytes, said: str) -> None:
    write(tmp_path / "c", [[1, 2, 3], [4, 5]])
    good = (tmp_path / "c.idx").read_bytes()
    (tmp_path / "c.idx").write_bytes(good[:at] + number + good[at + len(number) :])
    with pytest.raises(UserError, match=said):
        IndexedCorpus(tmp_path / "c.idx")


def test_digest_changes_with_tokens_and_bounds(tmp_path: Path) -> None:
    digests = [
        write(tmp_path / str(i), d).digest() for i, d in enumerate(([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]]))
    ]
    assert len(set(digests)) == 3
    assert write(tmp_path / "again", [[1, 2], [3]]).digest() == digests[0]


def documents(path: Path, division: Division = "blank_lines", key: str = "text") -> list[str]:
    return [text for text, _ in read_documents(path, division, key)]


def test_documents_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n\n three \n\n")
    assert documents(tmp_path / "a.txt") == ["one\r\ntwo", " three "]
    assert documents(tmp_path / "a.txt", "lines") == ["one", "two", " three "]
    assert documents(tmp_path / "a.txt", "files") == ["one\r\ntwo\r\n\r\n\n three \n\n"]
    lines = '{"text": "one\\n\\ntwo"}\n\n{"text": " "}\n{"text": "thr\u00e9e"}'
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one\n\ntwo", "", "thr\u00e9e"]}), tmp_path / "b.parquet")
    for name, key in (("b.jsonl", "text"), ("b.jsonl.gz", "text"), ("b.parquet", "body")):
        assert documents(tmp_path / name, key=key) == ["one\n\ntwo", "thr\u00e9e"], name
        *_, (_, done) = read_documents(tmp_path / name, "lines", key)
        assert done == (tmp_path / name).stat().st_size, name


def test_a_missing_zstandard_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl.zst"
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"")
        with pytest.raises(UserError, match="pip install zstandard"):
            documents(path)
        return
    lines = [f'{{"text": "{i}"}}\n'.encode() for i in range(2)]
    path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, lines)))  # of two frames
    assert documents(path) == ["0", "1"]
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="cannot be read"):
        documents(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', r"a\.jsonl:2: has no key 'text'.*\['txt'\]"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', r"a\.jsonl:2: is not a JSON line"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1: has no key 'text'.* a list"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1: 'text' is a int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: 'text' has half of a surrogate pair"),
        ("a.txt", b"a\xff", r"a\.txt:1: is not UTF-8"),
        ("a.txt.gz", gzip.compress(b"words" * 100, mtime=0)[:-9], r"a\.txt\.gz: cannot be read"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz: cannot be read: Not a gzipped file"),
        ("a.parquet", b"plain", r"a\.parquet: cannot be read"),
        ("a.xlsx", b"a", r"a\.xlsx: is none of \.txt"),
        ("a.parquet.gz", b"a", r"is none of \.txt"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason):
        documents(tmp_path / name)


def test_any_number_of_workers_writes_the_same(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [{"text": f"{i} " + "some words to count " * (i % 160)} for i in range(0, 8000, 7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [TEXT, tmp_path / "rows.jsonl"]
    written = []
    seen = []
    for workers in (1, 2, 3):
        prefix = tmp_path / f"by-{workers}"
        done = []
        assert build_corpus(inputs, prefix, tokenizer, workers=workers, progress=done.append)[0] == 1600 + len(rows)
        written.append((prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()))
        seen.append(sum(done))
    assert written[0] == written[1] == written[2]
    assert set(seen) == {sum(path.stat().st_size for path in inputs)}
    assert len(list(tmp_path.iterdir())) == 1 + 2 * 3  # nothing else is left


def test_every_document_ends_and_decodes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    count, tokens = build_corpus([TEXT], tmp_path / "c", tokenizer)
    corpus = IndexedCorpus(tmp_path / "c.idx")
    texts = TEXT.read_text().strip().split("\n\n")
    assert (corpus.num_documents, len(corpus.tokens)) == (count, tokens) == (len(texts), tokens)
    for number, text in enumerate(texts):
        *ids, last = corpus.document(number).tolist()
        assert last == tokenizer.eos_id
        assert tokenizer.decode(ids) == text


def test_a_failed_build_leaves_no_files(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 3 + "bad")
    (tmp_path / "blank.txt").write_text("\n \n")
    for name in ("a.jsonl", "blank.txt"):
        for workers in (1, 2):
            with pytest.raises(UserError, match=name):
                build_corpus([tmp_path / name], tmp_path / "out" / "c", tokenizer, workers=workers)
    assert not list((tmp_path / "out").iterdir())


def test_a_killed_process_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(TEXT.read_bytes() * 40)
    words = [sys.executable, "-m", "llmsuite", "data", "index", "big.txt", "-o", "c", "--workers=1"]
    process = subprocess.Popen(
        [*words, f"--tokenizer={ROOT / 'data' / 'tokenizer'}"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while not list(tmp_path.glob("*.tmp")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list(tmp_path.glob("*.idx"))


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """And nothing else: not what another process is writing, nor what is so new that it may be about to lock it."""
    names = ("corpus.7.bin.tmp", "corpus.7.idx.tmp", "corpus.8.bin.tmp", "corpus-2.7.bin.tmp")
    for name in names:
        (tmp_path / name).touch()
    for name in (names[0], names[1], names[3]):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    with CorpusWriter(tmp_path / "corpus", "u2") as writer:
        part = f"corpus.{os.getpid()}.bin.tmp"
        assert {path.name for path in tmp_path.iterdir()} == {*names[2:], part}
        os.utime(tmp_path / part, (time.time() - 3600,) * 2)
        remove_abandoned(tmp_path.iterdir())
        assert {path.name for path in tmp_path.iterdir()} == {names[2], part}
        writer.add(np.array([1, 2], "<u2").tobytes(), np.array([2], "<i4").tobytes())
        writer.commit()
    assert IndexedCorpus(tmp_path / "corpus.idx")


def test_processes_that_tokenise_end_with_their_parent(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from llmsuite.data.corpus_builder import _tokenised
from llmsuite.data.tokenizer import TextTokenizer

def batches():
    while True:
        yield ["a text"], 6

if __name__ == "__main__":
    for _ in _tokenised(batches(), TextTokenizer(Path("data/tokenizer")), "<u2", 2):
        print("begun", flush=True)
        time.sleep(0.1)
"""
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
        process.communicate(timeout=60)  # as long as one of them lives, it holds the other end


def test_the_command_builds_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "index", str(TEXT), "-o", str(tmp_path / "c"), "--tokenizer", str(ROOT / "data" / "tokenizer")]
    assert main(words) == 0
    assert "1,600 documents, 58,326 tokens" in capsys.readouterr().out
    assert main(words) == 2
    assert "c.idx exists" in capsys.readouterr().err
    for wrong, reason in (("no.txt", "is not a file"), (str(ROOT / "Makefile"), "is none of")):
        assert main([*words[:2], wrong, *words[3:]]) == 2
        assert reason in capsys.readouterr().err


_BUILD = """
import sys, contextlib
from pathlib import Path
from llmsuite.data import corpus_builder
from llmsuite.data.faults import OnBadRow
from llmsuite.data.tokenizer import TextTokenizer
real, count = corpus_builder.build_corpus, []
def build(*args, **keys):
    count.append(1)
    return real(*args, **keys)
corpus_builder.build_corpus = build
path, cache, tokenizer = map(Path, sys.argv[1:])
corpus, _ = corpus_builder.build_cached_corpus(
    path, cache, TextTokenizer(tokenizer), "blank_lines", "text", lambda n: contextlib.nullcontext(lambda k: None))
print(len(count), corpus.digest())
"""


def test_of_many_processes_one_fills_the_cache(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _BUILD, str(TEXT), str(tmp_path), str(ROOT / "data" / "tokenizer")]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    built, digests = zip(*(process.communicate()[0].split() for process in processes))
    assert sorted(built) == ["0", "0", "1"]
    assert len(set(digests)) == 1


def test_cache_follows_content_and_settings(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "a.txt"

    def found(division: Division = "blank_lines") -> Path:
        progress = functools.partial(track_bytes, what="x")
        return build_cached_corpus(path, tmp_path / "cache", tokenizer, division, "text", progress)[0].path

    path.write_text("one\ntwo\n")
    first = found()
    path.touch()
    assert found() == first
    assert found("lines") != first
    path.write_text("one\nthree\n")
    assert found() != first


BROKEN = b"""{"text": "one"}
{"text": "two"
{"texts": "three"}
{"text": 4}
{"text": "\\ud800"}
\xff
{"text": "seven"}
"""


def test_faulty_rows_are_skipped_and_counted_each_time(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    progress = functools.partial(track_bytes, what="x")

    def found(path: Path, on_bad_row: OnBadRow) -> tuple[int, str]:
        corpus, faults = build_cached_corpus(
            path, tmp_path / "cache", tokenizer, "lines", "text", progress, on_bad_row=on_bad_row
        )
        return corpus.num_documents, faults.summary() if faults.total else ""

    rows = tmp_path / "a.jsonl"
    rows.write_bytes(BROKEN)
    with pytest.raises(UserError, match=r"a\.jsonl:2: is not a JSON line"):
        found(rows, "error")
    count, summary = found(rows, "skip")
    assert count == 2
    assert summary.startswith("5 that cannot be read: ")
    for reason in (
        f"has no key 'text', which is to hold the text (1, first at {rows}:3)",
        f"is not a JSON line (1, first at {rows}:2)",
        f"'text' is a int, not text (1, first at {rows}:4)",
        f"has half of a surrogate pair, which is no text (1, first at {rows}:5)",
        f"is not UTF-8 (1, first at {rows}:6)",
    ):
        assert reason in summary
    assert found(rows, "skip") == (count, summary)  # when nothing is read any more
    renamed = rows.rename(tmp_path / "b.jsonl")
    assert found(renamed, "skip") == (count, summary.replace("a.jsonl", "b.jsonl"))
    with pytest.raises(UserError, match=r"b\.jsonl:2: is not a JSON line"):
        found(renamed, "error")  # what was made without the faulty rows does not do
    (note,) = (tmp_path / "cache").glob("*.skipped.json")
    note.unlink()  # as after a kill between the two
    assert found(renamed, "skip") == (count, summary.replace("a.jsonl", "b.jsonl"))
    text = tmp_path / "c.txt"
    text.write_bytes(b"one\n\xff\nthree\n")
    assert found(text, "skip") == (2, f"1 that cannot be read: is not UTF-8 (1, first at {text}:2)")
    text.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"c\.txt: no text to index: 1 that cannot be read: is not UTF-8"):
        found(text, "skip")


def test_the_command_skips_faulty_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(BROKEN)
    words = ["data", "index", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "c"), "--workers=2"]
    words += ["--tokenizer", str(ROOT / "data" / "tokenizer")]
    assert main(words) == 2
    assert "a.jsonl:2: is not a JSON line" in capsys.readouterr().err
    assert main([*words, "--on_bad_row=skip"]) == 0
    out = capsys.readouterr().out
    assert "left out 5 that cannot be read: " in out
    assert ": 2 documents, " in out
