"""Pages for the first days: what they quote from code, results and settings is there."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmsuite.contract.registry import Registry
from tests.support.doc_options import options_of
from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "guide"
PAGES = {"English": GUIDE / "faq.md", "Chinese": ROOT / "docs" / "zh" / "guide" / "faq.md"}
FAQ = {
    language: re.findall(r"^### `(.+)`\n<!-- (\S+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for language, page in PAGES.items()
}
ROW = re.compile(r"^\| \[[^]]*\]\(([\w./-]+)#([\w-]+)\)(.*)\|$", re.MULTILINE)


@functools.cache
def _texts(module: str) -> list[str]:
    """The texts in a module, with … for what an f-string puts in."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def _is_said(message: str, texts: list[str]) -> bool:
    """Whether a text has a message; … stands for anything in either."""

    def plain(text: str) -> str:
        return re.sub(r"…[… ]*", "…", " ".join(text.split()))

    return any(plain(message).strip("…") in plain(text) for text in texts)


@pytest.mark.parametrize(("message", "module"), FAQ["English"], ids=[message[:40] for message, _ in FAQ["English"]])
def test_each_question_is_a_message_of_the_code(message: str, module: str) -> None:
    assert _is_said(message, _texts(module)), f"{module} does not say: {message}"


def test_all_questions_are_looked_up() -> None:
    for language, page in PAGES.items():
        assert len(FAQ[language]) == len(re.findall(r"^### ", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(FAQ["English"]) > 20
    assert len(FAQ["Chinese"]) > 10
    assert set(FAQ["Chinese"]) <= set(FAQ["English"])
    assert not _is_said("… overwrite each other; reinstall", _texts("llmsuite/cli/doctor.py"))


def _section(page: Path, anchor: str) -> str:
    """What stands under a heading, up to the next of the same level."""
    parts = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", part.split("\n")[0][3:].lower()).replace(" ", "-"): part for part in parts}
    return named[anchor]


def test_numbers_of_the_gallery_are_results() -> None:
    rows = ROW.findall((GUIDE / "gallery.md").read_text(encoding="utf-8"))
    assert len(rows) == 9
    for place, anchor, text in rows:
        found = set(re.findall(r"\d+(?:\.\d+)?", _section(GUIDE / place, anchor)))
        told = set(re.findall(r"\d+(?:\.\d+)?", " ".join(text.split("|")[2:])))
        assert told, anchor
        assert told <= found, (anchor, told - found)


def test_recipes_of_the_gallery_come_with_llmsuite() -> None:
    rows = ROW.findall((GUIDE / "gallery.md").read_text(encoding="utf-8"))
    for _, _, text in rows:
        for name in re.findall(r"`([\w-]+)`", text):
            assert (ROOT / "recipes" / "llama" / f"{name}.json").is_file(), name


def _started() -> Iterator[list[str]]:
    """Commands that a launcher or a cluster starts on docs/guide/clusters.md, from `llmsuite` on."""
    text = (GUIDE / "clusters.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL):
        if language == "yaml":
            job = yaml.safe_load(block)
            spec = job["spec"]["paddleReplicaSpecs"]["Worker"] if job["kind"] == "PaddleJob" else job["spec"]
            (container,) = spec["template"]["spec"]["containers"]
            yield container["command"]
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.search(r"llmsuite(?:\)\")? ((?:run|doctor|validate) .*)", line):
                yield ["llmsuite", *shlex.split(found[1].split(" #")[0].rstrip('"& '))]


def test_what_clusters_start_are_commands(registry: Registry) -> None:
    commands = list(_started())
    known = options_of(registry)
    assert len(commands) == 11
    assert sum("--launch.nnodes=2" in words for words in commands) == 7
    for words in commands:
        assert words[0] == "llmsuite"
        assert [w for w in words if w.startswith("--") and w.partition("=")[0] not in known[words[1]]] == [], words


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints",
        "clusters",
        "devices",
        "environments",
        "from-llamafactory",
        "from-other-suites",
        "from-trl",
        "hub",
        "models",
        "paddle-scripts",
        "planning",
        "plugin-examples",
        "plugin-models",
        "plugins",
        "python",
        "recipes",
        "rehearsing",
        "resume",
        "rewards",
        "stages",
        "tutorial-family",
        "tutorial-grpo",
        "tutorial-one-device",
        "tutorial-paddlenlp",
        "tutorial-stage",
    ],
)
def test_code_on_chinese_pages_is_that_of_the_english_ones(name: str) -> None:
    """The English pages' commands and programs are run or checked; these are the same."""
    pages = (directory / f"{name}.md" for directory in (GUIDE, ROOT / "docs" / "zh" / "guide"))
    english, chinese = (re.findall(r"```\w*\n.*?```", page.read_text(encoding="utf-8"), re.DOTALL) for page in pages)
    assert english
    assert chinese == english


@pytest.mark.parametrize(
    "page", [ROOT / "README.zh.md", *sorted((ROOT / "docs" / "zh").rglob("*.md"))], ids=lambda page: page.name
)
def test_chinese_sentences_are_on_one_line(page: Path) -> None:
    """Pages show a line break as a space, which does not belong between Chinese characters."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    wide = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
    assert re.findall(rf".*{wide}\n *{wide}.*", text) == []


def test_the_chinese_readme_leads_where_the_english_one_does() -> None:
    """To the Chinese page where there is one; links to a heading aside, which only the English page may have."""
    english, chinese = (
        set(re.findall(r"\]\((docs/[^)#]*|[A-Z]+\.md)\)", (ROOT / name).read_text(encoding="utf-8")))
        for name in ("README.md", "README.zh.md")
    )
    translated = {page: page.replace("docs/", "docs/zh/", 1) for page in english}
    wanted = {t if page.startswith("docs/") and (ROOT / t).is_file() else page for page, t in translated.items()}
    assert chinese - {"docs/README.md", "README.md"} == wanted


@pytest.mark.parametrize(
    "page",
    [*sorted(GUIDE.glob("*.md")), *sorted((ROOT / "docs" / "zh" / "guide").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT / "docs")),
)
def test_keys_on_the_guides_exist(page: Path) -> None:
    """`section.key`, where the section is one of recipes."""
    reference = (ROOT / "docs" / "reference" / "keys.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\| `([\w.]+)` \|", reference, re.MULTILINE))
    sections = {key.partition(".")[0] for key in keys if "." in key} - {"model", "environment", "reward"}
    named = re.findall(r"`([a-z_]+\.[a-z_][\w.]*)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL))
    parents = {key.rpartition(".")[0] for key in keys}
    unknown = [key for key in named if key.partition(".")[0] in sections and key not in keys | parents]
    assert [key for key in unknown if not key.endswith((".py", ".json", ".jsonl", ".safetensors", "_"))] == []
