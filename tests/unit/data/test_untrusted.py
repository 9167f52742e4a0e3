"""Templates, tokenizers and files that mean harm: what they may use is bounded, and what they are is looked at."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.commands import run_command
from llmsuite.base.errors import UserError
from llmsuite.data import rendering, tokenizer_probe
from llmsuite.data.chat_template import BUILTIN, ChatTemplate, load_template
from llmsuite.data.rendering import RenderError, render, render_all
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import DATA, ROOT

ASK = [Message("user", "Hi?")]
TURNS = {"messages": [{"role": "user", "content": "Hi?"}]}
GREEDY = [
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ 'x'.center(2000000000) }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 'x'.ljust(9000000000) ~ messages }}",
    "{{ messages | tojson(indent=9000000000) }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ messages[0].content | indent(9000000000, first=true) }}",
    "{{ [1] * 10 ** 10 }}",
]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",  # one operation of Python, which nothing in the process could interrupt
]


@pytest.mark.parametrize("source", GREEDY)
def test_a_template_has_a_memory_limit(source: str) -> None:
    with pytest.raises(UserError, match=r"chat template of it.* takes more than (1 GiB of memory|2 s of the)"):
        ChatTemplate(source, {}, "it").render(ASK)
    assert ChatTemplate("{{ messages | length }}", {}, "it").render(ASK) == "1"


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_has_a_time_limit(source: str) -> None:
    with pytest.raises(UserError, match=r"chat template of it.* takes more than 2 s of the processor"):
        ChatTemplate(source, {}, "it").render(ASK)
    assert ChatTemplate("{{ messages | length }}", {}, "it").render(ASK) == "1"


def test_a_process_that_renders_ends_silently_with_its_parent() -> None:
    here, there = multiprocessing.Pipe()
    program = f"from llmsuite.data.rendering import serve; serve({there.fileno()})"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=ROOT, pass_fds=[there.fileno()], stderr=subprocess.PIPE, text=True) as process:
        there.close()
        long = [{"messages": [{"content": "x" * 10**6}]}] * 9  # more than a pipe holds
        job = {"key": "it", "source": "{{ messages[0].content }}", "variables": long}
        here.send_bytes(json.dumps(job).encode())
        assert here.poll(60)
        here.close()
        assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == 0


def test_a_text_has_a_size_limit() -> None:
    with pytest.raises(RenderError, match="renders 134,217,738 bytes; a text has at most 134,217,728"):
        # of a variable: Jinja computes constants when it compiles, and Python then takes seconds to read such a one
        render("{{ messages[0].content * (134217728 + 10) }}", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(RenderError) as caught:
        render("{{ raise_exception('x' * 10 ** 6) }}", TURNS)
    assert str(caught.value) == "x" * 1000


def test_each_of_many_texts_has_its_own_limits() -> None:
    source = "{% if n == 3 %}{{ (n * n) ** (9 ** 9) }}{% elif n == 5 %}{{ 1 / 0 }}{% else %}{{ n }}{% endif %}"
    texts = render_all(source, [{"n": n} for n in range(600)])
    assert [text for text in texts if isinstance(text, str)] == [str(n) for n in range(600) if n not in (3, 5)]
    refused = {n: str(text) for n, text in enumerate(texts) if isinstance(text, RenderError)}
    assert refused == {3: "takes more than 2 s of the processor", 5: "division by zero"}
    assert render_all(source, []) == []
    (broken,) = render_all("{% if %}", [{}])
    assert isinstance(broken, RenderError)


def test_requests_are_split_by_size() -> None:
    long = "x" * 400_000
    asked = [{"text": "x"}] * 257
    assert [len(part) for part in rendering._parts(asked)] == [256, 1]
    assert [len(part) for part in rendering._parts([{"text": long}] * 5)] == [2, 2, 1]
    assert [len(part) for part in rendering._parts([{"text": 4 * long}] * 2)] == [1, 1]
    assert render_all("{{ text }}", [{"text": 4 * long}, {"text": long}]) == [4 * long, long]


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_separate_process_renders_the_same(name: str) -> None:
    talk = [Message("user", 'Hi?\ud800 "<b>" \U0001f600\0'), Message("assistant", "Hello.\u2028")]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = load_template(name, Path("/nowhere"), tokens).render(talk)
    theirs = ChatTemplate(BUILTIN[name] + "{# of a stranger #}", tokens, "it")
    assert theirs.render(talk) == expected
    rendering._renderer().close()  # it is started again, and knows the template again
    assert theirs.render(talk) == expected


def test_a_fork_has_its_own_renderer() -> None:
    theirs = ChatTemplate("{{ messages[0].content }}", {}, "it")
    assert theirs.render(ASK) == "Hi?"
    first = rendering._renderer()._process
    child = os.fork()
    if not child:
        code = 1
        try:
            is_right = theirs.render([Message("user", "there")]) == "there"
            code = 0 if is_right and rendering._renderer()._process is not first else 2
        finally:
            rendering._renderer().close()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert theirs.render(ASK) == "Hi?"
    assert rendering._renderer()._process is first


def test_the_renderer_ends_with_its_program() -> None:
    program = (
        "from llmsuite.data import rendering as r; r.render('x', None); print(r._renderer()._process.pid, flush=True);"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    pid = int(done.stdout)
    for _ in range(600):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} is still there")


def tokenizer(path: Path, **changes: Any) -> Path:
    path.mkdir()
    content = json.loads((DATA / "tokenizer" / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    (path / "tokenizer_config.json").write_bytes((DATA / "tokenizer" / "tokenizer_config.json").read_bytes())
    return path


def split(pattern: str) -> dict[str, Any]:
    parts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {"type": "Sequence", "pretokenizers": parts}


def grow(pattern: str, times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": pattern}, "content": pattern * 2}
    return {"type": "Sequence", "normalizers": [step] * times}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre_tokenizer": split("(a+)+$")}, "cannot encode common texts: Onig: Regex search error"),
        ({"pre_tokenizer": split(r"(\w+\s?)+$")}, "cannot encode common texts: Onig: Regex search error"),
        ({"normalizer": grow("e", 12)}, r"cannot encode common texts: [\d,]+ tokens for"),
        pytest.param(
            {"normalizer": grow("e", 50)},
            "ends the process that reads it with signal|takes more than",
            marks=pytest.mark.further,  # which takes its 20 seconds
        ),
        ({"model": {"type": "BPE"}}, "is not a readable tokenizer"),
    ],
    ids=["nested", "words", "longer", "endless", "none"],
)
def test_a_tokenizer_is_probed(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"tokenizer\.json: {says}"):
        TextTokenizer(tokenizer(tmp_path / "it", **changes))


def test_a_good_tokenizer_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tokenizer(tmp_path / "it")
    with open(place / "tokenizer.json", "a") as file:
        file.write("".join(" \n"[int(bit)] for bit in f"{uuid.uuid4().int:b}"))  # a file that was never seen
    started: list[Any] = []
    monkeypatch.setattr(tokenizer_probe, "run_command", lambda words: started.append(words) or run_command(words))
    for _ in range(2):
        assert TextTokenizer(place).encode("Hi?") == TextTokenizer(DATA / "tokenizer").encode("Hi?")
    assert len(started) == 1


@pytest.mark.parametrize("call", ["encode", "encode_batch"])
def test_a_text_that_a_tokenizer_cannot_process(tmp_path: Path, call: str) -> None:
    rare = "\u0bf5"
    made = TextTokenizer(tokenizer(tmp_path / "it", pre_tokenizer=split(f"({rare}+)+$")))
    text = rare * 64 + "!"
    with pytest.raises(UserError, match="its tokenizer cannot process a text: Onig: Regex search error"):
        made.encode(text) if call == "encode" else made.encode_batch([text])
    assert made.encode("Hi?") == TextTokenizer(DATA / "tokenizer").encode("Hi?")
