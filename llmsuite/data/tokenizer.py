"""Text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.data.trial import PANIC, try_out
from llmsuite.errors import UserError
from llmsuite.files import read_json_file, sha256_of
from llmsuite.regular import open_regular

_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "sentencepiece", "spiece", "encoder")
_SUFFIXES = (".model", ".tiktoken")
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of SentencePiece."""
_BEGINNINGS = ("a", "Z", "7", "é")
"""Texts by which one sees what a tokenizer puts in front of any."""


def special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token … of a tokenizer directory as text, without the unset ones. Raises UserError when its
    tokenizer_config.json cannot be read."""
    path, found = directory / "tokenizer_config.json", {}
    config = read_json_file(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise UserError(f"{path}: is a {type(config).__name__}, not an object")
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if value:
            found[key] = str(value)
    return found


class TextTokenizer:
    """A tokenizer directory: tokenizer.json is read by `tokenizers`, everything else by paddlenlp."""

    def __init__(self, directory: Path):
        """Raises UserError when the directory holds no tokenizer, or one without an end-of-sequence token."""
        self.directory = directory
        config_path = directory / "tokenizer_config.json"
        self.special_tokens = special_tokens(directory)
        """bos_token, eos_token … as text, without the unset ones."""
        self._fast: Any = None
        self._paddlenlp: Any = None
        if (directory / "tokenizer.json").is_file():
            self._fast = _open_fast(directory / "tokenizer.json")
        elif config_path.is_file():
            try:
                from paddlenlp.transformers import AutoTokenizer
            except ModuleNotFoundError as error:
                raise UserError(
                    f"{directory}: has no tokenizer.json, and what it has is read by paddlenlp, which is not installed "
                    f"({error}); put a tokenizer.json there, or install the extra cpu, gpu or xpu"
                ) from error

            _check_regular(directory)
            try_out(directory, self.digest())
            try:
                self._paddlenlp = AutoTokenizer.from_pretrained(str(directory))
            except Exception as error:  # a class it does not know, a file that is not there: it checks neither
                raise UserError(f"{directory}: paddlenlp cannot read its tokenizer: {error}") from error
        else:
            raise UserError(f"{directory}: has neither tokenizer.json nor tokenizer_config.json")
        eos = self.special_tokens.get("eos_token")
        if eos is None:
            raise UserError(f"{config_path}: names no eos_token, so no answer would have an end")
        self.eos_id = self.token_id(eos)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The packages that read it: ids depend on their versions."""
        return ("tokenizers",) if self._fast else ("tokenizers", "paddlenlp")

    @property
    def pad_id(self) -> int:
        """Id for padding. Padding is masked, so the end-of-sequence token serves where the tokenizer has none."""
        pad = self.special_tokens.get("pad_token")
        return self.token_id(pad) if pad else self.eos_id

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ids run from 0 to one below this."""
        return self._fast.get_vocab_size() if self._fast else len(self._paddlenlp)

    @functools.cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens that mark turns and ends, which `encode` finds in any text."""
        if self._fast:
            return frozenset(t.content for t in self._fast.get_added_tokens_decoder().values() if t.special)
        return frozenset(map(str, self._paddlenlp.all_special_tokens))

    def token_id(self, token: str) -> int:
        """Id of one token. Raises UserError when there is none."""
        found = self._fast.token_to_id(token) if self._fast else self._paddlenlp.convert_tokens_to_ids(token)
        if self._paddlenlp and found == self._paddlenlp.unk_token_id and token != self._paddlenlp.unk_token:
            found = None  # paddlenlp gives a token it does not know the id of the unknown one
        if found is None:
            raise UserError(f"{self.directory}: {token!r} is not in the vocabulary")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without adding special tokens: the chat template has written them out.

        Raises:
            UserError: the tokenizer cannot take the text.
        """
        if self._fast:
            with self._panics():
                return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._paddlenlp(text, add_special_tokens=False)["input_ids"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, in parallel where the tokenizer can. Raises as `encode`."""
        if self._fast:
            with self._panics():
                return [list(e.ids) for e in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        if self._fast:
            with self._panics():
                return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return str(self._paddlenlp.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @functools.cached_property
    def anchors(self) -> tuple[str, ...]:
        """Texts behind which others are encoded as they go on from any text. Empty for a tokenizer that puts nothing in
        front of a text, so that a text by itself has the tokens that it has behind others."""
        found: list[str] = []
        for anchor in ("\n", ".", "x", "1"):
            begin = self.encode(anchor)
            whole = [self.encode(anchor + text) for text in _BEGINNINGS]
            if not begin or any(ids[: len(begin)] != begin for ids in whole):
                continue  # the anchor becomes a part of another token
            if [ids[len(begin) :] for ids in whole] == [self.encode(text) for text in _BEGINNINGS]:
                return ()
            found.append(anchor)
        return tuple(found)

    @functools.cached_property
    def _before(self) -> list[int]:
        """An ordinary token, behind which others are decoded: tokenizers write them differently at the beginning of a
        text."""
        return self.encode("a")[-1:]

    def token_text(self, token: int, is_first: bool = False, skip_special_tokens: bool = True) -> str:
        """Text of one token behind others, or where it begins a text. So the texts of tokens, one after the other, are
        the text of all, but for tokens that are a part of a character."""
        if is_first or not self._before:
            return self.decode([token], skip_special_tokens)
        before = self.decode(self._before, skip_special_tokens)
        whole = self.decode([*self._before, token], skip_special_tokens)
        return whole[len(before) :] if whole.startswith(before) else self.decode([token], skip_special_tokens)

    def begin(self, ids: Sequence[int]) -> int:
        """The number of the token with which the text of some begins: the first that is not left out as special."""
        for number, token in enumerate(ids):
            if self.decode([token]) or not self.decode([token], False):
                return number
        return 0

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of each token of a text, special ones too; tokens that are no whole character as in the vocabulary."""
        if not self._fast:
            return [str(token) for token in self._paddlenlp.convert_ids_to_tokens(list(ids))]
        texts = [self.token_text(token, number == 0, skip_special_tokens=False) for number, token in enumerate(ids)]
        return [str(self._fast.id_to_token(t)) if "\ufffd" in text or not text else text for t, text in zip(ids, texts)]

    def bytes_of(self, token: int, is_first: bool = False) -> bytes | None:
        """The bytes that one token stands for in UTF-8, a part of a character too; None where they are not known."""
        text = self.token_text(token, is_first)
        if "\ufffd" not in text:
            return text.encode()
        piece = str(self._fast.id_to_token(token)) if self._fast else ""
        if alone := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(alone[1])
        known = _bytes_of_characters()
        return bytes(known[c] for c in piece) if piece and all(c in known for c in piece) else None

    @contextlib.contextmanager
    def _panics(self) -> Iterator[None]:
        """What the library cannot do, said as such: of the type that it raises then nothing but the name is known."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            reason = str(error).partition("\n")[0]
            raise UserError(f"{self.directory}: its tokenizer cannot take a text: {reason}") from None

    def digest(self) -> str:
        """sha256 over the tokenizer's files."""
        digest = hashlib.sha256()
        for path in sorted(self.directory.iterdir()):
            if path.is_file() and (path.name.startswith(_FILES) or path.suffix in _SUFFIXES):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


class NoTokenizer(TextTokenizer):
    """In place of a tokenizer, for models that read no tokens: whoever asks it for something is told so."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, such as whether it can be copied in a way of its own
            raise AttributeError(name)
        raise UserError(
            "model.family: its models read no tokens, and this run asks for a tokenizer; choose a stage that does not"
        )


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 has it: printable ones for
    themselves, and those from 256 on for the others in turn."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _open_fast(path: Path) -> Any:
    """A tokenizer of `tokenizers` that was tried out, without padding and truncation. Raises UserError."""
    from tokenizers import Tokenizer

    try_out(path, sha256_of(path))
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # what it raises has no type of its own
        raise UserError(f"{path}: is not a readable tokenizer: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found


def _check_regular(directory: Path) -> None:
    """Refuse what paddlenlp would wait for. Raises UserError."""
    for path in sorted(directory.iterdir()):
        if (path.name.startswith(_FILES) or path.suffix in _SUFFIXES) and not path.is_dir():
            try:
                open_regular(path).close()
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
