"""Feeds what reads strangers' input with damaged and made-up input: no traceback, no hang, no more memory than a limit.

python -m tests.tools.fuzz [--examples N] [--seed SEED] [CORPUS...]

Corpora: recipes, requests (to serve), templates (of chats), safetensors, gguf, archives. Each is a process of its own
with a limit of memory; an example may take 2 s of processor time. What fails is made small by hypothesis and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.resources import bundled
from tests.support.damage import damaged, damages, values
from tests.support.paths import ROOT

HANG_SECONDS = 2.0
ASLEEP_SECONDS = 30.0
"""Of waiting for nothing, on a machine that is busy with other things."""
MOST_BYTES = 2 << 30
"""Beyond what a process has when it begins."""
Check = Callable[[Any], None]
Corpus = Callable[[Path], tuple[st.SearchStrategy[Any], Check]]


class Hangs(Exception):
    """An example takes too long."""


@contextlib.contextmanager
def limited(processor: float = HANG_SECONDS) -> Iterator[None]:
    """Raise Hangs where the block takes more seconds of the processor, or too many of any clock."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"more than {processor:.0f} s of the processor, or {ASLEEP_SECONDS:.0f} s")

    for number, clock, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, processor),
        (signal.SIGALRM, signal.ITIMER_REAL, max(ASLEEP_SECONDS, 10 * processor)),
    ):
        signal.signal(number, stop)
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(clock, 0)


# corpora


def recipes(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    from llmsuite.base.exits import exit_code
    from llmsuite.cli import validate
    from llmsuite.cli.main import split_overrides
    from llmsuite.contract.registry import load_plugins

    registry = load_plugins()
    known = [path.read_text(encoding="utf-8") for path in sorted(bundled("recipes").glob("*/*.json"))]
    paths = sorted({path for text in known for path in _paths(json.loads(text))})
    changes = st.lists(st.tuples(st.sampled_from(paths), values), min_size=1, max_size=3)
    words = st.lists(st.tuples(st.sampled_from(paths), values), max_size=2)
    file = place / "recipe.json"

    def validated(path: Path, overrides: list[str]) -> int:
        """What the command does with its words, but for the parser of all commands, which takes most of its time."""
        own, given = split_overrides([str(path), *overrides], set())
        return validate.run(argparse.Namespace(recipes=own, overrides=given, smoke=False), registry)

    def check(drawn: Any) -> None:
        text, changed, damage, given = drawn
        tree = json.loads(text)
        for path, value in changed:
            _set(tree, path, value)
        content = json.dumps(tree, indent=1).encode("utf-8", "surrogatepass")
        file.write_bytes(damaged(content, damage) if damage else content)
        overrides = [f"--{'.'.join(path)}={json.dumps(value)}" for path, value in given]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = exit_code(lambda: validated(file, overrides))
        assert code in (0, 2), f"exit code {code}"
        assert "Traceback" not in said.getvalue(), said.getvalue()

    # most have their form, so that more is read of them than the first bracket
    return st.tuples(st.sampled_from(known), changes, st.just([]) | st.just([]) | damages, words), check


def requests(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    from starlette.testclient import TestClient

    from llmsuite.serving.app import make_app
    from llmsuite.serving.limits import Limits
    from llmsuite.serving.protocol import ChatRequest, CompletionRequest
    from tests.support.served import make_service

    client = TestClient(make_app(make_service(Limits(max_new_tokens=8))))
    client.__enter__()
    logging.disable(logging.INFO)  # httpx has a line for each request
    goods: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 4},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    }
    keys = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "unknown"})
    messages = st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=9) | values}
        ),
        max_size=3,
    )
    changes = st.lists(st.tuples(st.sampled_from(keys), values) | st.tuples(st.just("messages"), messages), max_size=4)

    def check(drawn: Any) -> None:
        path, changed, damage = drawn
        content = json.dumps({**goods[path], **dict(changed)}).encode()
        if damage:
            content = damaged(content, damage)
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code < 500, f"{answer.status_code} {answer.text}"
        if answer.status_code == 200:
            again = client.post(path, json=goods[path])
            assert again.status_code == 200, f"after it: {again.status_code} {again.text}"

    return st.tuples(st.sampled_from(sorted(goods)), changes, st.just([]) | st.just([]) | damages), check


def templates(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    from llmsuite.data.chat_template import BUILTIN, ChatTemplate
    from llmsuite.data.rows import Message

    parts = [
        "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ m.role }}", "{% if m %}", "{% endif %}",
        "{% else %}", "{% set x = [1, 2] %}", "{{ x | join(',') }}", "{{ messages[0] }}", "{{ ''.__class__ }}",
        "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{#", "#}",
        "{% generation %}", "{% endgeneration %}", "{{ tools | tojson }}", "{{ none.x.y }}", "{% include 'x' %}",
        "{{ range(9) | list }}", "{{ f(f(f)) }}", "{{ self }}", "{{ loop.index }}", "{{ namespace(a=1).a }}", "{{",
        "{% break %}", "{{ '%s' % m }}", "{{ strftime_now('%Y') }}", "{{ messages | map(attribute='role') | list }}",
        "{{ [1] * 9 }}", "}}", "{%", "text",
    ]  # fmt: skip
    made = st.lists(st.sampled_from(parts) | st.text(max_size=6), max_size=12).map("".join)
    spoilt = st.tuples(st.sampled_from(sorted(BUILTIN.values())), damages).map(
        lambda drawn: damaged(drawn[0].encode(), drawn[1]).decode(errors="replace")
    )
    turns = [Message("system", "be brief"), Message("user", "hi"), Message("assistant", "yes")]

    def check(source: str) -> None:
        with contextlib.suppress(UserError):
            ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "a stranger").render(turns)

    return made | spoilt, check


