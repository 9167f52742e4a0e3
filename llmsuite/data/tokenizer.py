"""Text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.data.masked import Masked, ids_of
from llmsuite.data.special_tokens import CONFIGS, OF_IDS, TokenFiles, is_mark, read_token_files
from llmsuite.data.trial import PANIC, try_out
from llmsuite.errors import UserError
from llmsuite.files import sha256_of
from llmsuite.regular import is_dir, is_file, open_regular

_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "sentencepiece", "spiece", "encoder")
_SUFFIXES = (".model", ".tiktoken")
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of SentencePiece."""
_BEGINNINGS = ("a", "Z", "7", "é")
"""Texts by which one sees what a tokenizer puts in front of any."""


class TextTokenizer:
    """A tokenizer directory: tokenizer.json is read by `tokenizers`, everything else by paddlenlp."""

    def __init__(self, directory: Path):
        """Raises UserError when the directory holds no tokenizer, one without an end-of-sequence token, or a file that
        is faulty."""
        self.directory = directory
        self.files = read_token_files(directory)
        """What its files say of its tokens."""
        self._fast: Any = None
        self._paddlenlp: Any = None
        if is_file(directory / "tokenizer.json"):
            self._fast = _open_fast(directory / "tokenizer.json")
            _complete(self._fast, self.files)
        elif is_file(directory / "tokenizer_config.json"):
            self._paddlenlp = self._open_paddlenlp()
        else:
            raise UserError(f"{directory}: has neither tokenizer.json nor tokenizer_config.json")
        self.special_tokens = self._roles()
        """bos_token, eos_token … as text, without the unset ones."""
        if "eos_token" not in self.special_tokens:
            raise UserError(
                f"{directory / 'tokenizer_config.json'}: names no eos_token, and no other file there an end, so no "
                "answer would have one"
            )
        self.eos_id = self.token_id(self.special_tokens["eos_token"])

    def _open_paddlenlp(self) -> Any:
        directory = self.directory
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
            return AutoTokenizer.from_pretrained(str(directory))
        except Exception as error:  # a class it does not know, a file that is not there: it checks neither
            raise UserError(f"{directory}: paddlenlp cannot read its tokenizer: {error}") from error

    def _roles(self) -> dict[str, str]:
        """The text of the token of each role, by the files of the tokenizer or the ids of the model's configs."""
        found = dict(self.files.roles)
        for role in OF_IDS:
            is_none = role != "eos_token" and role in self.files.config  # which says that there is none
            if role in found or is_none:
                continue
            ids = self.files.ids(role, self.vocab_size)
            known = [i for i in ids if role == "eos_token" or i in self._added]
            if known:
                found[role] = self._token(known[0])
        return found

    @property
    def libraries(self) -> tuple[str, ...]:
        """The packages that read it: ids depend on their versions."""
        return ("tokenizers",) if self._fast else ("tokenizers", "paddlenlp")

    @property
    def pad_id(self) -> int:
        """Id for padding. Padding is masked, so the end-of-sequence token serves where the tokenizer has none."""
        pad = self.special_tokens.get("pad_token")
        return self.token_id(pad) if pad else self.eos_id

    def ends(self, *models: Path) -> set[int]:
        """Ids of the tokens that end an answer: the end of sequence, and each that a generation_config.json or
        config.json names, of its own directory or of those of `models`. Raises UserError naming a faulty file."""
        return {self.eos_id, *self.files.ids("eos_token", self.vocab_size, *models)}

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ids run from 0 to one below this."""
        return self._fast.get_vocab_size() if self._fast else len(self._paddlenlp)

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Texts of the tokens that are found in a text before the rest is split, by their ids."""
        if self._fast:
            return {number: token.content for number, token in self._fast.get_added_tokens_decoder().items()}
        return {int(number): str(token) for token, number in self._paddlenlp.added_tokens_encoder.items()}

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts of the tokens that are found in a text before the rest is split."""
        return frozenset(self._added.values())

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of the tokens that any file flags special, or names: `decode` leaves them out."""
        if self._fast:
            return frozenset(t.content for t in self._fast.get_added_tokens_decoder().values() if t.special)
        named = {text for text in (*self.files.roles.values(), *self.files.further) if is_mark(text)}
        flagged = {token.text for token in self.files.added if token.special}
        return frozenset(map(str, self._paddlenlp.all_special_tokens)) | (named | flagged) & self.added_tokens

    @functools.cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens that no text should become: the special ones, and added ones that a config has the id
        of. Those that a chat template writes come with it, see `llmsuite.data.control`."""
        ids = [i for role in OF_IDS for i in self._config_ids(role)]
        return self.special_texts | {self._added[i] for i in ids if i in self._added and is_mark(self._added[i])}

    def _config_ids(self, role: str) -> list[int]:
        """The ids of a role in the configs beside it; none where they are faulty, which is told where they are used."""
        try:
            return self.files.ids(role, self.vocab_size)
        except UserError:
            return []

    def masked(self, hidden: frozenset[str]) -> Masked | None:
        """This tokenizer without some added tokens; None for one that paddlenlp reads."""
        if not self._fast:
            return None
        unknown = getattr(self._fast.model, "unk_token", self.special_tokens.get("unk_token"))
        return Masked(self._fast, hidden, self._fast.token_to_id(unknown) if unknown else None)

    def _token(self, number: int) -> str:
        found = self._fast.id_to_token(number) if self._fast else self._paddlenlp.convert_ids_to_tokens(number)
        if found is None:
            raise UserError(f"{self.directory}: a config names token {number}, and the tokenizer has none with this id")
        return str(found)

    def token_id(self, token: str) -> int:
        """Id of one token. Raises UserError when there is none."""
        found = self._fast.token_to_id(token) if self._fast else self._paddlenlp.convert_tokens_to_ids(token)
        if self._paddlenlp and found == self._paddlenlp.unk_token_id and token != self._paddlenlp.unk_token:
            found = None  # paddlenlp gives a token it does not know the id of the unknown one
        if found is None:
            raise UserError(f"{self.directory}: {token!r} is not in the vocabulary")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without adding special tokens: the chat template has written them out; see `framed`.

        Raises:
            UserError: the tokenizer cannot take the text.
        """
        if self._fast:
            with self._panics():
                return ids_of(self._fast, text)
        return list(self._paddlenlp(text, add_special_tokens=False)["input_ids"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, in parallel where the tokenizer can. Raises as `encode`."""
        if self._fast:
            with self._panics():
                return [list(e.ids) for e in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self.encode(text) for text in texts]

    def framed(self, ids: Sequence[int], is_whole: bool = False) -> list[int]:
        """Ids of a text with the special tokens that the tokenizer puts around it, as transformers does: those of its
        post-processor, where `add_bos_token` and `add_eos_token` of tokenizer_config.json do not say otherwise.

        Args:
            ids: of a text that no chat template has rendered: this would have written them out.
            is_whole: whether the text ends there. One that is to be continued gets nothing behind it.

        A text that begins, or ends, with these tokens gets them no second time. Raises UserError when they cannot be
        told.
        """
        before, behind = self._frame
        found = [*([] if list(ids[: len(before)]) == before else before), *ids]
        if not is_whole or (behind and found[-len(behind) :] == behind):
            return found
        return [*found, *behind]

    @functools.cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids before and behind a text."""
        if self._fast:
            with self._panics():
                encoded = self._fast.encode("a", add_special_tokens=True)
            is_added, ids = list(encoded.special_tokens_mask), list(encoded.ids)
            begin = is_added.index(0) if 0 in is_added else len(ids)
            end = len(ids) - is_added[::-1].index(0) if 0 in is_added else len(ids)
        else:
            ids, text = list(self._paddlenlp("a")["input_ids"]), self.encode("a")
            begin = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), len(ids))
            end = begin + len(text)
        before = self._flagged("bos", ids[:begin], lambda bos, ids: [bos, *ids])
        return before, self._flagged("eos", ids[end:], lambda eos, ids: [*ids, eos])

    def _flagged(self, name: str, ids: list[int], add: Callable[[int, list[int]], list[int]]) -> list[int]:
        """The ids on one side of a text, with or without the token of a role where the config says so."""
        key, text = f"add_{name}_token", self.special_tokens.get(f"{name}_token")
        wanted = self.files.flag(key)
        if wanted is None:
            return ids
        if text is None:
            if wanted:
                raise UserError(
                    f"{self.directory / 'tokenizer_config.json'}: {key} is true, and no {name}_token is named; name "
                    f"it, or set {key} to false"
                )
            return ids
        token = self.token_id(text)
        if not wanted:
            return [i for i in ids if i != token]
        return ids if token in ids else add(token, ids)

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
        before = [] if is_first else self._before
        known, whole = (self.decode(ids, skip_special_tokens) for ids in (before, [*before, token]))
        return whole[len(known) :] if whole.startswith(known) else self.decode([token], skip_special_tokens)

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
        known = {token: self.token_text(token, False, False) for token in set(ids[1:])}
        texts = [self.token_text(t, True, False) for t in ids[:1]] + [known[t] for t in ids[1:]]
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
            is_own = path.name.startswith(_FILES) or path.suffix in _SUFFIXES
            has_end = path.name in CONFIGS and "eos_token" not in self.files.roles
            if is_file(path) and (is_own or has_end):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def ends_of(directory: Path, vocab_size: int) -> list[int]:
    """Ids of the tokens that end an answer, of the directory of a model with so many tokens, which may have no
    tokenizer. Raises UserError naming a faulty file."""
    if any(is_file(directory / name) for name in ("tokenizer.json", "tokenizer_config.json")):
        return sorted(TextTokenizer(directory).ends())
    return sorted(read_token_files(directory).ids("eos_token", vocab_size))


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


