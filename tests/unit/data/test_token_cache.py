"""Rows are tokenised once: by one of the processes that start together, whatever befalls it."""

from __future__ import annotations

import collections
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data import token_cache
from llmsuite.data.token_cache import encode_cached
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import ROOT

TEXTS = ["Hello.", "", "one two three", "\u4e16\u754c <|im_end|>"]


class Counted(TextTokenizer):
    """Knows how often it was asked."""

    def __init__(self, directory: Path = ROOT / "data" / "tokenizer"):
        super().__init__(directory)
        self.times = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.times += 1
        return super().encode_batch(texts)


TOKENIZER = Counted()


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), max_size=6), st.integers(1, 20))
def test_cached_ids_equal_those_of_the_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], part_chars: int
) -> None:
    cache = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_PART_CHARS", part_chars)
        expected = TextTokenizer.encode_batch(TOKENIZER, texts)
        assert encode_cached(texts, TOKENIZER, cache) == expected  # made
        times = TOKENIZER.times
        assert encode_cached(texts, TOKENIZER, cache) == expected  # kept
        assert TOKENIZER.times == times
    shutil.rmtree(cache)


def test_an_entry_depends_on_texts_tokenizer_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counted()

    def is_new(texts: Sequence[str]) -> bool:
        before = asked.times
        encode_cached(texts, asked, tmp_path / "cache")
        return asked.times > before

    assert [is_new(["ab", "c"]), is_new(["ab", "c"])] == [True, False]
    assert [is_new(texts) for texts in (["a", "bc"], ["c", "ab"], ["ab", "c", ""], ["abc"])] == [True] * 4
    directory = shutil.copytree(asked.directory, tmp_path / "tokenizer")
    asked = Counted(directory)
    assert not is_new(["ab", "c"])  # the same files in another place
    (directory / "added_tokens.json").write_text("{}")
    assert is_new(["ab", "c"])
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{version(name)}.1")
    assert is_new(["ab", "c"])


@pytest.mark.parametrize("damage", [
    lambda idx, data: data.unlink(),
    lambda idx, data: data.write_bytes(data.read_bytes()[:-4]),
    lambda idx, data: idx.write_bytes(idx.read_bytes()[:-4]),
    lambda idx, data: idx.write_bytes(b""),
], ids=["no tokens", "fewer tokens", "less of the index", "an empty index"])  # fmt: skip
def test_damaged_entries_are_made_again(tmp_path: Path, damage: Callable[[Path, Path], object]) -> None:
    expected = encode_cached(TEXTS, TOKENIZER, tmp_path)
    (idx,) = tmp_path.glob("*.idx")
    damage(idx, idx.with_suffix(".bin"))
    times = TOKENIZER.times
    assert encode_cached(TEXTS, TOKENIZER, tmp_path) == encode_cached(TEXTS, TOKENIZER, tmp_path) == expected
    assert TOKENIZER.times == times + 1


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set LLMSUITE_CACHE to a directory to write in"):
        encode_cached(TEXTS, TOKENIZER, tmp_path / "file" / "cache")


# A rank up to its first sample, with a line in a file for each time it tokenises.
_RANK = """
import hashlib, os, sys
from pathlib import Path
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.contract.registry import load_plugins
from llmsuite.recipe.resolve import plan_run
from llmsuite.engine.data import load_tokenizer, make_stage

real, log = TextTokenizer.encode_batch, os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def counted(self, texts):
    os.write(log, f"{name} {hashlib.sha256(repr(texts).encode()).hexdigest()}\\n".encode())
    return real(self, texts)
TextTokenizer.encode_batch = counted

registry = load_plugins()
stages = {}
for name in ("sft", "dpo", "kto"):
    plan = plan_run(f"recipes/llama/{name}.json", [], registry, smoke=True)
    tokenizer = load_tokenizer(plan.model)
    stage = make_stage(plan.model, plan.data, plan.parallel, plan.train, registry, lambda: "no model", tokenizer)
    stages[name] = stage, plan.data.train_file
print("ready", flush=True)
sys.stdin.readline()
digest = hashlib.sha256()
for name, (stage, path) in stages.items():
    for sample in stage.reader.read(path):
        batch = stage.collate([sample])
        for key in ("input_ids", "positions", "targets"):
            digest.update(batch[key].tobytes())
print(digest.hexdigest())
"""


@pytest.mark.further
def test_ranks_that_start_together_tokenise_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    words = [sys.executable, "-c", _RANK, str(tmp_path / "log")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(words, cwd=ROOT, text=True, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for rank in ranks:
        for line in rank.stdout:
            if line == "ready\n":
                break
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 3, outputs
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1, outputs
    made = collections.Counter((tmp_path / "log").read_text().splitlines())
    assert sorted(line.split()[0] for line in made) == ["dpo", "kto", "sft"]
    assert set(made.values()) == {1}


# One process after the other dies, each one step later; none is hindered by what the last one has left.
_DYING = """
import os, sys
from pathlib import Path
from llmsuite.data.token_cache import encode_cached
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.os_steps import OsSteps

root, tokenizer, steps = Path(sys.argv[1]), TextTokenizer(Path("data/tokenizer")), OsSteps()
texts = [f"text {i}" for i in range(50)]
expected = tokenizer.encode_batch(texts)

def make(cache, at):
    with steps.below(cache, at, lambda: os._exit(9)):
        return encode_cached(texts, tokenizer, cache)

def dies(cache, at):
    child = os.fork()
    if not child:
        os._exit(0 if make(cache, at) == expected else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

make(root / "all", 0)
count = len(steps.seen)
assert sum("os.rename" in step for step in steps.seen) == 2, steps.seen
one = root / "one"
for at in range(1, count + 1):
    assert dies(root / str(at), at) == 9
    assert encode_cached(texts, tokenizer, root / str(at)) == expected
    if at < count:
        dies(one, at)  # in what the others have left
assert encode_cached(texts, tokenizer, one) == expected
print(count)
"""


def test_a_kill_at_any_step_leaves_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # threads would not be there in what it forks
    done = subprocess.run(
        [sys.executable, "-c", _DYING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
