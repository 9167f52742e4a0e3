"""Self-contained HTML pages, with styles, scripts and libraries inlined."""

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
    """An HTML page with its security policy."""

    html: str
    policy: str
    """The Content-Security-Policy: only these styles and scripts, and connections to this server."""


def vendored(name: str) -> Path:
    """A file of a library that comes with the package; `vendored/vendored.json` has its version and digest."""
    return VENDORED / name


def make_document(template: Path, styles: Sequence[Path], scripts: Sequence[Path], **values: Any) -> Document:
    """Render a Jinja template whose `{{ head }}` becomes the policy and the styles, and `{{ scripts }}` the scripts.

    Args:
        template: of the page.
        styles: in addition to the theme.
        scripts: in the order in which they run.
        values: other variables of the template.
    """
    from markupsafe import Markup

    sheets = [_text(path) for path in (THEME, *styles)]
    programs = [_text(path) for path in scripts]
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
    """Render a Jinja template; the values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text(template)).render(zip=zip, **values)


def json_for_page(value: Any) -> Any:
    """JSON that is safe inside a script element."""
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _digests(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
