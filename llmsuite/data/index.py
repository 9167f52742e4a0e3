"""Indexing of text files: tokenised in several processes, written as a corpus in the order of the documents."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from llmsuite.cache import locked
from llmsuite.data.documents import Division, kind_of, read_documents
from llmsuite.data.faults import Faults, OnBadRow
from llmsuite.data.indexed import CorpusWriter, IndexedCorpus, token_dtype
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.files import read_json_file, sha256_of, write_text_atomic
from llmsuite.launch.ranks import die_with_parent
from llmsuite.regular import exists

_BATCH_CHARS = 1 << 19
_WORTH_A_PROCESS = 8 << 20
"""Bytes of text: with less for each process, starting it takes longer than it saves."""
_CORES_OF_ONE = 4
"""One process keeps this many cores busy, as its encoder has threads; 7 % of its work is outside the encoder. On 2
cores two processes were no faster. Each of several processes encodes in one thread."""
_FORMAT = "1"
"""Part of the name in the cache: change it with anything that changes the files."""


def build_corpus(
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer: TextTokenizer,
    division: Division = "blank_lines",
    key: str = "text",
    workers: int | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    faults: Faults | None = None,
) -> tuple[int, int]:
    """Write `prefix`.bin and .idx: the tokens of every document, each followed by the end-of-sequence token.

    Memory holds a few batches of documents and 4 bytes a document, whatever the size of the input. The result does not
    depend on `workers`.

    Args:
        inputs: files, see `read_documents`.
        prefix: must not exist.
        tokenizer: its directory is what the processes load.
        division: where a document of a plain text ends.
        key: of the text in rows.
        workers: processes; by default one for each 8 MB, at most one a core, and one on a few cores.
        progress: gets every number of bytes of the inputs that is done.
        faults: gets the rows and lines that cannot be read, if those are to be skipped; else the first one is an error.

    Returns:
        Numbers of documents and of tokens.

    Raises:
        UserError: an input cannot be read or has no text, or the result not be written.
    """
    size = sum(_size(path) for path in inputs)
    if workers is None:
        cores = os.cpu_count() or 1
        workers = 1 if cores <= _CORES_OF_ONE else max(1, min(cores, size // _WORTH_A_PROCESS))
    dtype = token_dtype(tokenizer.vocab_size)
    batches = _batches(inputs, division, key, faults)
    with CorpusWriter(prefix, dtype) as writer:
        for tokens, sizes, num_bytes in _tokenised(batches, tokenizer, dtype, workers):
            writer.add(tokens, sizes)
            progress(num_bytes)
        if not writer.num_documents:
            skipped = f": {faults.summary()}" if faults and faults.total else ""
            raise UserError(f"{', '.join(map(str, inputs))}: no text to index{skipped}")
        writer.commit()
        return writer.num_documents, writer.num_tokens


def cached_corpus(
    path: Path,
    root: Path,
    tokenizer: TextTokenizer,
    division: Division,
    key: str,
    progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]],
    on_bad_row: OnBadRow = "error",
) -> tuple[IndexedCorpus, Faults]:
    """The corpus of a text file, indexed at its first use, and the faults that were skipped then. Of several processes
    one builds it and the others wait.

    Args:
        path: of text.
        root: directory of the cache.
        tokenizer: that makes the ids.
        division: where a document of a plain text ends.
        key: of the text in rows.
        progress: called with the size in bytes when it has to be built; see `track_bytes`.
        on_bad_row: "skip" to leave out rows and lines that cannot be read.
    """
    kind_of(path)
    parts = [_FORMAT, sha256_of(path), tokenizer.digest(), division, key, "".join(path.suffixes[-2:]), on_bad_row]
    prefix = root / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    index, note = prefix.with_suffix(".idx"), prefix.with_suffix(".skipped.json")
    with locked(prefix.with_suffix(".lock")):
        if not exists(index) or (on_bad_row == "skip" and not exists(note)):
            index.unlink(missing_ok=True)
            faults = Faults(on_bad_row)
            with progress(_size(path)) as add:
                build_corpus([path], prefix, tokenizer, division, key, progress=add, faults=faults)
            if faults.skips:
                write_text_atomic(note, json.dumps(faults.noted(path)))
    noted = read_json_file(note) if on_bad_row == "skip" else {}
    return IndexedCorpus(index), Faults.of_note(noted, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _batches(
    inputs: Sequence[Path], division: Division, key: str, faults: Faults | None
) -> Iterator[tuple[list[str], int]]:
    """Documents of about 512 thousand characters, and how many bytes of the inputs they take."""
    for path in inputs:
        texts: list[str] = []
        chars = before = done = 0
        for text, done in read_documents(path, division, key, faults):
            texts.append(text)
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield texts, done - before
                texts, chars, before = [], 0, done
        if texts:
            yield texts, done - before


def _tokenised(
    batches: Iterator[tuple[list[str], int]], tokenizer: TextTokenizer, dtype: str, workers: int
) -> Iterator[tuple[bytes, bytes, int]]:
    if workers == 1:
        for texts, num_bytes in batches:
            yield *_encode(tokenizer, dtype, texts), num_bytes
        return
    # spawned: a rank has threads by now, which a forked process would not have
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start, (tokenizer.directory, dtype))
    waiting: collections.deque[tuple[concurrent.futures.Future[tuple[bytes, bytes]], int]] = collections.deque()
    try:
        for texts, num_bytes in batches:
            waiting.append((pool.submit(_encode_here, texts), num_bytes))
            if len(waiting) > 2 * workers:
                done, size = waiting.popleft()
                yield *done.result(), size
        while waiting:
            done, size = waiting.popleft()
            yield *done.result(), size
    except BrokenProcessPool as error:
        raise UserError("a process that tokenises has died, perhaps out of memory; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(tokenizer: TextTokenizer, dtype: str, texts: list[str]) -> tuple[bytes, bytes]:
    """Tokens of the documents, one after the other, and their sizes."""
    documents = [np.array([*ids, tokenizer.eos_id], dtype) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(documents).tobytes(), np.array([len(d) for d in documents], "<i4").tobytes()


_here: list[tuple[TextTokenizer, str]] = []  # of a process of the pool


def _start(directory: Path, dtype: str) -> None:
    die_with_parent()  # it would wait for ever for work that nobody has any more
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # which has died while this process began
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel
    _here.append((TextTokenizer(directory), dtype))


def _encode_here(texts: list[str]) -> tuple[bytes, bytes]:
    (tokenizer, dtype) = _here[0]
    return _encode(tokenizer, dtype, texts)
