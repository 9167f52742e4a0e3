"""What a layout is here, and the lies that files of JSON and of any other kind are told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support.damage import damaged, damages, values

MANY = 100_000
"""Items of a list, keys of an object, columns of a table: what takes time by their square takes minutes."""
Read = Callable[[Path], Any]
Lie = Callable[[Path, st.DataObject], None]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What strangers may hand in."""

    make: Callable[[Path, Path], None]
    """Makes a directory (the first argument) that is as it should be; the second one is where a base model lies."""
    reads: Sequence[Read]
    """What reads such a directory: they raise nothing but UserError, whatever it has."""
    share: int = 12
    """How often it is taken, as against others."""
    seconds: float = 2.0
    """Of the processor, in which it is read or refused."""
    lie: Lie | None = None
    """Tells a lie in one of its files; None for that of the file's suffix."""


def lie_in_bytes(path: Path, data: st.DataObject) -> None:
    """Damage a file."""
    path.write_bytes(damaged(path.read_bytes(), data.draw(damages)))


_MANY = {
    "list": "[" + "1," * (MANY - 1) + "1]",
    "texts": "[" + '"a",' * (MANY - 1) + '"a"]',
    "objects": "[" + "{}," * (MANY - 1) + "{}]",
    "keys": "{" + ",".join(f'"k{i}":1' for i in range(MANY)) + "}",
    "text": '"' + "ab " * MANY + '"',
    "deep list": "[" * 5000 + "]" * 5000,
    "deep object": '{"a":' * 5000 + "1" + "}" * 5000,
    "long number": "9" * 5000,
    "large number": "1e999",
}
_HOLE = "\ufdd0hole"
NAMES = ["", ".", "..", "../x", "/etc/passwd", "a/../../x", "a/b", "\0", "x" * 300, "manifest.json", "\ud800", "a\\b"]
"""Names of files and of keys."""


def keys_of(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a tree of JSON."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*above, key)
        yield from keys_of(value, (*above, key))


def lie_in_tree(tree: Any, data: st.DataObject) -> str:
    """A tree of JSON, as text, in which one value, name or key is another."""
    paths = list(keys_of(tree))
    kind = data.draw(st.sampled_from(["value", "value", "value", "root", "new", "name", "twice", "many"]))
    if kind == "root" or not paths:
        return json.dumps(data.draw(values))
    *above, last = data.draw(st.sampled_from(paths))
    node = tree
    for key in above:
        node = node[key]
    if kind == "value":
        node[last] = data.draw(values)
    elif kind == "many":
        node[last] = _HOLE
        return json.dumps(tree).replace(json.dumps(_HOLE), data.draw(st.sampled_from(sorted(_MANY.items())))[1])
    elif kind == "name" and isinstance(node[last], str):
        node[last] = data.draw(st.sampled_from(NAMES))
    elif kind == "name" and isinstance(node, dict):
        node[data.draw(st.sampled_from(NAMES))] = node.pop(last)
    elif kind == "new" and isinstance(tree, dict):
        new = ["rope_scaling", "quantization_config", "use_dora", "alpha_pattern", "rank_pattern", "images", "x"]
        tree[data.draw(st.sampled_from(new))] = data.draw(values)
    text = json.dumps(tree)
    if kind == "twice" and isinstance(tree, dict):
        text = text[:-1] + f", {json.dumps(next(iter(tree)))}: 1}}"
    return text


def lie_in_json(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a JSON file."""
    if data.draw(st.integers(0, 6)) == 0:
        lie_in_bytes(path, data)
    else:
        path.write_bytes(lie_in_tree(json.loads(path.read_text()), data).encode("utf-8", "surrogatepass"))
