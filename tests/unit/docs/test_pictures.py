"""Drawings of the pages: a screen reader can tell what they show, they fit on a phone, and a page has them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

DRAWINGS = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
WIDE = {"mesh", "rooms", "step"}
"""Those of the architecture, which are read next to the code and not on a phone."""


def _root(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def test_there_are_ten() -> None:
    assert len(DRAWINGS) == 10


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_screen_reader_gets_title_and_description(path: Path) -> None:
    root = _root(path)
    texts = {element.get("id"): element.text or "" for element in root if element.tag in (f"{SVG}title", f"{SVG}desc")}
    assert root.get("role") == "img"
    assert root.get("aria-labelledby", "").split() == [*texts]
    assert all(len(text.split()) >= 3 for text in texts.values())


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_it_has_colours_for_light_and_dark(path: Path) -> None:
    """Colours are those of classes, and each class that the light style colours has a dark colour."""
    text = path.read_text(encoding="utf-8")
    light, _, dark = text.partition("</style>")[0].partition("@media(prefers-color-scheme:dark)")
    coloured = set(re.findall(r"(?:^|})(\.?\w+)\{[^}]*#[0-9a-f]{3}", light.partition("<style>")[2], re.MULTILINE))
    assert coloured - {".l"} <= set(re.findall(r"[{}](\.?\w+)\{", dark))
    assert not re.search(r'(?:fill|stroke)="#', text)


@pytest.mark.parametrize("path", [path for path in DRAWINGS if path.stem not in WIDE], ids=lambda path: path.stem)
def test_it_is_read_on_a_phone(path: Path) -> None:
    """At a width of 360 of the 390 pixels of a page its smallest letters have at least 9 pixels."""
    root = _root(path)
    width = float(root.get("width", "0"))
    sizes = [int(size) for size in re.findall(r"font(?:-size)?:(\d+)px", root.findtext(f"{SVG}style", ""))]
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert min(sizes) * min(1, 360 / width) >= 9


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_page_has_it(path: Path) -> None:
    pages = (ROOT / "docs").rglob("*.md")
    assert any(f"pictures/{path.name})" in page.read_text(encoding="utf-8") for page in pages)
