"""Jinja environment of chat templates: the extensions, filters and functions of transformers, in a sandbox."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
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
_TURN = "\ufdd3"
"""Mark before each turn, and after the last one, of a template that is compiled with `marks_turns`."""
_EARLIER = ("first", "index", "index0", "previtem")
"""Attributes of `loop` that do not depend on later turns."""
_DATE = datetime.date(2024, 7, 26)
"""The day that `strftime_now` formats."""


@dataclasses.dataclass(frozen=True)
class Marked:
    """A rendered text and its `{% generation %}` blocks."""

    text: str
    blocks: list[tuple[int, int]]
    """Begin and end of each block, in characters."""


@dataclasses.dataclass(frozen=True)
class TemplateFacts:
    """Properties of a template that are known without rendering it."""

    variables: list[str]
    """Sorted names of the variables that it reads from outside."""
    num_first: int | None
    """Number of first turns that other turns may be rendered by, for a template that renders each turn without looking
    at later ones; None for other templates."""


@dataclasses.dataclass(frozen=True)
class TurnTexts:
    """A rendered conversation, cut into its turns."""

    text: str
    """All up to the end of the last turn."""
    ends: list[int]
    """End of each number of turns in `text`, from 0 turns on."""
    tail: str
    """Text after the last turn."""

    def first(self, count: int) -> str:
        """Return the conversation of the first `count` turns."""
        return self.text[: self.ends[count]] + self.tail


def turn_texts(rendered: str, count: int) -> TurnTexts | None:
    """Cut what a template with `marks_turns` has rendered; None if it has not rendered `count` turns."""
    parts = rendered.split(_TURN)
    if len(parts) != count + 2:
        return None
    ends = list(itertools.accumulate(map(len, parts[:-1])))
    return TurnTexts("".join(parts[:-1]), ends, parts[-1])


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


def compiled(source: str, marks_turns: bool = False) -> jinja2.Template:
    """Compile a template. Raises TemplateSyntaxError.

    Args:
        source: the template.
        marks_turns: True to write a mark before each turn, and after the last one; for a template with `num_first`.
    """
    if not marks_turns:
        return environment().from_string(source)
    tree = environment().parse(source)
    found = _turn_loop(tree)
    assert found is not None, "the caller has checked `num_first`"
    mark = jinja2.nodes.Output([jinja2.nodes.TemplateData(_TURN)], lineno=1)
    at, loop = found
    loop.body.insert(0, mark)
    tree.body.insert(at + 1, mark)
    return environment().from_string(tree)


def template_facts(source: str) -> TemplateFacts:
    """Analyse a template. Raises TemplateSyntaxError."""
    tree = environment().parse(source)
    return TemplateFacts(sorted(jinja2.meta.find_undeclared_variables(tree)), _num_first(tree))


def _turn_loop(tree: jinja2.nodes.Template) -> tuple[int, jinja2.nodes.For] | None:
    """Return the only loop over all turns, with its index in `tree.body`; None where there is none of a simple form."""
    found = []
    for i, node in enumerate(tree.body):
        if isinstance(node, jinja2.nodes.For) and _is_name(node.iter, "messages"):
            found.append((i, node))
            if node.test is not None or node.else_ or node.recursive or not isinstance(node.target, jinja2.nodes.Name):
                return None
    return found[0] if len(found) == 1 else None


def _num_first(tree: jinja2.nodes.Template) -> int | None:
    """Return `TemplateFacts.num_first`.

    The text up to the end of a turn depends on this turn and those before it, if turns are read only by one loop and as
    `messages[0]`, and the loop does not ask for what follows. The text after the turns is the same for any number of
    them, if it reads nothing that the template has set.
    """
    found = _turn_loop(tree)
    others = (
        jinja2.nodes.Extends,
        jinja2.nodes.Include,
        jinja2.nodes.Import,
        jinja2.nodes.FromImport,
        jinja2.nodes.Block,
    )
    if found is None or any(True for _ in tree.find_all(others)):
        return None
    at, loop = found
    indices = [_index_of_turn(item) for item in tree.find_all(jinja2.nodes.Getitem)]
    read_at = [index for index in indices if index is not None]
    names = list(tree.find_all(jinja2.nodes.Name))
    if sum(name.name == "messages" for name in names) != 1 + len(read_at):
        return None
    if not all(_looks_back(node) for node in loop.body):
        return None
    is_set = {"messages", "loop", "self"} | {macro.name for macro in tree.find_all(jinja2.nodes.Macro)}
    for node in tree.body[: at + 1]:
        is_set |= {name.name for name in node.find_all(jinja2.nodes.Name) if name.ctx != "load"}
        is_set |= {reference.name for reference in node.find_all(jinja2.nodes.NSRef)}
    for node in tree.body[at + 1 :]:
        if any(name.name in is_set for name in node.find_all(jinja2.nodes.Name)):
            return None
    return 1 + max(read_at, default=-1)


def _is_name(node: jinja2.nodes.Node, name: str | None = None) -> bool:
    return isinstance(node, jinja2.nodes.Name) and name in (None, node.name)


def _index_of_turn(item: jinja2.nodes.Getitem) -> int | None:
    """Return the index of `messages[0]` and the like; None for other items."""
    if not _is_name(item.node, "messages") or not isinstance(item.arg, jinja2.nodes.Const):
        return None
    index = item.arg.value
    return index if type(index) is int and index >= 0 else None


def _looks_back(node: jinja2.nodes.Node) -> bool:
    """Return True unless a part of the loop over turns may ask the loop for what follows."""
    if isinstance(node, jinja2.nodes.Getattr) and _is_name(node.node, "loop"):
        return node.attr in _EARLIER
    if _is_name(node, "loop"):
        return False
    if isinstance(node, jinja2.nodes.For):  # its body has a `loop` of its own; the rest has that of the turns
        return all(_looks_back(part) for part in (node.iter, node.test, *node.else_) if part is not None)
    return all(_looks_back(child) for child in node.iter_child_nodes())
