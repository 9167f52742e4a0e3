"""Probes an untrusted tokenizer in a separate process before this one reads it.

A tokenizer.json is a program too: patterns with exponential backtracking, replacements that let a text grow. So are
files of other formats that paddlenlp reads, such as SentencePiece's. The probe reads them and encodes texts of many
kinds, with SECONDS of CPU time and MEMORY bytes. A tokenizer that passes is recorded in the cache by the digest of its
files, so that the ranks of a run and later runs do not probe it again.

This finds tokenizers that are slow for common texts. A text that is made for a certain pattern may still take long: the
library gives up a single match after ten million steps, and then raises `PANIC`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from llmsuite.base.cache import BUILT, cache_root, locked
from llmsuite.base.commands import CommandTimeout, run_command
from llmsuite.base.errors import UserError
from llmsuite.base.resources import bundled
from llmsuite.base.safe_files import is_dir, is_file, real_path
from llmsuite.data.process_limits import limit_memory, limit_seconds

PANIC = "PanicException"
"""Name of the exception of `tokenizers` for a panic in Rust: a BaseException whose class cannot be imported."""
SECONDS = 20
MEMORY = 4 << 30
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 3.14159 times 1,000,000 away!\n\n\tYes.\r\n" * 8,
    "def add(a: int, b: int) -> int:\n    return a + b  # https://example.org/?q=1&r=2\n" * 8,
    "\u5929\u5730\u7384\u9ec4\uff0c\u5b87\u5b99\u6d2a\u8352\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 " * 8,
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\u200d\U0001f525 e\u0301 " * 8,
    *(character * 512 + "!" for character in "a A1\n\t.-=_\u5929"),
    "a1 " * 256 + "\x00\ufffd",
    "".join(map(chr, range(1, 0x250))),
)
_MAX_REASON_CHARS = 2000
_MAX_TOKENS_PER_BYTE = 16
"""A byte is at most one token, unless the tokenizer lets a text grow."""
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from llmsuite.data.tokenizer_probe import main; "
    "main({file!r}, {seconds}, {memory})"
)


def probe_tokenizer(path: Path, digest: str) -> None:
    """Probe a tokenizer.json, or a directory whose tokenizer paddlenlp reads.

    Args:
        path: the file or the directory.
        digest: of the file, or of the files of the tokenizer.

    Raises:
        UserError: it cannot be read, or takes too much time or memory for common texts.
    """
    if bundled("data").resolve() in real_path(path).parents:  # comes with llmsuite
        return
    passed = cache_root() / BUILT / "tokenizers" / digest
    if is_file(passed):
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UserError):  # without a writable cache it is probed each time
            stack.enter_context(locked(passed.with_suffix(".lock")))
        if not is_file(passed):
            _probe(path)
            with contextlib.suppress(OSError):
                passed.touch()


def _probe(path: Path) -> None:
    program = _PROGRAM.format(path=sys.path, file=str(path), seconds=SECONDS, memory=MEMORY)
    try:
        done = run_command([sys.executable, "-c", program])
    except CommandTimeout as error:
        raise UserError(f"{path}: ends the process that reads it: {error}; it may be malicious") from error
    if done.code == -signal.SIGXCPU:
        raise UserError(f"{path}: takes more than {SECONDS} s of the processor for common texts; it may be malicious")
    if done.code < 0:
        raise UserError(f"{path}: ends the process that reads it with signal {-done.code}; it may be malicious")
    if done.code:
        raise UserError(f"{path}: {done.output.strip()[:_MAX_REASON_CHARS] or done.errors.strip()[-500:]}")


def main(file: str, seconds: int, memory: int) -> None:
    """Main function of the probing process. Prints the reason and exits with 1 if the tokenizer cannot be used."""
    failure = "is not a readable tokenizer"
    try:
        functions = _load_functions(Path(file), seconds, memory)
        if functions is None:
            return
        encode, decode = functions
        failure = "cannot encode common texts"
        for text in _TEXTS:
            ids = encode(text)
            if len(ids) > _MAX_TOKENS_PER_BYTE * len(text.encode()):
                raise ValueError(f"{len(ids):,} tokens for {len(text):,} characters")
            decode(ids)
    except MemoryError:
        print(f"{failure}: takes more than {memory >> 30} GiB of memory")
    except BaseException as error:  # a panic of `tokenizers` is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        print(f"{failure}: {error}")
    else:
        return
    sys.exit(1)


def _load_functions(
    path: Path, seconds: int, memory: int
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]] | None:
    """Return the encode and decode functions of a tokenizer, and start the limits.

    None for one that paddlenlp cannot read: `TextTokenizer` has the better message.
    """
    if is_dir(path):
        from paddlenlp.transformers import AutoTokenizer
    else:
        from tokenizers import Tokenizer
    limit_memory(memory)
    limit_seconds(seconds)
    if not is_dir(path):
        fast = Tokenizer.from_file(str(path))
        fast.no_padding()
        fast.no_truncation()
        return lambda text: fast.encode(text, add_special_tokens=False).ids, fast.decode
    try:
        slow = AutoTokenizer.from_pretrained(str(path))
    except MemoryError:
        raise
    except Exception:  # paddlenlp raises many types, see `TextTokenizer`
        return None
    return lambda text: slow(text, add_special_tokens=False)["input_ids"], slow.decode
