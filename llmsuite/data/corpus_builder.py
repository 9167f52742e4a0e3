"""Builds a corpus of token ids from text files: tokenised by several processes, written in the order of documents."""

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

from llmsuite.base.cache import locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_file, sha256_of, write_text_atomic
from llmsuite.base.interrupts import held_interrupts
from llmsuite.base.safe_files import exists
from llmsuite.base.supervisor import die_with_parent
from llmsuite.data.documents import Division, kind_of, read_documents
from llmsuite.data.faults import Faults, OnBadRow
from llmsuite.data.indexed_corpus import CorpusWriter, IndexedCorpus, token_dtype
from llmsuite.data.tokenizer import TextTokenizer

_BATCH_CHARS = 1 << 19
"""Characters of a batch of documents."""
_MIN_PROCESS_BYTES = 8 << 20
"""Bytes of text for each process: with less, starting it takes longer than it saves."""
_CORES_PER_PROCESS = 4
"""Cores that one process keeps busy, as its encoder has threads; 7 % of its work is outside the encoder. On 2 cores two
processes were no faster. Each of several processes encodes in one thread."""
_FORMAT = "1"
"""Version in the name of a cache entry: change it with anything that changes the files."""


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

    Memory holds a few batches of documents and 4 bytes a document, for any size of the input. The result does not
    depend on `workers`.

    Args:
        inputs: files, see `read_documents`.
        prefix: must not exist.
        tokenizer: the processes load it from its directory.
        division: the separator of documents in a plain text.
        key: of the text in rows.
        workers: processes; by default one for each 8 MB, at most one a core, and one on a few cores.
        progress: called with the number of bytes of each batch that is done.
        faults: records the rows and lines that cannot be read, if they are to be skipped; else the first is an error.

    Returns:
        Numbers of documents and of tokens.

    Raises:
        UserError: an input cannot be read or has no text, or the result not be written.
    """
    size = sum(_size(path) for path in inputs)
    if workers is None:
        cores = os.cpu_count() or 1
        workers = 1
        if cores > _CORES_PER_PROCESS:
            workers = max(1, min(cores, size // _MIN_PROCESS_BYTES))
    dtype = token_dtype(tokenizer.vocab_size)
    batches = _batches(inputs, division, key, faults)
    with CorpusWriter(prefix, dtype) as writer:
        for tokens, sizes, num_bytes in _tokenised(batches, tokenizer, dtype, workers):
            writer.add(tokens, sizes)
            progress(num_bytes)
        if not writer.num_documents:
            skipped = ""
            if faults and faults.total:
                skipped = f": {faults.summary()}"
            raise UserError(f"{', '.join(map(str, inputs))}: no text to index{skipped}")
        writer.commit()
        return writer.num_documents, writer.num_tokens


def build_cached_corpus(
    path: Path,
    root: Path,
    tokenizer: TextTokenizer,
    division: Division,
    key: str,
    progress: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]],
    on_bad_row: OnBadRow = "error",
) -> tuple[IndexedCorpus, Faults]:
    """Return the corpus of a text file, built at its first use, and the faults that were skipped then.

    Of several processes one builds it and the others wait.

    Args:
        path: of text.
        root: directory of the cache.
        tokenizer: of the model.
        division: the separator of documents in a plain text.
        key: of the text in rows.
        progress: called with the size in bytes when it has to be built; see `track_bytes`.
        on_bad_row: "skip" to leave out rows and lines that cannot be read.
    """
    kind_of(path)
    parts = [_FORMAT, sha256_of(path), tokenizer.digest(), division, key, "".join(path.suffixes[-2:]), on_bad_row]
    prefix = root / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    index = prefix.with_suffix(".idx")
    note = prefix.with_suffix(".skipped.json")
    with locked(prefix.with_suffix(".lock")):
        if not exists(index) or (on_bad_row == "skip" and not exists(note)):
            index.unlink(missing_ok=True)
            faults = Faults(on_bad_row)
            with progress(_size(path)) as add:
                build_corpus([path], prefix, tokenizer, division, key, progress=add, faults=faults)
            if faults.skips:
                write_text_atomic(note, json.dumps(faults.to_json(path)))
    skipped = read_json_file(note) if on_bad_row == "skip" else {}
    return IndexedCorpus(index), Faults.from_json(skipped, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _batches(
    inputs: Sequence[Path], division: Division, key: str, faults: Faults | None
) -> Iterator[tuple[list[str], int]]:
    """Yield batches of documents of about 512 thousand characters, and the bytes of the inputs that they take."""
    for path in inputs:
        texts: list[str] = []
        chars = before = done = 0
        for text, done in read_documents(path, division, key, faults):
            texts.append(text)
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield texts, done - before
                texts = []
                chars = 0
                before = done
        if texts:
            yield texts, done - before


def _tokenised(
    batches: Iterator[tuple[list[str], int]], tokenizer: TextTokenizer, dtype: str, workers: int
) -> Iterator[tuple[bytes, bytes, int]]:
    if workers == 1:
        for texts, num_bytes in batches:
            yield *_encode(tokenizer, dtype, texts), num_bytes
        return
    # spawn, not fork: a forked child has none of the threads of this process, but the locks that they held
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.directory, dtype))
    waiting: collections.deque[tuple[concurrent.futures.Future[tuple[bytes, bytes]], int]] = collections.deque()
    try:
        for texts, num_bytes in batches:
            # a pool that is left between the start of a process and that of its thread waits for the process at exit
            with held_interrupts():
                submitted = pool.submit(_encode_in_worker, texts)
            waiting.append((submitted, num_bytes))
            if len(waiting) > 2 * workers:  # bounds the documents that are held in memory
                done, size = waiting.popleft()
                yield *done.result(), size
        while waiting:
            done, size = waiting.popleft()
            yield *done.result(), size
    except BrokenProcessPool as error:
        raise UserError("a process that tokenises has died, perhaps out of memory; try fewer --workers") from error
    finally:
        with held_interrupts():
            pool.shutdown(cancel_futures=True)


def _encode(tokenizer: TextTokenizer, dtype: str, texts: list[str]) -> tuple[bytes, bytes]:
    """Encode documents: the bytes of all tokens, and those of the sizes (i32)."""
    documents = [np.array([*ids, tokenizer.eos_id], dtype) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(documents).tobytes(), np.array([len(d) for d in documents], "<i4").tobytes()


_worker_state: list[tuple[TextTokenizer, str]] = []  # of a process of the pool


def _start_worker(directory: Path, dtype: str) -> None:
    die_with_parent()  # else it would wait for work for ever
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent died while this process started
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process: the pool uses all cores
    _worker_state.append((TextTokenizer(directory), dtype))


def _encode_in_worker(texts: list[str]) -> tuple[bytes, bytes]:
    (tokenizer, dtype) = _worker_state[0]
    return _encode(tokenizer, dtype, texts)