def _complete(fast: Any, files: TokenFiles) -> None:
    """Add the tokens that other files than tokenizer.json have, with their flags, and make those special that any file
    calls so. Raises UserError when a token cannot have the id that a file gives it."""
    from tokenizers import AddedToken

    named = {*files.roles.values(), *files.further}
    added = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    wanted: dict[str, Any] = {}
    for token in files.added:
        flags = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        wanted[token.text] = AddedToken(token.text, special=token.special, **flags)
    for text in named:  # in the vocabulary, but not found in a text as a token
        if text not in added and text not in wanted and is_mark(text) and fast.token_to_id(text) is not None:
            wanted[text] = AddedToken(text, normalized=False, special=True)
    changed = []
    for text, token in {**added, **wanted}.items():
        before = added.get(text)
        is_special = token.special or (before is not None and before.special) or (text in named and is_mark(text))
        flags = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        full = AddedToken(text, special=is_special, **flags)
        if before is None or repr(before) != repr(full):
            changed.append(full)
    for is_special, tokens in itertools.groupby(changed, lambda token: bool(token.special)):  # ids are in this order
        (fast.add_special_tokens if is_special else fast.add_tokens)(list(tokens))
    for token in files.added:
        if token.text not in added and fast.token_to_id(token.text) != token.id:
            raise UserError(
                f"{files.added_in}: {token.text!r} has the id {token.id}, and behind the tokens of tokenizer.json it "
                f"gets {fast.token_to_id(token.text)}; add it to tokenizer.json"
            )


def _check_regular(directory: Path) -> None:
    """Refuse what paddlenlp would wait for. Raises UserError."""
    for path in sorted(directory.iterdir()):
        if (path.name.startswith(_FILES) or path.suffix in _SUFFIXES) and not is_dir(path):
            try:
                open_regular(path).close()
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
