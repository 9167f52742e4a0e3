"""Recipes as YAML and JSONC: the values of JSON, the same problems, each at its line and column."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.recipe.document import read_document
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.source import MAX_DEPTH, MAX_INT, MIN_INT, parse_json
from llmsuite.recipe.yaml_source import parse_yaml
from tests.support.paths import ROOT

RECIPE = """\
# a run as people write it
stage: dpo
model: {family: llama, weights: models/smollm2-135m-instruct, preset: smollm2-135m}
data:
  train: data/preference/train.jsonl
  max_length: 512
train:
  max_steps: 40
  global_batch_size: 8
  micro_batch_size: 4
  learning_rate: 1e-5   # a number, not a text
dpo:
  loss: sigmoid
  beta: .1
lora: {rank: 8, target_modules: [q_proj, v_proj]}
launch:
  master: ~
output_dir: runs/x
"""


def problems(text: str, **options: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "f", **options)
    return [(p.where.removeprefix("f:"), p.key, p.message) for p in caught.value.problems]


def test_yaml_is_the_same_recipe(registry: Registry, tmp_path: Path) -> None:
    source = parse_yaml(RECIPE, "f")
    assert source.value["train"]["learning_rate"] == 1e-5
    assert source.value["dpo"]["beta"] == 0.1
    assert source.value["launch"]["master"] is None
    assert source.keys["train", "learning_rate"] == "f:11:3"
    assert source.values["train", "learning_rate"] == "f:11:18"
    assert source.values["lora", "target_modules", "1"] == "f:15:42"
    for name, text in (("r.yaml", RECIPE), ("r.YML", RECIPE), ("r.json", json.dumps(source.value))):
        (tmp_path / name).write_text(text)
    made = [plan_run(tmp_path / name, [], registry).recipe for name in ("r.yaml", "r.YML", "r.json")]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  max_steps: 40", "  max_stepz: 40", "r.yaml:8:3: train.max_stepz: unknown key; did you mean 'max_steps'?"),
        ("max_length: 512", "max_length: true", "r.yaml:6:3: data.max_length: expected integer > 0, found true"),
        ("  beta: .1", "  loss: hinge", "r.yaml:14:3: dpo.loss: is given twice; it was already set at"),
        ("  beta: .1", "  loss: no", "r.yaml:14:9: dpo.loss: no is false in YAML 1.1 and text in 1.2"),
        ("rank: 8", "rank: 010", "r.yaml:15:14: lora.rank: 010 is one number in YAML 1.1, and another"),
        ("  loss: sigmoid", "\tloss: sigmoid", "r.yaml:13:1: is not YAML"),
    ],
)
def test_problems_of_yaml_have_their_place(
    old: str, new: str, message: str, registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    assert old in RECIPE
    path.write_text(RECIPE.replace(old, new))
    with pytest.raises(UserError) as caught:
        plan_run(path, [], registry)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where", "key", "says"),
    [
        ("a: 1\na: 2", "2:1", "a", "given twice; it was already set at f:1:1"),
        ("s:\n  a: 1\n  'a': 2", "3:3", "s.a", "given twice"),
        ("a: [1, .nan]", "1:8", "a.1", "write a finite one"),
        ("a: -.INF", "1:4", "a", "write a finite one"),
        ("a: 1e999", "1:4", "a", "write a finite one"),
        ("a: 9223372036854775808", "1:4", "a", "does not fit into 64 bits"),
        ("a: Yes", "1:4", "a", "Yes is true in YAML 1.1"),
        ("a: OFF", "1:4", "a", "write false, or quote it"),
        ("a: 1_000", "1:4", "a", "write a decimal number"),
        ("a: 0x1F", "1:4", "a", "write a decimal number"),
        ("a: 12:30", "1:4", "a", "write a decimal number"),
        ("a: &x 1\nb: *x", "1:4", "a", "anchors and aliases"),
        ("a: *x", "1:4", "a", "anchors and aliases"),
        ("a: !!float 1", "1:4", "a", "tags such as"),
        ("a: !python/object/apply:os.system [x]", "1:4", "a", "tags such as"),
        ("<<: {a: 1}", "1:1", "", "merge keys"),
        ("? [a, b]\n: 1", "1:3", "", "expected a key"),
        ("a: 1\n---\nb: 2", "2:1", "", "second document"),
        ("%YAML 1.1\n---\na: 1", "1:1", "", "directives"),
        ("", "1:1", "", "is empty"),
        ("# nothing", "1:10", "", "is empty"),
        ("\ufeffa: 1", "1:1", "", "byte order mark"),
        ("a: [1, 2", "1:9", "", "is not YAML"),
        ("a:\n\tb: 1", "2:1", "", "with spaces, not with tabs"),
        ("a: 1\n b: 2", "2:3", "", "is not YAML: mapping values are not allowed here"),
        ('a: "\\ud800"', "1:4", "a", "half of a surrogate pair"),
    ],
)
def test_yaml_features_that_recipes_reject(text: str, where: str, key: str, says: str) -> None:
    found = problems(text)[0]
    assert found[:2] == (where, key)
    assert says in found[2]


def test_several_problems_at_once() -> None:
    assert [where for where, _, _ in problems("a: no\nb: 010\nb: 3\nc: 9e999")] == ["1:4", "2:4", "3:1", "4:4"]


def test_a_forbidden_character_is_refused() -> None:
    assert problems("a: \x00")[0][2].startswith("has a character that YAML forbids")


def test_what_is_nested_too_deep_is_refused() -> None:
    parse_yaml("[" * (MAX_DEPTH - 1) + "0" + "]" * (MAX_DEPTH - 1), "f")
    assert "nested deeper" in problems("[" * 100_000)[0][2]


def test_files_of_programs_that_read_yaml_1_1() -> None:
    assert parse_yaml("a: Yes\nb: off\nc: 'no'\nd: nO", "f", yaml_1_1=True).value == {
        "a": True, "b": False, "c": "no", "d": "nO",
    }  # fmt: skip


PLAIN = st.none() | st.booleans() | st.integers(MIN_INT, MAX_INT) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\ufeff\ufffe\uffff"), max_size=8)
TREES = st.recursive(
    PLAIN | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(TREES)
def test_json_is_yaml(tree: Any) -> None:
    """Values of JSON mean the same, as JSON text and as PyYAML writes them; also to PyYAML itself."""
    assert repr(parse_yaml(json.dumps(tree, ensure_ascii=False), "f").value) == repr(tree)
    dumped = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    assert repr(parse_yaml(dumped, "f").value) == repr(yaml.safe_load(dumped)) == repr(tree)


def test_jsonc_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonc"
    path.write_text('// why\n{"a": "// no comment", /* here\n */ "b": [1, 2,], "a": 3, // end\n}\n/**/')
    with pytest.raises(RecipeError) as caught:
        read_document(path)
    (found,) = caught.value.problems
    assert found.where.endswith("r.jsonc:3:19")
    path.write_text('{"a": 1, # no\n}')
    with pytest.raises(UserError, match=r":1:10: comments of JSONC are // and /\* \*/"):
        read_document(path)
    path.write_text('{"a": 1} /* no end')
    with pytest.raises(UserError, match=":1:10: starts a comment that does not end"):
        read_document(path)
    path.write_text('{"a": 1, // one\n}')
    source = read_document(path)
    assert (source.value, source.values["a",][-3:]) == ({"a": 1}, "1:7")
    with pytest.raises(RecipeError, match=r"JSON has no comments; name the file \.jsonc"):
        parse_json(path.read_text(), "f")


def test_commands_read_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("  max_length: 512\n", "  max_length: 512\n  ignore_columns: [task, answer]\n"))
    assert main(["validate", str(path), "--train.max_steps=3"]) == 0
    assert "r.yaml: ok (dpo, llama" in capsys.readouterr().out
    assert main(["show", str(path)]) == 0
    assert f"{path}:12:3" in capsys.readouterr().out
    path.write_text(RECIPE.replace("stage: dpo", "stage: dqo"))
    assert main(["validate", str(path)]) == 2
    assert "r.yaml:2:1: stage:" in capsys.readouterr().err


def test_only_recipes_in_yaml_import_it(tmp_path: Path) -> None:
    """And none imports NumPy or Paddle."""
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    script = (
        "import sys; from llmsuite.recipe.document import read_document; read_document(sys.argv[1]); "
        "print([m for m in ('numpy', 'paddle', 'llmsuite.recipe.yaml_source') if m in sys.modules])"
    )
    for name, imported in (("recipes/llama/dpo.json", "[]"), (str(path), "['llmsuite.recipe.yaml_source']")):
        result = subprocess.run(
            [sys.executable, "-c", script, name], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert result.stdout.strip() == imported
