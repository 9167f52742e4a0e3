"""Pages that need nothing but themselves: their styles, scripts and libraries are written into them."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
VENDORED = _HERE / "vendored"
THEME = _HERE / "theme.css"


@dataclasses.dataclass(frozen=True)
class Document:
    """A page, and what a browser may do with it."""

    html: str
    policy: str
    """Its Content-Security-Policy: these styles and scripts, this server, and nothing else."""


def vendored(name: str) -> Path:
    """A file of a library that comes with the package; `vendored/vendored.json` has its version and digest."""
    return VENDORED / name


def make_document(template: Path, styles: Sequence[Path], scripts: Sequence[Path], **values: Any) -> Document:
    """Render a Jinja template whose `{{ head }}` becomes the policy and the styles, and `{{ scripts }}` the scripts.

    Args:
        template: of the page.
        styles: beside the theme.
        scripts: in the order in which they run.
        values: what else the template asks for.
    """
    from markupsafe import Markup

    sheets, programs = ([_text(path) for path in paths] for paths in ((THEME, *styles), scripts))
    policy = (
        f"default-src 'none'; style-src {_digests(sheets)}; script-src {_digests(programs)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += '<link rel="icon" href="data:,">\n' + "".join(f"<style>{sheet}</style>\n" for sheet in sheets)
    ends = "".join(f"<script>{program}</script>\n" for program in programs)
    text = render(template, head=Markup(head), scripts=Markup(ends), **values)
    return Document(text, policy)


def render(template: Path, **values: Any) -> str:
    """Render a Jinja template; what it is given is escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text(template)).render(zip=zip, **values)


def json_for_page(value: Any) -> Any:
    """JSON that may stand inside of a script element."""
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _digests(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
