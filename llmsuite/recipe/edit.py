"""Changes of single keys in the text of a recipe, in which comments and everything else stay as they are."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the type stubs
from pathlib import Path
from typing import Any

from llmsuite.recipe.document import YAML
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.source import Key

_SPACE = re.compile(r"\s*")
_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_AFTER_VALUE = re.compile(r"(?P<comma>,?)(?P<comments>(?:[ \t]*(?://[^\n]*|/\*.*?\*/))*)", re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


@dataclasses.dataclass
class _Member:
    """Offsets of a key and its value."""

    key: int
    value: int
    end: int


@dataclasses.dataclass
class _Object:
    """Offsets of an object."""

    start: int
    members: dict[str, _Member]
    is_block: bool = False
    """True for keys on lines of their own without braces, in YAML."""


def edited(text: str, path: str | Path, changes: Mapping[Key, Any]) -> str:
    """Change keys in the text of a valid recipe. Keys that are there keep their places; others come last in their
    section.

    Args:
        text: of the recipe.
        path: its file, whose suffix says what it is: JSON, JSONC or YAML.
        changes: values by key; `recipe.load.REMOVE` to remove one. A section that loses its last key is removed too.
    """
    is_yaml = Path(path).suffix.lower() in YAML
    for key, value in changes.items():
        text = _removed(text, is_yaml, key) if value is REMOVE else _changed(text, is_yaml, key, value)
    return text


def _changed(text: str, is_yaml: bool, key: Key, value: Any) -> str:
    """The text with one key of another value."""
    found, rest = _deepest(text, is_yaml, key)
    for name in reversed(rest[1:]):
        value = {name: value}
    new = json.dumps(value, ensure_ascii=False)
    member = found.members.get(rest[0] if rest else key[-1])
    if member is None:
        return _inserted(text, found, rest[0], new, is_yaml)
    # a section may be there as null
    space = " " if member.value == member.end and text[member.value - 1 : member.value] == ":" else ""
    return f"{text[: member.value]}{space}{new}{text[member.end :]}"


def _inserted(text: str, found: _Object, name: str, value: str, is_yaml: bool) -> str:
    """The text with one key more at the end of an object."""
    entry = f"{json.dumps(name)}: {value}"
    if not found.members:
        at = found.start + 1  # after the brace
        return f"{text[:at]}{entry}{text[at:]}"
    last = max(found.members.values(), key=lambda member: member.end)
    line = text.rfind("\n", 0, last.key) + 1
    indent = text[line : last.key]
    if found.is_block:
        end = text.find("\n", last.end)
        end = len(text) if end < 0 else end
        return f"{text[:end]}\n{' ' * len(indent)}{name}: {value}{text[end:]}"
    if is_yaml:
        return f"{text[: last.end]}, {name}: {value}{text[last.end :]}"
    # comments after the last value stay with it
    after = _AFTER_VALUE.match(text, last.end)
    assert after is not None
    space = " "
    if not indent.strip():
        space = f"\n{indent}"
    elif "//" in after["comments"]:
        space = "\n"
    return f"{text[: last.end]},{after['comments']}{space}{entry}{after['comma']}{text[after.end() :]}"


def _removed(text: str, is_yaml: bool, key: Key) -> str:
    """The text without one key."""
    found, rest = _deepest(text, is_yaml, key)
    if rest:
        return text
    if len(found.members) == 1 and len(key) > 1:
        return _removed(text, is_yaml, key[:-1])
    member = found.members[key[-1]]
    line = text.rfind("\n", 0, member.key) + 1
    if found.is_block:
        end = text.find("\n", member.end)
        return text[:line] + ("" if end < 0 else text[end + 1 :])
    blank = text if is_yaml else _COMMENT.sub(_blank, text)
    comma = _after_space(blank, member.end)
    if blank[comma : comma + 1] == ",":
        end = comma + 1
        end += len(text[end:]) - len(text[end:].lstrip(" \t"))
        if text[end : end + 1] == "\n" and not text[line : member.key].strip():
            return text[:line] + text[end + 1 :]
        return text[: member.key] + text[end:]
    before = [other.end for other in found.members.values() if other.end < member.key]
    if not before:
        return text[: member.key] + text[member.end :]
    comma = _after_space(blank, max(before))
    between = text[comma + 1 : member.key]
    if not text[member.end :].partition("\n")[0].strip() or not between.strip():
        between = between.rstrip()  # but comments on the key before stay
    return text[:comma] + between + text[member.end :]


def _deepest(text: str, is_yaml: bool, key: Key) -> tuple[_Object, Key]:
    """The innermost object of the text on the way to a key, and the part of the key that it does not have."""
    read = _yaml_object if is_yaml else _json_object
    for depth in range(len(key) - 1, -1, -1):
        found = read(text, key[:depth])
        if found is not None:
            return found, () if key[depth] in found.members and depth == len(key) - 1 else key[depth:]
    raise AssertionError("a recipe is an object")


def _without_comments(text: str) -> str:
    """The text of JSONC with spaces in place of comments and of commas before brackets, so that offsets stay."""
    return _LAST_COMMA.sub(_blank, _COMMENT.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    """Spaces in place of a match, unless that is a string."""
    return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _json_object(text: str, path: Key) -> _Object | None:
    """The object at a path; None where there is none."""
    plain = _without_comments(text)
    start = _after_space(plain, 0)
    found = _json_members(plain, start)
    for name in path:
        member = found.members.get(name)
        if member is None or plain[member.value] != "{":
            return None
        found = _json_members(plain, member.value)
    return found


def _json_members(plain: str, start: int) -> _Object:
    """The object that begins at an offset."""
    found = _Object(start, {})
    decode = json.JSONDecoder().raw_decode
    at = _after_space(plain, start + 1)
    while plain[at] != "}":
        name, end = scanstring(plain, at + 1, True)
        value = _after_space(plain, _after_space(plain, end) + 1)
        _, end = decode(plain, value)
        found.members[name] = _Member(at, value, end)
        at = _after_space(plain, end)
        if plain[at] == ",":
            at = _after_space(plain, at + 1)
    return found


def _yaml_object(text: str, path: Key) -> _Object | None:
    """The mapping at a path; None where there is none."""
    import yaml

    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key, value in node.value if key.value == name), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    members = {}
    for key, value in node.value:
        members[key.value] = _Member(key.start_mark.index, value.start_mark.index, _yaml_end(text, value))
    return _Object(node.start_mark.index, members, not node.flow_style)


def _yaml_end(text: str, node: Any) -> int:
    """Offset after a node. For PyYAML a block ends where the next one begins: after comments that belong to that."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        return _yaml_end(text, last[1] if isinstance(last, tuple) else last)
    start: int = node.start_mark.index
    return start + len(text[start : node.end_mark.index].rstrip())
