"""What the documentation says works when pasted."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract import hookspecs
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.engine import ENGINE_RULES
from llmsuite.contract.schema.parallel import PARALLEL_RULES
from llmsuite.contract.schema.rule import Rule
from llmsuite.data.documents import read_documents
from llmsuite.data.keys import ColumnRules
from llmsuite.data.read import read_rows
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.rules import RULES
from tests.support.doc_options import options_of
from tests.support.paths import ROOT

RULES_PAGE = ROOT / "docs" / "reference" / "rules.md"
PARITY_PAGE = ROOT / "docs" / "notes" / "parity.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_generated_pages_are_current() -> None:
    path = ROOT / "docs" / "generate.py"
    result = subprocess.run([sys.executable, str(path), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_check_notices_a_stale_page(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = tmp_path / "plugins.md"
    stale.write_text("old")
    module.pages = lambda: {stale: "new"}
    assert module.main(["--check"]) == 1
    assert stale.read_text() == "old"


def test_every_hook_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "plugins.md").read_text(encoding="utf-8")
    names = list(hookspecs.hook_names())
    assert len(names) == 20
    assert [name for name in names if f"### `{name}(" not in text] == []


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", _prose(page)):
        if not target.startswith("http"):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in _anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_on_the_pages_exist(page: Path) -> None:
    """Python files, by their path or by room and name: `parallel/mesh.py`."""
    for name in re.findall(r"`([\w/.-]+/[\w-]+\.py)`", _prose(page)):
        is_ours = name.split("/")[0] in {path.name for path in (*ROOT.iterdir(), *(ROOT / "llmsuite").iterdir())}
        assert not is_ours or (ROOT / name).exists() or (ROOT / "llmsuite" / name).exists(), name


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "docs" / "guide" / "recipes.md"],
    ids=lambda page: page.name,
)
def test_recipes_on_the_pages_are_valid(page: Path, tmp_path: Path, registry: Registry) -> None:
    recipes = [block for block in _blocks(page, "json") if '"stage"' in block]
    assert recipes
    for block in recipes:
        (tmp_path / "recipe.json").write_text(block)
        plan_run(tmp_path / "recipe.json", [], registry)
        assert json.loads(block)["stage"] == "dpo"


def test_commands_on_the_pages_exist(registry: Registry) -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^(?:\$ )?llmsuite ([a-z]+)\b", text, re.MULTILINE) + re.findall(
            r"`llmsuite ([a-z]+)\b", text
        )
        for command in lines:
            assert command in registry.commands, (page.name, command)


def test_options_on_the_pages_exist(registry: Registry) -> None:
    """Options of the command, or keys of a recipe; with a plugin also those that the page writes a section for."""
    known = options_of(registry)
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fields = set(re.findall(r"^    (\w+): ", "\n".join(_blocks(page, "python")), re.MULTILINE))
        for line in re.findall(r"^llmsuite .*$", text, re.MULTILINE):
            own = fields if "--plugin" in line else set()
            words = [w for w in re.findall(r"(?<=[ '])--[\w.-]+", line) if w.rpartition(".")[2] not in own]
            assert [word for word in words if word not in known[line.split()[1]]] == [], (page.name, line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quotes_of_commands_on_the_pages_are_closed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if block.startswith("llmsuite "):
            shlex.split(block, comments=True)  # raises ValueError for an open quote


def test_make_targets_on_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, (page.name, target)


@pytest.mark.parametrize(
    "rule",
    [rule for rule in (*RULES, *PARALLEL_RULES, *ENGINE_RULES) if rule.example],
    ids=lambda rule: rule.combination,
)
def test_every_refusal_on_the_page_is_one(rule: Rule, registry: Registry) -> None:
    row = next(line for line in RULES_PAGE.read_text("utf-8").splitlines() if f"| {rule.combination} |" in line)
    example, message = (cell.strip() for cell in row.split("|")[3:5])
    plan_run(ROOT / "recipes" / "llama" / "dpo.json", [], registry)  # by the example, not by the recipe itself
    with pytest.raises(RecipeError) as caught:
        plan_run(ROOT / "recipes" / "llama" / "dpo.json", example.strip("`").split(), registry)
    assert "; ".join(f"{p.key}: {p.message}" for p in caught.value.problems) == message
    broken = {p.key.rpartition(".")[2] for p in caught.value.problems}
    assert len(broken) == 1, "an example breaks one rule"


@pytest.mark.further
def test_the_parity_table_covers_the_lattice_and_keeps_its_promise() -> None:
    from tests.parity.cases import GRADIENT_LIMIT, LIMIT
    from tests.parity.points import covering

    rows = re.findall(r"^\| \d+ \|.*\| (\S+e\S+) \| (\S+e\S+) \|$", PARITY_PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(covering())
    assert all(float(metrics) <= LIMIT and float(gradients) <= GRADIENT_LIMIT for metrics, gradients in rows)


def test_every_format_has_an_example_that_is_read(tmp_path: Path, registry: Registry) -> None:
    text = (ROOT / "docs" / "reference" / "formats.md").read_text("utf-8")
    examples = dict(re.findall(r"```jsonl (\w+)\n(.*?)```", text, re.DOTALL))
    assert examples.keys() == {*registry.data_formats}
    for name, rows in examples.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(rows)
        if name == "text":
            assert [document for document, _ in read_documents(path, "lines", "text")] == ["A document."]
        kind = registry.data_formats[name].kind
        rules = ColumnRules(capabilities=frozenset({"plain_text", "ranked"}))
        found = read_rows(path, kind, name, registry.data_formats, columns=rules)
        assert len(found) == len(rows.splitlines())
        if not name.startswith("swift_"):  # which are chosen by name only
            assert found == read_rows(path, kind, "auto", registry.data_formats, columns=rules)
