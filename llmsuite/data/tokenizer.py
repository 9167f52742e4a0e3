"""Converts text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.files import sha256_of
from llmsuite.base.safe_files import is_dir, is_file, open_regular
from llmsuite.data.masked_tokenizer import MAX_GAPS, MaskedTokenizer, ids_of, num_gaps
from llmsuite.data.special_tokens import CONFIGS, ROLES_WITH_IDS, TokenFiles, looks_special, read_token_files
from llmsuite.data.tokenizer_probe import PANIC, probe_tokenizer

_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "sentencepiece", "spiece", "encoder")
_SUFFIXES = (".model", ".tiktoken")
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of SentencePiece."""
_OF_TIKTOKEN = (
    "{directory}: its tokenizer is a tiktoken.model, which only Python code that comes with the model reads, and no "
    "such code is run here; put a tokenizer.json there. `TikTokenConverter` of transformers.convert_slow_tokenizer "
    'makes one: TikTokenConverter(vocab_file="tiktoken.model", pattern=PATTERN, extra_special_tokens=TOKENS)'
    '.converted().save("tokenizer.json"), with the pattern in the model\'s tokenization_*.py, and the special tokens '
    "of its tokenizer_config.json in the order of their ids"
)
_PROBES = ("a", "Z", "7", "é")
"""Texts that show the prefix that a tokenizer adds to every text."""


