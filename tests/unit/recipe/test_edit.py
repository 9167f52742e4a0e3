"""Changes of single keys in the text of a recipe."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.recipe.document import read_document
from llmsuite.recipe.edit import edited
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.source import Key
from tests.support.paths import ROOT

JSONC = """{
  // which model
  "model": {"family": "llama", "preset": "tiny"}, /* of ours, "here" */
  "parallel": {
    "sharding": "stage1", // as in the paper, {2}
    "tensor_parallel_degree": 2, // in a machine
  },
  "url": "http://a.b/c,}",
}
"""
YAML = """# a recipe
model: {family: llama, preset: tiny}  # of ours
parallel:
  # how it is spread
  sharding: stage1  # as in the paper
  tensor_parallel_degree: 2  # in a machine

betas:
  - 0.9
  - 0.95
seed:
"""


def test_comments_stay_where_they_are() -> None:
    changes: dict[Key, Any] = {
        ("parallel", "sharding"): "stage2",
        ("parallel", "pipeline_parallel_degree"): 4,
        ("model", "preset"): REMOVE,
        ("engine", "recompute"): "full",
        ("parallel", "tensor_parallel_degree"): REMOVE,
    }
    assert edited(JSONC, "a.jsonc", changes) == (
        """{
  // which model
  "model": {"family": "llama"}, /* of ours, "here" */
  "parallel": {
    "sharding": "stage2", // as in the paper, {2}
    // in a machine
    "pipeline_parallel_degree": 4,
  },
  "url": "http://a.b/c,}",
  "engine": {"recompute": "full"},
}
"""
    )
    assert edited(YAML, "a.yaml", {**changes, ("seed",): 3}) == (
        """# a recipe
model: {family: llama}  # of ours
parallel:
  # how it is spread
  sharding: "stage2"  # as in the paper
  pipeline_parallel_degree: 4

betas:
  - 0.9
  - 0.95
seed: 3
engine: {"recompute": "full"}
"""
    )


def test_comments_of_what_follows_stay() -> None:
    text = "a:\n  b:\n    c: 1\n# about p\np:\n  q: 2\n\n# about r\nr: 3\n"
    assert edited(text, "a.yaml", {("a", "d"): 4}) == text.replace("# about p", "  d: 4\n# about p")
    assert edited(text, "a.yaml", {("p", "q"): REMOVE}) == text.replace("p:\n  q: 2\n", "")
    text = '{\n  "a": 1, // about a\n  "b": 2\n}\n'
    assert edited(text, "a.jsonc", {("b",): REMOVE}) == '{\n  "a": 1 // about a\n}\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1 // of a\n}\n', '{\n  "a": 1, // of a\n  "b": 2\n}\n'),
        ('{\n  "a": 1, /* of\n a */ // too\n}\n', '{\n  "a": 1, /* of\n a */ // too\n  "b": 2,\n}\n'),
        ('{\n  "a": 1\n  // of nothing\n}\n', '{\n  "a": 1,\n  "b": 2\n  // of nothing\n}\n'),
        ('{"a": 1 /* of a */}', '{"a": 1, /* of a */ "b": 2}'),
        ('{"a": 1 // of a\n}', '{"a": 1, // of a\n"b": 2\n}'),
    ],
)
def test_a_comment_after_the_last_value_stays_with_it(tmp_path: Path, text: str, expected: str) -> None:
    found = edited(text, "a.jsonc", {("b",): 2})
    assert found == expected
    (tmp_path / "a.jsonc").write_text(found)
    assert read_document(tmp_path / "a.jsonc").value == {"a": 1, "b": 2}


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: 1\np:\n"), ("a.json", '{"a": 1, "p": null}')])
def test_a_section_that_is_null_is_filled(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(edited(text, name, {("p", "q"): 2}))
    assert read_document(tmp_path / name).value == {"a": 1, "p": {"q": 2}}


def applied(tree: dict[str, Any], changes: dict[Key, Any]) -> dict[str, Any]:
    """The changes, on the values."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        nodes = [tree]
        for name in key[:-1]:
            nodes.append(nodes[-1].setdefault(name, {}) if value is not REMOVE else nodes[-1].get(name, {}))
        if value is not REMOVE:
            nodes[-1][key[-1]] = value
        elif key[-1] in nodes[-1]:
            del nodes[-1][key[-1]]
            if not nodes[-1] and len(key) > 1:
                del nodes[-2][key[-2]]
    return tree


CHANGES: list[dict[Key, Any]] = [
    {("parallel", "sharding"): "stage3"},
    {("parallel", "sharding"): REMOVE},
    {("parallel", "sharding"): REMOVE, ("parallel", "tensor_parallel_degree"): REMOVE},
    {
        ("parallel", "tensor_parallel_degree"): REMOVE,
        ("parallel", "sharding"): REMOVE,
        ("parallel", "x"): [1, {"a": 2}],
    },
    {("new", "deep", "key"): 1e-05, ("new", "deep", "other"): None, ("new", "text"): "a: b # c // d"},
    {("betas",): [0.5], ("seed",): 7, ("model", "family"): "qwen"},
    {("not", "there"): REMOVE, ("model", "preset"): REMOVE, ("model", "family"): REMOVE},
    {("url",): REMOVE, ("betas",): REMOVE, ("seed",): REMOVE, ("model", "x"): 1},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", ["a.json", "a.jsonc", "a.yaml", "flow.yaml"])
def test_every_other_value_stays(tmp_path: Path, name: str, changes: dict[Key, Any]) -> None:
    path = tmp_path / name
    path.write_text(JSONC if name == "a.jsonc" else YAML)
    if name in ("a.json", "flow.yaml"):
        (tmp_path / "b.yaml").write_text(YAML)
        path.write_text(json.dumps(read_document(tmp_path / "b.yaml").value, indent=None if name == "a.json" else 2))
    before = read_document(path).value
    path.write_text(edited(path.read_text(), path, changes))
    assert read_document(path).value == applied(before, changes)


def test_bundled_recipes_keep_their_lines() -> None:
    path = ROOT / "recipes/llama/pretrain.json"
    before = path.read_text().splitlines()
    after = edited(path.read_text(), path, {("parallel", "pipeline_parallel_degree"): 4, ("launch", "nnodes"): 2})
    different = [(a, b) for a, b in zip(before, after.splitlines(), strict=True) if a != b]
    assert different == [
        ('    "pipeline_parallel_degree": 2,', '    "pipeline_parallel_degree": 4,'),
        ('  "launch": {"num_devices": 8},', '  "launch": {"num_devices": 8, "nnodes": 2},'),
    ]
