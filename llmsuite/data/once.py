"""Texts to token ids, made once and kept: of many ranks that read the same rows one encodes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from llmsuite.cache import locked
from llmsuite.data.indexed import CorpusWriter, IndexedCorpus
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.progress import track

_PART_CHARS = 1 << 19
_LIBRARIES = ("tokenizers", "paddlenlp")


def encode_once(texts: Sequence[str], tokenizer: TextTokenizer, root: Path) -> list[list[int]]:
    """What `tokenizer.encode_batch` gives, from the cache if it is there. Of several processes that want the same one
    makes it, and the others wait for it.

    An entry is named by everything that its ids depend on: the texts themselves, in which data format, chat template
    and stage have had their part already, the files of the tokenizer, and the libraries that read them. So a stale one
    cannot be met. It is a corpus of which each text is a document, and is there when it is whole, not before.

    Args:
        texts: to encode.
        tokenizer: with which.
        root: directory of the cache.

    Raises:
        UserError: the cache cannot be written to.
    """
    if not any(texts):
        return [[] for _ in texts]
    prefix = root / _name(texts, tokenizer)
    index = prefix.with_suffix(".idx")
    with locked(prefix.with_suffix(".lock")):
        corpus = _found(index, len(texts))
        if corpus is None:
            index.unlink(missing_ok=True)
            if not _write(prefix, texts, tokenizer):
                return [[] for _ in texts]
            corpus = IndexedCorpus(index)
    tokens, ends = corpus.tokens, np.cumsum(corpus.sizes).tolist()
    return [tokens[a:b].tolist() for a, b in itertools.pairwise([0, *ends])]


def _name(texts: Sequence[str], tokenizer: TextTokenizer) -> str:
    libraries = [f"{library} {importlib.metadata.version(library)}" for library in _LIBRARIES]
    digest = hashlib.sha256("\0".join([tokenizer.digest(), *libraries]).encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _found(index: Path, num_texts: int) -> IndexedCorpus | None:
    """None when it is not there, or no longer whole: then it is made again."""
    if not index.exists():
        return None
    try:
        corpus = IndexedCorpus(index)
    except UserError:
        return None
    return corpus if corpus.num_documents == num_texts else None


def _write(prefix: Path, texts: Sequence[str], tokenizer: TextTokenizer) -> bool:
    """Whether there was a token; an empty corpus is none."""
    with CorpusWriter(prefix, "<i4") as writer:
        for first, last in track(list(_parts(texts)), "tokenising"):
            ids = tokenizer.encode_batch(texts[first:last])
            tokens = np.fromiter(itertools.chain.from_iterable(ids), "<i4")
            writer.add(tokens.tobytes(), np.array([len(text) for text in ids], "<i4").tobytes())
        if writer.num_tokens:
            writer.commit()
        return writer.num_tokens > 0


def _parts(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of the texts, of about 512 thousand characters: what an encoder knows of a token beside its id takes a
    hundred times the room, and is not held for all of them."""
    first = chars = 0
    for number, text in enumerate(texts, 1):
        chars += len(text)
        if chars >= _PART_CHARS or number == len(texts):
            yield first, number
            first, chars = number, 0