class TextTokenizer:
    """A tokenizer directory: tokenizer.json is read by `tokenizers`, everything else by paddlenlp."""

    def __init__(self, directory: Path):
        """Raises UserError when the directory has no tokenizer, one without an end-of-sequence token, or a faulty
        file."""
        self.directory = directory
        self.files = read_token_files(directory)
        """Tokens by the files of the directory."""
        self._fast: Any = None
        self._paddlenlp: Any = None
        if is_file(directory / "tokenizer.json"):
            self._fast = _open_fast(directory / "tokenizer.json")
            _complete(self._fast, self.files)
        elif is_file(directory / "tiktoken.model"):
            raise UserError(_OF_TIKTOKEN.format(directory=directory))
        elif is_file(directory / "tokenizer_config.json"):
            self._paddlenlp = self._open_paddlenlp()
        else:
            raise UserError(f"{directory}: has neither tokenizer.json nor tokenizer_config.json")
        self.special_tokens = self._roles()
        """bos_token, eos_token … as text, without the unset ones."""
        if "eos_token" not in self.special_tokens:
            raise UserError(
                f"{directory / 'tokenizer_config.json'}: names no eos_token, and no other file there names one, so no "
                "answer would end"
            )
        self.eos_id = self.token_id(self.special_tokens["eos_token"])

    def _open_paddlenlp(self) -> Any:
        directory = self.directory
        try:
            from paddlenlp.transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise UserError(
                f"{directory}: has no tokenizer.json, and what it has is read by paddlenlp, which is not installed "
                f"with all that it needs ({error}); put a tokenizer.json there, or install it with: "
                f"{install_command('paddlenlp')}"
            ) from error

        _check_regular(directory)
        probe_tokenizer(directory, self.digest())
        try:
            return AutoTokenizer.from_pretrained(str(directory))
        except Exception as error:  # paddlenlp checks neither an unknown class nor a missing file
            raise UserError(f"{directory}: paddlenlp cannot read its tokenizer: {error}") from error

    def _roles(self) -> dict[str, str]:
        """Return the text of each role's token, by the files of the tokenizer or the ids in the model's configs."""
        found = dict(self.files.roles)
        for role in ROLES_WITH_IDS:
            is_unset = role != "eos_token" and role in self.files.config  # the config sets it to null
            if role in found or is_unset:
                continue
            ids = self.files.ids(role, self.vocab_size)
            known = [i for i in ids if role == "eos_token" or i in self._added]
            if known:
                found[role] = self._token(known[0])
        return found

    @property
    def libraries(self) -> tuple[str, ...]:
        """Packages that read the tokenizer: ids depend on their versions."""
        return ("tokenizers",) if self._fast else ("tokenizers", "paddlenlp")

    @property
    def pad_id(self) -> int:
        """Id for padding: that of the end-of-sequence token if the tokenizer has none, as padding is masked."""
        pad = self.special_tokens.get("pad_token")
        return self.token_id(pad) if pad else self.eos_id

    def stop_token_ids(self, *models: Path) -> set[int]:
        """Return the ids of the tokens that end an answer.

        They are the end of sequence, and each that a generation_config.json or config.json names, in the tokenizer's
        directory or in those of `models`. Raises UserError that names a faulty file.
        """
        return {self.eos_id, *self.files.ids("eos_token", self.vocab_size, *models)}

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of ids, which start at 0."""
        if self._fast:
            return self._fast.get_vocab_size()
        return len(self._paddlenlp)

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Texts of the added tokens by id."""
        if self._fast:
            return {number: token.content for number, token in self._fast.get_added_tokens_decoder().items()}
        return {int(number): str(token) for token, number in self._paddlenlp.added_tokens_encoder.items()}

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts of the added tokens, which are matched in a text before the rest is split."""
        return frozenset(self._added.values())

    @functools.cached_property
    def borders(self) -> re.Pattern[str] | None:
        """Pattern of added tokens before which a text may be cut: its parts have the tokens of the full text.

        The library matches these tokens first, as they are, and encodes what is between them apart. None where there
        are no such tokens.
        """
        tokens = self._fast.get_added_tokens_decoder().values() if self._fast else ()
        if any(token.single_word for token in tokens):  # depends on the characters around it
            return None
        first = [token.content for token in tokens if not token.normalized]
        suffixes = {text[i:] for text in first for i in range(1, len(text))}
        inner = "\0".join(text[1:] for text in first)
        found = []
        for token in tokens:
            text = token.content
            if token.normalized or token.lstrip or token.rstrip or not text or text != text.strip():
                continue
            # no other token, and no other place of this one, may begin before it and reach into it
            if text not in inner and not any(text[:i] in suffixes for i in range(1, len(text) + 1)):
                found.append(text)
        return re.compile("|".join(map(re.escape, found))) if found else None

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of the tokens that any file flags as special, or names: `decode` leaves them out."""
        if self._fast:
            return frozenset(t.content for t in self._fast.get_added_tokens_decoder().values() if t.special)
        named = {text for text in (*self.files.roles.values(), *self.files.additional) if looks_special(text)}
        flagged = {token.text for token in self.files.added if token.special}
        return frozenset(map(str, self._paddlenlp.all_special_tokens)) | (named | flagged) & self.added_tokens

    @functools.cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens that no user text may be encoded as: the special ones, and added ones whose id is in a
        config. `llmsuite.data.control_tokens` adds those that a chat template writes."""
        ids = [i for role in ROLES_WITH_IDS for i in self._config_ids(role)]
        return self.special_texts | {self._added[i] for i in ids if i in self._added and looks_special(self._added[i])}

    def _config_ids(self, role: str) -> list[int]:
        """Return the ids of a role in the configs of the directory.

        None where they are faulty: that is an error where they are used.
        """
        try:
            return self.files.ids(role, self.vocab_size)
        except UserError:
            return []

    def add_tokens(self, tokens: Sequence[str], special_tokens: Sequence[str], path: Path) -> dict[int, Any]:
        """Write a tokenizer.json of this tokenizer with more tokens, which a tokenizer.json of its own is needed for.

        Args:
            tokens: texts of tokens; they get the next ids, those that the vocabulary has keep theirs.
            special_tokens: texts of special ones, which are added after them.
            path: of the file. This tokenizer has the tokens too afterwards, and is not to be used further.

        Returns:
            The tokens of the library by id.
        """
        from tokenizers import AddedToken

        assert self._fast is not None, "the caller checks for a tokenizer.json"
        self._fast.add_tokens([AddedToken(text, normalized=False) for text in tokens])
        self._fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special_tokens])
        self._fast.save(str(path))
        texts = {*tokens, *special_tokens}
        found = self._fast.get_added_tokens_decoder()
        return {number: token for number, token in found.items() if token.content in texts}

    def masked(self, hidden: frozenset[str]) -> MaskedTokenizer | None:
        """Return this tokenizer without some added tokens; None for one that paddlenlp reads, or whose vocabulary has
        very many gaps, each of which would need a token."""
        if not self._fast or num_gaps(self._fast) > MAX_GAPS:
            return None
        unknown = getattr(self._fast.model, "unk_token", self.special_tokens.get("unk_token"))
        return MaskedTokenizer(self._fast, hidden, self._fast.token_to_id(unknown) if unknown else None)

    def _token(self, number: int) -> str:
        found = self._fast.id_to_token(number) if self._fast else self._paddlenlp.convert_ids_to_tokens(number)
        if found is None:
            raise UserError(f"{self.directory}: a config names token {number}, and the tokenizer has none with this id")
        return str(found)

    def token_id(self, token: str) -> int:
        """Return the id of a token. Raises UserError if there is none."""
        found = self._fast.token_to_id(token) if self._fast else self._paddlenlp.convert_tokens_to_ids(token)
        if self._paddlenlp and found == self._paddlenlp.unk_token_id and token != self._paddlenlp.unk_token:
            found = None  # paddlenlp returns the id of the unknown token for any that it does not know
        if found is None:
            raise UserError(f"{self.directory}: {token!r} is not in the vocabulary")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens: a chat template has written them; see `with_special_tokens`.

        Raises:
            UserError: the tokenizer cannot encode the text.
        """
        if self._fast:
            with self._panics():
                return ids_of(self._fast, text)
        return list(self._paddlenlp(text, add_special_tokens=False)["input_ids"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, in parallel where the tokenizer can. Raises as `encode`."""
        if self._fast:
            with self._panics():
                return [list(e.ids) for e in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self.encode(text) for text in texts]

    def with_special_tokens(self, ids: Sequence[int], is_complete: bool = False) -> list[int]:
        """Return the ids of a text with the special tokens that the tokenizer adds around it, as in transformers.

        They are those of its post-processor; `add_bos_token` and `add_eos_token` of tokenizer_config.json override it.
        A text that begins or ends with these tokens already does not get them again.

        Args:
            ids: of a text that no chat template has rendered: a template writes the tokens itself.
            is_complete: True if the text ends there. A text that is to be continued gets no tokens after it.

        Raises:
            UserError: the tokens to add are not known.
        """
        prefix, suffix = self.affixes
        found = list(ids)
        if found[: len(prefix)] != prefix:
            found = [*prefix, *found]
        if not is_complete or (suffix and found[-len(suffix) :] == suffix):
            return found
        return [*found, *suffix]

    @functools.cached_property
    def prepends_space(self) -> bool:
        """True where tokenizer.json puts a space in front of each text, as those of Llama 2 and Mistral do. The class
        LlamaTokenizer of transformers 5 does so only where the text has none."""
        return self._fast is not None and "Prepend" in repr(self._fast.normalizer)

    @functools.cached_property
    def affixes(self) -> tuple[list[int], list[int]]:
        """Ids that are added before and after a text."""
        if self._fast:
            with self._panics():
                encoded = self._fast.encode("a", add_special_tokens=True)
            is_added = list(encoded.special_tokens_mask)
            ids = list(encoded.ids)
            begin = is_added.index(0) if 0 in is_added else len(ids)
            end = len(ids) - is_added[::-1].index(0) if 0 in is_added else len(ids)
        else:
            ids = list(self._paddlenlp("a")["input_ids"])
            text = self.encode("a")
            begin = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), len(ids))
            end = begin + len(text)
        prefix = self._apply_flag("bos", ids[:begin], lambda bos, ids: [bos, *ids])
        return prefix, self._apply_flag("eos", ids[end:], lambda eos, ids: [*ids, eos])

    def _apply_flag(self, name: str, ids: list[int], add: Callable[[int, list[int]], list[int]]) -> list[int]:
        """Add or remove the token of a role on one side of a text, if tokenizer_config.json has the flag for it."""
        key = f"add_{name}_token"
        text = self.special_tokens.get(f"{name}_token")
        is_enabled = self.files.flag(key)
        if is_enabled is None:
            return ids
        if text is None:
            if is_enabled:
                raise UserError(
                    f"{self.directory / 'tokenizer_config.json'}: {key} is true, and no {name}_token is named; name "
                    f"it, or set {key} to false"
                )
            return ids
        token = self.token_id(text)
        if not is_enabled:
            return [i for i in ids if i != token]
        return ids if token in ids else add(token, ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        if self._fast:
            with self._panics():
                return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return str(self._paddlenlp.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @functools.cached_property
    def anchors(self) -> tuple[str, ...]:
        """Texts after which another text is encoded in the same way as after any text.

        Empty for a tokenizer that adds no prefix to a text, so that a text has the same tokens alone.
        """
        found: list[str] = []
        for anchor in ("\n", ".", "x", "1"):
            begin = self.encode(anchor)
            encoded = [self.encode(anchor + text) for text in _PROBES]
            if not begin or any(ids[: len(begin)] != begin for ids in encoded):
                continue  # the anchor becomes a part of another token
            if [ids[len(begin) :] for ids in encoded] == [self.encode(text) for text in _PROBES]:
                return ()
            found.append(anchor)
        return tuple(found)

    @functools.cached_property
    def _context(self) -> list[int]:
        """An ordinary token. Others are decoded after it, as decoding differs at the start of a text."""
        return self.encode("a")[-1:]

    def token_text(self, token: int, is_first: bool = False, skip_special_tokens: bool = True) -> str:
        """Return the text of one token after others, or at the start of a text (`is_first`).

        The texts of tokens, one after the other, are the text of all, except for tokens that are a part of a character.
        """
        before = [] if is_first else self._context
        context = self.decode(before, skip_special_tokens)
        text = self.decode([*before, token], skip_special_tokens)
        if text.startswith(context):
            return text[len(context) :]
        return self.decode([token], skip_special_tokens)

    def is_visible(self, token: int) -> bool:
        """Return False for a token that is left out of decoded texts as special."""
        return bool(self.decode([token])) or not self.decode([token], False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token of a text, also of special ones.

        A token that is no complete character has its string in the vocabulary.
        """
        if not self._fast:
            return [str(token) for token in self._paddlenlp.convert_ids_to_tokens(list(ids))]
        inner = {token: self.token_text(token, False, False) for token in set(ids[1:])}
        texts = [self.token_text(t, True, False) for t in ids[:1]] + [inner[t] for t in ids[1:]]
        found = []
        for token, text in zip(ids, texts):
            is_partial = "\ufffd" in text or not text
            found.append(str(self._fast.id_to_token(token)) if is_partial else text)
        return found

    def token_bytes(self, token: int, is_first: bool = False) -> bytes | None:
        """Return the bytes of one token in UTF-8, also of a part of a character; None where they are not known."""
        text = self.token_text(token, is_first)
        if "\ufffd" not in text:
            return text.encode()
        piece = ""
        if self._fast:
            piece = str(self._fast.id_to_token(token))
        byte_piece = _BYTE_PIECE.fullmatch(piece)
        if byte_piece:
            return bytes.fromhex(byte_piece[1])
        byte_of = _bytes_of_characters()
        if piece and all(c in byte_of for c in piece):
            return bytes(byte_of[c] for c in piece)
        return None

    @contextlib.contextmanager
    def _panics(self) -> Iterator[None]:
        """Raise a panic of the library as UserError. It is recognised by name, as its class cannot be imported."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            reason = str(error).partition("\n")[0]
            raise UserError(f"{self.directory}: its tokenizer cannot process a text: {reason}") from None

    def digest(self) -> str:
        """Return the sha256 over the tokenizer's files."""
        digest = hashlib.sha256()
        for path in sorted(self.directory.iterdir()):
            is_own = path.name.startswith(_FILES) or path.suffix in _SUFFIXES
            has_end = path.name in CONFIGS and "eos_token" not in self.files.roles
            if is_file(path) and (is_own or has_end):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def stop_token_ids_of(directory: Path, vocab_size: int) -> list[int]:
    """Return the ids of the tokens that end an answer of a model.

    Args:
        directory: of the model, which may have no tokenizer.
        vocab_size: of the model.

    Raises:
        UserError: names a faulty file.
    """
    if any(is_file(directory / name) for name in ("tokenizer.json", "tokenizer_config.json")):
        return sorted(TextTokenizer(directory).stop_token_ids())
    return sorted(read_token_files(directory).ids("eos_token", vocab_size))


class NoTokenizer(TextTokenizer):
    """Stands for the tokenizer of a model that reads no tokens: any use of it raises UserError."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python tests for optional methods, such as __deepcopy__
            raise AttributeError(name)
        raise UserError(
            "model.family: its models read no tokens, and this run needs a tokenizer; choose a stage that does not"
        )


@functools.cache
def check_same_tokens(key: str, directory: Path, tokenizer: TextTokenizer) -> None:
    """Raise UserError, at a key of the recipe, unless the tokenizer in a directory has the tokens of another one with
    the same ids."""
    other = TextTokenizer(directory)
    ids = range(tokenizer.vocab_size)
    if other.vocab_size != len(ids) or other.pieces(ids) != tokenizer.pieces(ids):
        raise UserError(
            f"{key}: {directory} has other tokens than {tokenizer.directory}, whose token ids it would get; choose "
            "a model with the same vocabulary"
        )


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary, as in GPT-2's `bytes_to_unicode`.

    Printable characters stand for themselves, those from 256 on for the other bytes in turn.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _open_fast(path: Path) -> Any:
    """Open a tokenizer of `tokenizers` after a probe, without padding and truncation. Raises UserError."""
    from tokenizers import Tokenizer

    probe_tokenizer(path, sha256_of(path))
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: is not a readable tokenizer: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found


def _complete(fast: Any, files: TokenFiles) -> None:
    """Add the tokens of the files other than tokenizer.json, and flag those as special that any file flags.

    Raises:
        UserError: a token cannot have the id that a file assigns to it.
    """
    from tokenizers import AddedToken

    def made(text: str, is_special: bool, like: Any) -> Any:
        """Return a token that is matched in texts like another one."""
        return AddedToken(
            text,
            special=is_special,
            lstrip=like.lstrip,
            rstrip=like.rstrip,
            single_word=like.single_word,
            normalized=like.normalized,
        )

    named = {*files.roles.values(), *files.additional}
    added = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    missing: dict[str, Any] = {}
    for token in files.added:
        missing[token.text] = made(token.text, token.special, token)
    for text in named:  # in the vocabulary, but not matched in a text as a token
        if text not in added and text not in missing and looks_special(text) and fast.token_to_id(text) is not None:
            missing[text] = AddedToken(text, normalized=False, special=True)
    changed = []
    for text, token in {**added, **missing}.items():
        before = added.get(text)
        is_special = token.special or (before is not None and before.special) or (text in named and looks_special(text))
        full = made(text, is_special, token)
        if before is None or repr(before) != repr(full):
            changed.append(full)
    # new tokens get ids in the order in which they are added: groups keep the order of `changed`
    for is_special, tokens in itertools.groupby(changed, lambda token: bool(token.special)):
        add = fast.add_special_tokens if is_special else fast.add_tokens
        add(list(tokens))
    for token in files.added:
        if token.text not in added and fast.token_to_id(token.text) != token.id:
            raise UserError(
                f"{files.added_in}: {token.text!r} has the id {token.id}, and after the tokens of tokenizer.json it "
                f"gets {fast.token_to_id(token.text)}; add it to tokenizer.json"
            )


def _check_regular(directory: Path) -> None:
    """Raise UserError for files that are not regular, such as a pipe, which paddlenlp would wait for."""
    for path in sorted(directory.iterdir()):
        if (path.name.startswith(_FILES) or path.suffix in _SUFFIXES) and not is_dir(path):
            try:
                open_regular(path).close()
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