def safetensors(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    import numpy as np
    import safetensors.numpy

    from llmsuite.checkpoint.stored import read_header

    good = safetensors.numpy.save({f"t{n}": np.arange(n * 3, dtype="float32").reshape(n, 3) for n in range(1, 5)})
    head = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + head])
    data = good[8 + head :]
    file = place / "model.safetensors"
    changes = st.lists(
        st.tuples(st.sampled_from(sorted(header)), st.sampled_from(["dtype", "shape", "data_offsets"]), values),
        max_size=3,
    )

    def check(drawn: Any) -> None:
        changed, damage = drawn
        tree = json.loads(json.dumps(header))
        for name, key, value in changed:
            tree[name][key] = value
        text = json.dumps(tree).encode()
        content = len(text).to_bytes(8, "little") + text + data
        file.write_bytes(damaged(content, damage) if damage else content)
        with contextlib.suppress(UserError):
            read_header(file)

    return st.tuples(changes, st.just([]) | damages), check


def gguf(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    from llmsuite.checkpoint.convert.gguf import import_gguf
    from llmsuite.contract.registry import load_plugins
    from tests.support.gguf_files import write_gguf

    good = write_gguf(place / "good.gguf").read_bytes()
    families = load_plugins().models
    file = place / "model.gguf"
    target = place / "model"
    # nearly all that is read is in the first part of the file
    early = damages.map(lambda damage: [(place / 8, what, bytes_) for place, what, bytes_ in damage])

    def check(damage: Any) -> None:
        file.write_bytes(damaged(good, damage))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with contextlib.suppress(UserError):
            import_gguf(file, target, families)

    return early | damages, check


def archives(place: Path) -> tuple[st.SearchStrategy[Any], Check]:
    from llmsuite.data.prepare import _convert

    goods = []
    rows = b'{"text": "a row"}\n' * 200
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(place / name, mode) as archive:  # type: ignore[call-overload]
            for member in ("train.jsonl", "eval.jsonl", "x" * 150 + ".jsonl"):
                info = tarfile.TarInfo(member)
                info.size = len(rows)
                archive.addfile(info, io.BytesIO(rows))
        goods.append((place / name).read_bytes())
    with zipfile.ZipFile(place / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("train.jsonl", rows)
        zipped.writestr("eval.jsonl", rows)
    goods.append((place / "a.zip").read_bytes())
    file = place / "archive"
    target = place / "rows"

    def check(drawn: Any) -> None:
        content, damage = drawn
        file.write_bytes(damaged(content, damage))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with contextlib.suppress(UserError):
            _convert(file, target, {})

    return st.tuples(st.sampled_from(goods), damages), check


def _paths(node: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in node.items() if isinstance(node, dict) else ():
        yield (*prefix, name)
        yield from _paths(value, (*prefix, name))


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[path[-1]] = value


CORPORA: dict[str, tuple[Corpus, int]] = {
    "recipes": (recipes, 2000),
    "requests": (requests, 2000),
    "templates": (templates, 4000),
    "safetensors": (safetensors, 4000),
    "gguf": (gguf, 1000),
    "archives": (archives, 2000),
}
"""With the number of examples of each."""


def feed(name: str, examples: int, seed: int) -> None:
    """Feed one corpus, in this process. Raises what an example raises, or that it hangs or takes too much memory."""
    make = CORPORA[name][0]
    with tempfile.TemporaryDirectory() as place:
        strategy, check = make(Path(place))
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES,) * 2)
        count = 0
        longest = 0.0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples, deadline=None, database=None, derandomize=False, report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(strategy)
        def one(drawn: Any) -> None:
            nonlocal count, longest
            count = count + 1
            began = time.process_time()
            with limited():
                check(drawn)
            longest = max(longest, time.process_time() - began)

        one()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name}: {count} examples, the longest took {longest:.2f} s, at most {peak:,.0f} MB", flush=True)


def main(names: list[str], examples: int | None, seed: int) -> int:
    """Feed corpora, each in a process of its own; returns how many have failed."""
    failed = []
    for name in names or list(CORPORA):
        words = ["--inside", name, "--examples", str(examples or CORPORA[name][1]), "--seed", str(seed)]
        if subprocess.run([sys.executable, "-m", "tests.tools.fuzz", *words], cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"seed {seed}: {', '.join(failed) + ' failed' if failed else 'nothing failed'}")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("corpora", nargs="*", metavar="CORPUS", help=", ".join(CORPORA))
    parser.add_argument("--examples", type=int, help="of each corpus")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--inside", choices=list(CORPORA), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        feed(given.inside, given.examples, given.seed)
    else:
        sys.exit(1 if main(given.corpora, given.examples, given.seed) else 0)
