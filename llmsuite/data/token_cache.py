"""A cache of token ids: of many ranks that read the same rows, only one encodes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.cache import locked
from llmsuite.base.errors import UserError
from llmsuite.base.progress import track
from llmsuite.base.safe_files import exists
from llmsuite.data.indexed_corpus import CorpusWriter, IndexedCorpus
from llmsuite.data.tokenizer import TextTokenizer

_PART_CHARS = 1 << 19


def encode_cached(texts: Sequence[str], tokenizer: TextTokenizer, root: Path) -> list[list[int]]:
    """Return the result of `tokenizer.encode_batch`, from the cache if it is there.

    Of several processes that need the same entry one makes it, and the others wait. An entry is named by everything
    that its ids depend on: the texts, to which data format, chat template and stage have been applied already, the
    files of the tokenizer, and the libraries that read these. So it cannot be stale. It is an indexed corpus with a
    document for each text, and appears when it is complete.

    Args:
        texts: to encode.
        tokenizer: that encodes them.
        root: directory of the cache.

    Raises:
        UserError: the cache cannot be written to.
    """
    if not any(texts):
        return [[] for _ in texts]
    prefix = root / _name(texts, tokenizer)
    index = prefix.with_suffix(".idx")
    with locked(prefix.with_suffix(".lock")):
        corpus = _read_entry(index, len(texts))
        if corpus is None:
            index.unlink(missing_ok=True)
            if not _write(prefix, texts, tokenizer):
                return [[] for _ in texts]
            corpus = IndexedCorpus(index)
    tokens = corpus.tokens
    ends = np.cumsum(corpus.sizes).tolist()
    return [tokens[a:b].tolist() for a, b in itertools.pairwise([0, *ends])]


def _name(texts: Sequence[str], tokenizer: TextTokenizer) -> str:
    libraries = [f"{library} {importlib.metadata.version(library)}" for library in tokenizer.libraries]
    digest = hashlib.sha256("\0".join([tokenizer.digest(), *libraries]).encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _read_entry(index: Path, num_texts: int) -> IndexedCorpus | None:
    """Return the cached corpus; None if it is missing or damaged, to make it again."""
    if not exists(index):
        return None
    try:
        corpus = IndexedCorpus(index)
    except UserError:
        return None
    if corpus.num_documents == num_texts:
        return corpus
    return None


def _write(prefix: Path, texts: Sequence[str], tokenizer: TextTokenizer) -> bool:
    """Write the corpus; False if the texts have no token, as a corpus cannot be empty."""
    with CorpusWriter(prefix, "<i4") as writer:
        for first, last in track(list(_parts(texts)), "tokenising"):
            ids = tokenizer.encode_batch(texts[first:last])
            tokens = np.fromiter(itertools.chain.from_iterable(ids), "<i4")
            writer.add(tokens.tobytes(), np.array([len(text) for text in ids], "<i4").tobytes())
        if writer.num_tokens:
            writer.commit()
        return writer.num_tokens > 0


def _parts(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the texts of about 512 thousand characters each.

    An encoder's result takes a hundred times the memory of the ids, so it is not held for all texts together.
    """
    first = chars = 0
    for number, text in enumerate(texts, 1):
        chars += len(text)
        if chars >= _PART_CHARS or number == len(texts):
            yield first, number
            first = number
            chars = 0
