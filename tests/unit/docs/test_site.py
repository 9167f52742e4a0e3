"""The site that `make site` builds: every page is in its navigation, and its hooks lead links where they should.

Without mkdocs: `make site` itself builds it strictly, and continuous integration runs that.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

ENGLISH = sorted(path for path in (ROOT / "docs").rglob("*.md") if ROOT / "docs" / "zh" not in path.parents)
CHINESE = sorted((ROOT / "docs" / "zh").rglob("*.md"))


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_nav(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [path for child in (node.values() if isinstance(node, dict) else node) for path in _in_nav(child)]


@pytest.mark.parametrize(
    ("settings", "directory", "pages"),
    [("mkdocs.yml", "docs", ENGLISH), ("mkdocs.zh.yml", "docs/zh", CHINESE)],
    ids=["English", "Chinese"],
)
def test_the_navigation_has_each_page_once(hooks: Any, settings: str, directory: str, pages: list[Path]) -> None:
    named = _in_nav(yaml.safe_load((ROOT / settings).read_text(encoding="utf-8"))["nav"])
    assert len(set(named)) == len(named)
    generated = {f"project/{name}" for name in hooks.PROJECT if directory == "docs"}
    assert {*named} == {str(path.relative_to(ROOT / directory)) for path in pages} | generated
    assert all((ROOT / name).is_file() for name in hooks.PROJECT)


@pytest.mark.parametrize("page", [*ENGLISH, *CHINESE], ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_python_markdown_reads_a_page_as_github_does(page: Path) -> None:
    """Lists need a blank line before them there, and what belongs to an item four spaces."""
    before = ""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
            assert re.match(r"(    )*```", line), f"line {number}: indent the block by four spaces"
        elif not is_code and re.match(r"([-*]|\d+\.) ", line):
            assert before == "" or re.match(r"([-*]|\d+\.| +) ?", before), (
                f"line {number}: a blank line before the list"
            )
        before = line


@pytest.mark.parametrize(
    ("path", "link", "kept", "leads"),
    [
        ("docs/architecture.md", "guide/rl.md#ppo", "docs", "guide/rl.md#ppo"),
        ("docs/architecture.md", "../CONTRIBUTING.md#rooms", "docs", "../project/CONTRIBUTING/#rooms"),
        ("docs/architecture.md", "../llmsuite/cli/run.py", "docs", "../code/llmsuite/cli/run.py/"),
        ("docs/guide/rl.md", "../../recipes/llama/grpo.json", "docs", "../../code/recipes/llama/grpo.json/"),
        ("docs/README.md", "architecture.md", "", "architecture/"),
        ("CONTRIBUTING.md", "docs/guide/plugins.md", "", "../../guide/plugins/"),
        ("CHANGELOG.md", "https://semver.org/", "", "https://semver.org/"),
        ("docs/zh/README.md", "../guide/rl.md", "docs/zh", "../guide/rl/"),
        ("docs/zh/README.md", "../README.md", "docs/zh", "../"),
        ("docs/guide/inference.md", "../pictures/chat-models.png", "docs", "../pictures/chat-models.png"),
        (
            "docs/zh/guide/inference.md",
            "../../pictures/chat-models.png",
            "docs/zh",
            "../pictures/chat-models.png",
        ),
        ("docs/guide/rl.md", "#ppo-with-a-critic", "docs", "#ppo-with-a-critic"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(hooks: Any, path: str, link: str, kept: str, leads: str) -> None:
    assert hooks.with_links(f"See [this]({link}).", path, kept) == f"See [this]({leads})."


def test_links_in_code_stay_and_broken_ones_end_the_build(hooks: Any) -> None:
    text = "`[a](../b.md)`\n\n```\n[a](../b.md)\n```\n"
    assert hooks.with_links(text, "docs/README.md", "docs") == text
    with pytest.raises(FileNotFoundError, match=r"docs/README\.md: there is no \.\./b\.md"):
        hooks.with_links("[a](../b.md)", "docs/README.md", "docs")


def test_code_that_pages_name_becomes_pages(hooks: Any) -> None:
    pages = {
        "docs/a.md": "[x](../llmsuite/cli/run.py), [y](../llmsuite/checkpoint), [z](architecture.md), `[n](../no.py)`",
        "docs/zh/b.md": "![p](../pictures/report.png)",
    }
    assert hooks.linked_code(pages) == ["llmsuite/checkpoint", "llmsuite/cli/run.py"]
    assert "```python\n" in hooks.code_page("llmsuite/cli/run.py")
    assert "- `save.py` " in hooks.code_page("llmsuite/checkpoint")


def test_what_github_reads_otherwise_is_changed(hooks: Any) -> None:
    assert hooks.for_python_markdown("```jsonl openai\n{}\n```\n") == "```json\n{}\n```\n"
    assert hooks.for_python_markdown("| `str \\| null` | a \\| b |") == "| `str | null` | a \\| b |"
