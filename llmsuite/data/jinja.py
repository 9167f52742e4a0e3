"""Jinja environment of chat templates: the extensions, filters and functions of transformers, in a sandbox."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_BEGIN = "\ufdd0"
_END = "\ufdd1"
"""Marks of the begin and end of a `{% generation %}` block in rendered text: Unicode noncharacters."""
_MARK = re.compile(f"[{_BEGIN}{_END}]")
_DATE = datetime.date(2024, 7, 26)
"""The day that `strftime_now` formats."""


@dataclasses.dataclass(frozen=True)
class Marked:
    """A rendered text and its `{% generation %}` blocks."""

    text: str
    blocks: list[tuple[int, int]]
    """Begin and end of each block, in characters."""


def has_mark(text: str) -> bool:
    """Return True if a text has a character that marks blocks."""
    return _MARK.search(text) is not None


def unmark(rendered: str) -> Marked:
    """Remove the marks of blocks from a text. Adjacent blocks are merged."""
    rendered = rendered.replace(_END + _BEGIN, "")
    positions = [match.start() - number for number, match in enumerate(_MARK.finditer(rendered))]
    return Marked(_MARK.sub("", rendered), list(zip(positions[::2], positions[1::2])))


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: the text that the model would generate, as transformers has it for
    `return_assistant_tokens_mask`."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an attribute of the instance)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
        return [begin, *body, end]


class _FixedDate(jinja2.Undefined):
    """`strftime_now` of a fixed day: with the real one training would differ from day to day.

    For Jinja it is undefined, so that templates that test for it use the fixed date that they have for that case.
    """

    unsafe_callable = alters_data = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _DATE.strftime(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` of transformers: unlike Jinja's own it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the sandbox for templates, which are not trusted: no attributes of Python, and immutable arguments."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = _FixedDate(name="strftime_now")
    made.filters["tojson"] = _tojson
    return made


def undeclared_variables(source: str) -> list[str]:
    """Return the sorted names of the variables that a template reads from outside. Raises TemplateSyntaxError."""
    return sorted(jinja2.meta.find_undeclared_variables(environment().parse(source)))
