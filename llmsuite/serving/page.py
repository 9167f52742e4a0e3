"""The chat page: one document with its libraries."""

from __future__ import annotations

import functools
from pathlib import Path

from llmsuite.base.web.document import Document, make_document, vendored

_HERE = Path(__file__).parent


@functools.cache
def chat_page() -> Document:
    """The chat page. It sends requests to the server that it comes from, by OpenAI's API."""
    libraries = [vendored(f"{name}.js") for name in ("marked", "dompurify", "highlight")]
    scripts = [_HERE / "page_parts.js", _HERE / "page.js"]
    return make_document(_HERE / "page.html", [_HERE / "page.css"], [*libraries, *scripts])
