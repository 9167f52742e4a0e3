"""Tokenizers of strangers, tried out in a process of their own before this one reads them.

A tokenizer.json is a program too: patterns that try every way to match, replacements that let a text grow. So are files
of other kinds, SentencePiece's too, which paddlenlp reads. The trial reads them and encodes texts of many kinds, with
SECONDS of the processor and MEMORY bytes. What has passed is remembered in the cache by the digest of the files, so
that the ranks of a run and later runs do not try it again.

This finds what is slow for common texts. A text that was made for a certain pattern may still take long: the library
gives up a single match after ten million steps, and raises `PANIC` then.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llmsuite.cache import BUILT, cache_root, locked
from llmsuite.data.limits import limit_memory, limit_seconds
from llmsuite.errors import UserError
from llmsuite.regular import is_dir, is_file
from llmsuite.resources import bundled

PANIC = "PanicException"
"""Name of what `tokenizers` raises when it cannot go on: a BaseException, of a class that nothing can import."""
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
_MOST_TOKENS = 16
"""For each byte of a text: a byte is a token or less, unless the text is made to grow."""
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from llmsuite.data.trial import main; main({file!r}, {seconds}, {memory})"
)


def try_out(path: Path, digest: str) -> None:
    """Try a tokenizer.json out, or a directory whose tokenizer paddlenlp reads.

    Args:
        path: the file or the directory.
        digest: of the file, or of the files of the tokenizer.

    Raises:
        UserError: it cannot be read, or takes too much for common texts.
    """
    if bundled("data").resolve() in path.resolve().parents:  # our own
        return
    passed = cache_root() / BUILT / "tokenizers" / digest
    if is_file(passed):
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UserError):  # where nothing can be written, it is tried out each time
            stack.enter_context(locked(passed.with_suffix(".lock")))
        if not is_file(passed):
            _try_out(path)
            with contextlib.suppress(OSError):
                passed.touch()


def _try_out(path: Path) -> None:
    program = _PROGRAM.format(path=sys.path, file=str(path), seconds=SECONDS, memory=MEMORY)
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True
    )
    if done.returncode == -signal.SIGXCPU:
        raise UserError(f"{path}: takes more than {SECONDS} s of the processor for common texts; it may mean harm")
    if done.returncode < 0:
        raise UserError(f"{path}: ends the process that reads it with signal {-done.returncode}; it may mean harm")
    if done.returncode:
        raise UserError(f"{path}: {done.stdout.strip() or done.stderr.strip()[-500:]}")


def main(file: str, seconds: int, memory: int) -> None:
    """Try a tokenizer out: what the process does. Exits with 1 after saying why it is none to be used."""
    doing = "is not a readable tokenizer"
    try:
        read = _reader(Path(file), seconds, memory)
        if read is None:
            return
        encode, decode = read
        doing = "cannot take common texts"
        for text in _TEXTS:
            ids = encode(text)
            if len(ids) > _MOST_TOKENS * len(text.encode()):
                raise ValueError(f"{len(ids):,} tokens for {len(text):,} characters")
            decode(ids)
    except MemoryError:
        print(f"{doing}: takes more than {memory >> 30} GiB of memory")
    except BaseException as error:  # its panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        print(f"{doing}: {error}")
    else:
        return
    sys.exit(1)


def _reader(
    path: Path, seconds: int, memory: int
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]] | None:
    """How a tokenizer encodes and decodes, which counts from here on; None for one that paddlenlp does not read, which
    it says better where it is used."""
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
    except Exception:  # any, as `TextTokenizer` says
        return None
    return lambda text: slow(text, add_special_tokens=False)["input_ids"], slow.decode
