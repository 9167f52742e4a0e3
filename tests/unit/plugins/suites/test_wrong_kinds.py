"""Whatever kind of value a word of another suite has, its file becomes a recipe or is refused with the place."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites import llamafactory_data
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.convert import convert
from llmsuite.plugins.suites.known import SUITES
from llmsuite.plugins.suites.paddlenlp import convert as paddlenlp
from llmsuite.plugins.suites.paddlenlp.ignored import IGNORED
from llmsuite.plugins.suites.paddlenlp.refused import REFUSED
from llmsuite.recipe.write import recipe_text
from tests.support import axolotl, llamafactory, paddleformers, paddlenlp_arguments, swift, trl

KINDS: list[Any] = [None, True, -1, 0, 2.5, float("inf"), float("nan"), 10**400, "x", [], [1], [[1]], [{}], [None], {}]
KINDS += [{"a": 1}, {"a": ["x"]}]
Path_ = tuple[str | int, ...]
FULL_ROWS = {
    **axolotl.ROWS, "name": "a", "split": "train", "data_files": ["a.jsonl"], "roles_to_train": ["assistant"],
    "message_property_mappings": {"role": "from", "content": "value"}, "chat_template": "chatml",
}  # fmt: skip
COSINE = {
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "report_to": ["wandb"],
    "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": 1}},
}  # fmt: skip
PARTS = [{"path": "org/rows", "name": "a", "split": "train", "columns": ["messages"], "data_files": ["a.jsonl"]}]
BASES: dict[str, list[dict[str, Any]]] = {
    "from-axolotl": [
        {
            **axolotl.BARE, "datasets": [FULL_ROWS], "test_datasets": [FULL_ROWS], "eot_tokens": ["<|im_end|>"],
            "special_tokens": {"pad_token": "a"}, "load_in_4bit": True, "fsdp": ["full_shard"],
            "bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
        },
        axolotl.FULL,
    ],
    "from-llamafactory": [
        {**llamafactory.SFT, **COSINE}, llamafactory.DPO, {**llamafactory.FULL, "stage": "pt"},
    ],
    "from-trl": [{**trl.ADAPTERS, **COSINE}, {**trl.SFT, "dataset_name": None, "datasets": PARTS}],
    "from-paddleformers": [paddleformers.SFT, {**paddleformers.DPO, "fine_tuning": "LoRA"}],
    "from-swift": [{**swift.BARE, **COSINE}, swift.RLHF, swift.FULL],
}  # fmt: skip


def places(node: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """Every part of a value, and of the values in it."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*prefix, key)
        yield from places(value, (*prefix, key))


def spoilt(tree: dict[str, Any], place: Path_, value: Any) -> dict[str, Any]:
    """Return the tree with another value at a position."""
    found = copy.deepcopy(tree)
    node: Any = found
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return found


def tracebacks(base: dict[str, Any], words: set[str], make: Callable[[dict[str, Any]], Any]) -> dict[str, str]:
    """Return the errors that are not a UserError."""
    wrong: dict[str, str] = {}
    for place in dict.fromkeys((*places(base), *((word,) for word in sorted(words)))):
        for value in KINDS:
            try:
                recipe_text(make(spoilt(base, place, value)).recipe)
            except UserError:
                continue
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                wrong[".".join(map(str, place))] = f"{str(value)[:20]}: {error!r}"
    return wrong


@pytest.mark.further
@pytest.mark.parametrize("action", SUITES)
def test_values_of_any_kind(action: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite = SUITES[action]
    words = {word for table in (suite.translations, suite.refused) for word in table if "*" not in word}
    stage = "sft" if action == "from-trl" else None
    for base, more in zip(BASES[action], (words, *[set[str]()] * 2)):
        assert tracebacks(base, more, lambda values: convert(suite, values, "x.yaml", registry, stage)) == {}


@pytest.mark.further
def test_values_of_any_kind_in_paddlenlps_files(registry: Registry) -> None:
    words = {word for table in (REFUSED, IGNORED) for word in table if "*" not in word}
    bases = (paddlenlp_arguments.PRETRAIN, paddlenlp_arguments.LORA, paddlenlp_arguments.DPO)
    for base, more in zip(bases, (words, *[set[str]()] * 2)):
        assert tracebacks(base, more, lambda values: paddlenlp.convert(Arguments(values), "x.json", registry)) == {}


@pytest.mark.parametrize("given", ["0 a 1 b", "1.2.3 a 1 b", ".", "1e999 a 1 b"])
def test_corpora_of_paddlenlp_with_odd_weights(given: str, registry: Registry) -> None:
    arguments = Arguments({**paddlenlp_arguments.PRETRAIN, "input_dir": given})
    with contextlib.suppress(UserError):
        paddlenlp.convert(arguments, "x.json", registry)


@pytest.mark.further
def test_values_of_any_kind_in_a_list_of_data_sets(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    entry = {
        "file_name": "a.json", "formatting": "sharegpt", "ranking": False, "columns": {"messages": "turns"},
        "tags": dict(llamafactory_data._DEFAULT_TAGS),
    }  # fmt: skip

    def make(entry: Any) -> Any:
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")
        return convert(SUITES["from-llamafactory"], llamafactory.SFT, "x.yaml", registry)

    assert tracebacks(entry, {"hf_hub_url", "subset", "split", "num_samples"}, make) == {}
    with pytest.raises(UserError, match=r"dataset_info.json: mine.tags is \['a'\]; expected a mapping {key: value}"):
        make({**entry, "tags": ["a"]})


@pytest.mark.parametrize(
    ("action", "values", "message"),
    [
        ("from-llamafactory", {"template": ["a"]}, "template is ['a']; expected a single text, number or boolean"),
        (
            "from-llamafactory",
            {"lr_scheduler_kwargs": {"min_lr": "x"}},
            "lr_scheduler_kwargs.min_lr is 'x'; expected a number",
        ),
        ("from-llamafactory", {"cutoff_len": 2.5}, "cutoff_len is 2.5; expected an integer"),
        ("from-llamafactory", {"learning_rate": 0}, "learning_rate is 0.0; expected a number above 0"),
        ("from-llamafactory", {"use_dora": "maybe"}, "use_dora is 'maybe'; expected true or false"),
        ("from-axolotl", {"num_epochs": float("inf")}, "num_epochs is 'Infinity'; expected a number"),
        (
            "from-axolotl",
            {"datasets": [{**FULL_ROWS, "path": ["a"]}]},
            "datasets[0].path is ['a']; expected a single text",
        ),
        ("from-axolotl", {"special_tokens": ["a"]}, "special_tokens is ['a']; expected a mapping {key: value}"),
        ("from-axolotl", {"eot_tokens": "a"}, "eot_tokens is 'a'; expected a list [a, b]"),
        ("from-swift", {"dataset": [None]}, "dataset[0] is None; expected a single text, number or boolean"),
    ],
)
def test_the_position_and_the_expected_kind_are_named(
    action: str, values: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = {"lr_scheduler_type": "cosine_with_min_lr"} if "lr_scheduler_kwargs" in values else {}
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps({**BASES[action][0], **bare, **values}), encoding="utf-8")
    assert main(["recipe", action, str(path)]) == 2
    assert f"x.yaml: {message}" in capsys.readouterr().err
