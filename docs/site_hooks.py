"""What mkdocs needs of pages that are written for GitHub.

Links may lead out of the pages' own directory: to files of the repository, which become pages of the site, and to pages
in the other language. Some of GitHub's Markdown is another one than Python-Markdown's.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages at the root of the repository that the site has below `project`."""
PICTURES = "docs/pictures/"
"""What both sites have as it is."""
_LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
_CODE = re.compile(r"^ *(?P<fence>```+).*?^ *(?P=fence) *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """A page with what is neither a block nor a span of code changed."""
    parts = []
    at = 0
    for code in _CODE.finditer(text):
        parts += [change(text[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def links(text: str) -> Iterator[str]:
    """Targets of the links of a page that are paths, without their anchors."""
    found: list[str] = []
    outside_code(text, lambda prose: found.extend(m["target"] for m in _LINK.finditer(prose)) or prose)
    yield from (target for target in found if "://" not in target and not target.startswith("mailto:"))


def place_of(path: str) -> str:
    """Where the site has a file of the repository, as a path below its root: one that ends with "/" or is empty."""
    page = path.removeprefix("docs/").removesuffix(".md")
    if path in PROJECT:
        return f"project/{page}/"
    if path in ("README.md", "README.zh.md"):
        return "" if path == "README.md" else "zh/"
    if not (path.startswith("docs/") and path.endswith(".md")):
        return f"code/{path}/"
    return posixpath.join(posixpath.dirname(page), "") if posixpath.basename(page) == "README" else f"{page}/"


def with_links(text: str, path: str, kept: str) -> str:
    """A page with its links to files outside of a directory led to where the site has them.

    Args:
        text: of the page.
        path: of the page in the repository.
        kept: the directory whose pages mkdocs leads to by itself, empty for none.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    here = place_of(path)

    def lead(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith("mailto:"):
            return link.group()
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if kept and found.startswith(f"{kept}/") and not (kept == "docs" and found.startswith("docs/zh/")):
            return link.group()
        if not (ROOT / found).exists():
            raise FileNotFoundError(f"{path}: there is no {target}")
        if found.startswith(PICTURES):  # mkdocs knows it as a file of the pages' directory, see `on_files`
            page = posixpath.dirname(path.removeprefix(f"{kept}/"))
            return f"]({posixpath.relpath(found.removeprefix('docs/'), page)})"
        there = posixpath.relpath("/" + place_of(found), "/" + here)
        return f"]({there}/{link['anchor'] or ''})"

    return outside_code(text, lambda prose: _LINK.sub(lead, prose))


def for_python_markdown(text: str) -> str:
    """A page without what GitHub reads otherwise: blocks with a second word behind the language, and bars in
    tables that are escaped inside of code."""
    text = re.sub(r"^( *```)jsonl.*$", r"\1json", text, flags=re.MULTILINE)
    escaped = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
    return re.sub(
        r"^\|.*$",
        lambda row: escaped.sub(lambda code: code.group().replace("\\|", "|"), row.group()),
        text,
        flags=re.MULTILINE,
    )


def code_page(path: str) -> str:
    """The page of a file of the repository, or of a directory: its files and what their first lines say."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
    file = ROOT / path
    if file.is_dir():
        entries = sorted(entry for entry in file.iterdir() if entry.suffix in _LANGUAGES)
        return head + "".join(f"- `{entry.name}` {_first_line(entry)}\n" for entry in entries)
    return f"{head}````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"


def _first_line(file: Path) -> str:
    """What the docstring of a module begins with."""
    found = re.match(r'"""(.+)', file.read_text(encoding="utf-8"))
    return found[1].removesuffix('"""') if found else ""


def linked_code(pages: dict[str, str]) -> list[str]:
    """Files and directories outside of docs that pages link to, by the path and the text of each page; no pictures."""
    found = {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        for path, text in pages.items()
        for target in links(text)
    }
    pages_of = (path for path in found if place_of(path).startswith("code/") and not path.startswith(PICTURES))
    return sorted(path for path in pages_of if (ROOT / path).exists())


# what mkdocs calls


def on_config(config: Any) -> None:
    """Headings get the anchors that GitHub gives them, and ```mermaid is a picture: both are functions, which the file
    of settings cannot name without being a program."""
    from pymdownx.slugs import slugify
    from pymdownx.superfences import fence_code_format

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [mermaid]


def on_files(files: Any, config: Any) -> None:
    """Add the pages that are no files of docs, which the English site has for both, and to the Chinese one pictures."""
    from mkdocs.structure.files import File

    docs = Path(config.docs_dir)
    if docs.name != "docs":
        for picture in sorted((ROOT / PICTURES).iterdir()):
            name = f"{Path(PICTURES).name}/{picture.name}"
            files.append(File.generated(config, name, abs_src_path=str(picture)))
        return
    for name in PROJECT:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"project/{name}", content=text))
    pages = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in docs.rglob("*.md")}
    pages |= {name: (ROOT / name).read_text(encoding="utf-8") for name in PROJECT}
    for path in linked_code(pages):
        files.append(File.generated(config, f"code/{path}.md", content=code_page(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make a page of GitHub one of the site."""
    from mkdocs.exceptions import PluginError

    uri = page.file.src_uri
    if uri.startswith("code/"):
        return markdown
    docs = str(Path(config.docs_dir).relative_to(ROOT))
    is_project = uri.startswith("project/")
    path, kept = (uri.removeprefix("project/"), "") if is_project else (f"{docs}/{uri}", docs)
    try:
        return for_python_markdown(with_links(markdown, path, kept))
    except FileNotFoundError as error:
        raise PluginError(str(error)) from error
