"""Rows that are held out of the training data, sampled from it, and evaluated by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from llmsuite.base.errors import Problem, UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.data.lazy_sequences import lengths_of
from llmsuite.data.mixture import Mixture
from llmsuite.data.row_choice import held_out_rows
from llmsuite.engine.drop_counts import DropCounts
from llmsuite.engine.row_reader import RowReader
from llmsuite.engine.stage import Stage
from llmsuite.recipe.plans import evaluation_names
from llmsuite.recipe.resolve import RunPlan
from llmsuite.stages.explain import open_stage
from tests.support.paths import DATA
from tests.support.swift import load_datasets

FOLDERS = {"sft": "sft", "dpo": "preference", "rm": "preference", "kto": "unpaired"}
IGNORED = {"data.ignore_columns": ["*"]}
Opened = Callable[..., Stage[Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["in memory", "on disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "on disk":
        monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr("llmsuite.engine.row_samples._WINDOW_ROWS", 7)
    name: str = request.param
    return name


@pytest.fixture
def opened(plan: Callable[..., RunPlan], registry: Registry) -> Opened:
    def make(stage: str = "sft", seed: int = 42, **data: Any) -> Stage[Any]:
        keys = {"stage": stage, "seed": seed, **IGNORED, **{f"data.{key}": value for key, value in data.items()}}
        made = plan(keys)
        return open_stage(made.model, made.data, made.parallel, made.train, registry)

    return make


def rows_of(stage: str) -> list[dict[str, Any]]:
    lines = (DATA / FOLDERS[stage] / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][:60]


def written(directory: Path, name: str, rows: Sequence[Any]) -> Path:
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain(samples: Sequence[Any]) -> list[Any]:
    return [json.loads(json.dumps(dataclasses.asdict(sample), default=np.ndarray.tolist)) for sample in samples]


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("stage", FOLDERS)
def test_held_out_rows_are_those_of_train_test_split(
    tmp_path: Path, opened: Opened, stage: str, packing: str, place: str
) -> None:
    if packing == "best_fit" and stage == "kto":
        return  # it does not pack
    rows = rows_of(stage)
    split = datasets.Dataset.from_dict({"n": range(len(rows))}).train_test_split(test_size=0.3, seed=7)
    path = written(tmp_path, "all", rows)
    keys = {"packing": packing, "max_length": 90}  # some rows are too long
    samples, held_out = opened(stage, 7, holdout=0.3, **keys).reader.read_all(path, {})
    assert list(held_out) == [""]
    other = opened(stage, 7, **keys)
    for found, name in ((samples, "train"), (held_out[""], "test")):
        expected = other.reader.read(written(tmp_path, name, [rows[n] for n in split[name]["n"]]))
        assert plain(found) == plain(expected)
        assert len(found) > 3
        for lengths in (lengths_of(found, other.row_lengths), other.row_lengths(found)):
            known = other.row_lengths(expected)
            assert lengths is not None
            assert known is not None
            assert lengths.tolist() == known.tolist()


def test_rows_of_axolotl_are_held_out_after_long_ones_are_dropped(tmp_path: Path, opened: Opened, place: str) -> None:
    rows = rows_of("sft")
    whole = opened(seed=7).reader.read(written(tmp_path, "whole", rows))
    lengths = [len(sample.ids) for sample in whole]
    longest = int(np.median(lengths))
    kept = datasets.Dataset.from_dict({"n": range(len(rows)), "length": lengths}).shuffle(seed=7)
    split = kept.filter(lambda row: row["length"] <= longest).train_test_split(test_size=0.2, shuffle=False, seed=7)
    files = [written(tmp_path, "a", rows[:25]), written(tmp_path, "b", rows[25:])]
    keys = {"holdout": 0.2, "choice": "axolotl", "max_length": longest}
    one = opened(seed=7, **keys).reader.read_all(written(tmp_path, "all", rows), {})
    two = opened(seed=7, mix={str(files[1]): None}, **keys).reader.read_all(files[0], {})
    expected = {name: [plain([whole[n]])[0] for n in split[name]["n"]] for name in ("train", "test")}
    assert (plain(one[0]), plain(one[1][""])) == (expected["train"], expected["test"])
    key = json.dumps
    assert sorted(plain(two[0]), key=key) == sorted(expected["train"], key=key)
    assert sorted(plain(two[1][""]), key=key) == sorted(expected["test"], key=key)


class Counting:
    """A stage that counts the rows of which it makes samples."""

    def __init__(self, stage: Stage[Any]):
        self._stage = stage
        self.num_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[Any]:
        self.num_rows += len(rows)
        return self._stage.make_samples(rows, counts)


def test_the_choice_of_axolotl_makes_samples_once(tmp_path: Path, opened: Opened) -> None:
    path = written(tmp_path, "all", rows_of("sft"))
    counting = Counting(opened(holdout=0.2, choice="axolotl"))
    samples, held_out = RowReader(counting).read_all(path, {})
    assert (len(samples), len(held_out[""])) == (48, 12)
    assert counting.num_rows == 60


def test_rows_that_axolotl_keeps_end_its_choice(tmp_path: Path, opened: Opened, place: str) -> None:
    """A row without an answer would move the border of the rows that are held out."""
    rows = [*rows_of("sft")[:10], {"messages": [{"role": "user", "content": "Hi?"}]}]
    reader = opened(holdout=0.2, choice="axolotl").reader
    with pytest.raises(UserError, match=r"all\.jsonl: 1 rows are dropped with no supervised turn .* Axolotl counts"):
        reader.read_all(written(tmp_path, "all", rows), {})


def test_prompts_of_rollouts_are_held_out(tmp_path: Path, plan: Callable[..., RunPlan], registry: Registry) -> None:
    rows = [{"prompt": f"Say {n}."} for n in range(12)]
    path = written(tmp_path, "prompts", rows)
    keys = {
        "stage": "grpo",
        "data.train": str(path),
        "data.holdout": 5,
        "reward": {"functions": {"format": 1.0}, "format": {"pattern": "a"}},
    }
    made = plan({**keys, "data.ignore_columns": []})
    reader = open_stage(made.model, made.data, made.parallel, made.train, registry).reader
    samples, held_out = reader.read_all(path, {})
    assert (len(samples), len(held_out[""])) == (7, 5)


def test_rows_of_a_mixture_are_held_out_of_all_files(tmp_path: Path, opened: Opened, place: str) -> None:
    rows = rows_of("sft")[:30]
    files = [written(tmp_path, name, part) for name, part in (("a", rows[:12]), ("b", rows[12:13]), ("c", rows[13:]))]
    numbers = datasets.Dataset.from_dict({"n": range(30)}).train_test_split(test_size=6, seed=42)
    stage = opened(mix={str(files[1]): 2.0, str(files[2]): None}, holdout=6)
    samples, held_out = stage.reader.read_all(files[0], {})
    whole = plain(opened().reader.read(written(tmp_path, "whole", rows)))
    assert isinstance(samples, Mixture)
    train = plain(samples)
    assert {json.dumps(row) for row in train} == {json.dumps(whole[n]) for n in numbers["train"]["n"]}
    assert [row in train for row in (whole[12],)] == [True], "the run would have no row of b"
    key = json.dumps
    assert sorted(plain(held_out[""]), key=key) == sorted((whole[n] for n in numbers["test"]["n"]), key=key)


def test_a_file_of_a_mixture_keeps_a_row(tmp_path: Path, opened: Opened) -> None:
    rows = rows_of("sft")[:10]
    first = written(tmp_path, "a", rows[:9])
    second = written(tmp_path, "b", rows[9:])
    seeds = [n for n in range(9) if 9 in held_out_rows(10, 0.9, n)[1]]
    stage = opened(seed=seeds[0], mix={str(second): None}, holdout=0.9)
    with pytest.raises(UserError, match=r"data\.holdout: holds out all 1 rows of .*b\.jsonl; lower it"):
        stage.reader.read_all(first, {})


def test_a_sample_is_that_of_ms_swift(tmp_path: Path, opened: Opened, place: str) -> None:
    rows = rows_of("sft")[:40]
    path = written(tmp_path, "rows", rows)
    numbers = np.random.RandomState(3).permutation(40)[:9]
    whole = plain(opened().reader.read(path))
    sampled, evaluated = opened(seed=3, sample=9).reader.read_all(path, {"": path})
    assert plain(sampled) == [whole[n] for n in numbers]
    assert plain(evaluated[""]) == whole, "evaluation data is used in full"
    some, held_out = opened(seed=3, sample=9, holdout=4).reader.read_all(path, {})
    split = datasets.Dataset.from_dict({"n": numbers}).train_test_split(test_size=4, seed=3)
    assert plain(some) == [whole[n] for n in split["train"]["n"]]
    assert plain(held_out[""]) == [whole[n] for n in split["test"]["n"]]
    first = opened(seed=3, sample=3, max_samples=5).reader.read_all(path, {})[0]
    assert plain(first) == [whole[n] for n in np.random.RandomState(3).permutation(5)[:3]]
    with pytest.raises(UserError, match=r"data\.sample: is 41, and data\.train has 40 rows"):
        opened(sample=41).reader.read_all(path, {})


def test_samples_of_several_files(tmp_path: Path, opened: Opened, place: str) -> None:
    rows = rows_of("sft")[:30]
    first, second = written(tmp_path, "a", rows[:12]), written(tmp_path, "b", rows[12:])
    whole = plain(opened().reader.read(written(tmp_path, "whole", rows)))
    mix = {str(second): None}
    numbers = 12 + np.random.RandomState(3).permutation(18)[:5]
    found = opened(seed=3, train=str(first), mix=mix, sample={str(second): 5}).reader.read_all(first, {})[0]
    assert plain(found) == [whole[n] for n in (*range(12), *numbers)]
    both = {str(first): 4, str(second): 5}
    found = opened(seed=3, train=str(first), mix=mix, sample=both).reader.read_all(first, {})[0]
    assert plain(found) == [whole[n] for n in (*np.random.RandomState(3).permutation(12)[:4], *numbers)]
    with pytest.raises(UserError, match=r"data\.sample: is 19, and .*b\.jsonl has 18 rows"):
        opened(train=str(first), mix=mix, sample={str(second): 19}).reader.read_all(first, {})


def test_formats_of_several_files(tmp_path: Path, opened: Opened, place: str) -> None:
    """A file without a format of its own has the one that its rows are recognised by."""
    row = {"instruction": "2+2?", "output": "4", "query": "3+3?", "response": "6"}
    first, second = written(tmp_path, "a", [row]), written(tmp_path, "b", [row, row])
    asked = {name: plain(opened(format=name).reader.read(first))[0] for name in ("alpaca", "query_response")}
    assert asked["alpaca"] != asked["query_response"]
    keys: dict[str, Any] = {"train": str(first), "mix": {str(second): None}, "eval": str(second)}
    stage = opened(**keys, format={str(second): "query_response"})
    found, evaluated = stage.reader.read_all(first, {"": second})
    assert plain(found) == [asked["alpaca"], *[asked["query_response"]] * 2]
    assert plain(evaluated[""]) == [asked["query_response"]] * 2
    found = opened(**keys, format={str(first): "query_response"}).reader.read_all(first, {})[0]
    assert plain(found) == [asked["query_response"], *[asked["alpaca"]] * 2]


@pytest.mark.parametrize("holdout", [None, 0.1])
def test_rows_of_ms_swift(tmp_path: Path, opened: Opened, place: str, holdout: float | None) -> None:
    rows = rows_of("sft")[:40]
    parts = {"a": rows[:17], "b": rows[17:20], "c": rows[20:]}
    files = [written(tmp_path, name, part) for name, part in parts.items()]
    keys = {"train": str(files[0]), "mix": {str(path): None for path in files[1:]}}
    sample = {str(files[0]): 9, str(files[1]): 8}
    stage = opened(seed=5, choice="ms-swift", sample=sample, holdout=holdout, **keys)
    samples, held_out = stage.reader.read_all(files[0], {})
    training, evaluation = load_datasets([17, 3, 20], [9, 8, None], holdout, 5)
    whole = plain(opened().reader.read(written(tmp_path, "whole", rows)))
    begins = (0, 17, 20)
    assert plain(samples) == [whole[begin + n] for begin, part in zip(begins, training) for n in part]
    assert len(samples) > 9 + 3 + 15, "rows of b are repeated"
    expected = [whole[begin + n] for begin, part in zip(begins, evaluation) for n in part]
    assert plain(held_out.get("", [])) == expected
    assert bool(expected) == (holdout is not None)


def test_named_sets_are_read_by_name(tmp_path: Path, opened: Opened) -> None:
    rows = rows_of("sft")[:20]
    math = written(tmp_path, "math", rows[:3])
    chat = written(tmp_path, "chat", rows[3:8])
    train = written(tmp_path, "train", rows[8:])
    stage = opened(holdout=2)
    samples, found = stage.reader.read_all(train, {"math": math, "chat": chat})
    assert len(samples) == 10
    assert {name: len(part) for name, part in found.items()} == {"holdout": 2, "math": 3, "chat": 5}


def test_faulty_rows_do_not_count(tmp_path: Path, opened: Opened, place: str) -> None:
    rows = rows_of("sft")[:11]
    path = written(tmp_path, "rows", [*rows[:4], {"nonsense": 1}, *rows[4:]])
    clean = written(tmp_path, "clean", rows)
    stage = opened(holdout=3, on_bad_row="skip")
    found = stage.reader.read_all(path, {})
    expected = opened(holdout=3).reader.read_all(clean, {})
    assert plain(found[0]) == plain(expected[0])
    assert plain(found[1][""]) == plain(expected[1][""])
    assert (stage.reader.counts[path].faults.total, stage.reader.counts[path].total) == (1, 9)


def test_held_out_rows_have_to_be_usable(tmp_path: Path, opened: Opened, place: str) -> None:
    talk = {"messages": [{"role": "user", "content": "a " * 400}, {"role": "assistant", "content": "b"}]}
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = [talk] * 10
    held_out = datasets.Dataset.from_dict({"n": range(10)}).train_test_split(test_size=2, seed=42)["test"]["n"]
    path = written(tmp_path, "rows", [talk if n in held_out[:] else short for n in range(len(rows))])
    with pytest.raises(UserError, match=r"data\.holdout: none of the 2 held-out rows is usable; raise it"):
        opened(holdout=2, max_length=64).reader.read_all(path, {})


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"holdout": 0.1, "eval": "x.jsonl"}, "data.holdout", 'name the data of eval: {"NAME": "x.jsonl"}'),
        ({"holdout": 0.1, "eval": {"holdout": "x.jsonl"}}, "data.eval", "is that of the rows of data.holdout"),
        ({"eval": {}}, "data.eval", "names no evaluation set"),
        ({"eval": {"a/b": "x.jsonl"}}, "data.eval", "has the name 'a/b'"),
        ({"holdout": 1.5}, "data.holdout", "expected number > 0 and < 1 or integer > 0 or null"),
        ({"holdout": 0}, "data.holdout", "expected number > 0 and < 1"),
        ({"sample": 0}, "data.sample", "expected integer > 0"),
        ({"sample": {"x.jsonl": 3}}, "data.sample", "names x.jsonl, which is no file of data.train or data.mix: "),
        ({"sample": {}}, "data.sample", "names no file"),
        ({"format": {}}, "data.format", "names no file"),
        ({"format": {"x.jsonl": "alpaca"}}, "data.format", "names x.jsonl, which is no file of data.train, mix or"),
        ({"eval": "x.jsonl", "format": {"x.jsonl": "alpaco"}}, "data.format", "no data format is called 'alpaco'"),
        ({"eval": "x.jsonl", "format": {"x.jsonl": "prompt"}}, "data.format", "prompt has prompt rows, but stage"),
        ({"choice": "ms-swift"}, "data.choice", "has no effect without data.sample and data.holdout"),
        ({"choice": "ms-swift", "holdout": 3}, "data.holdout", "is a share of each file, such as 0.01"),
        ({"choice": "axolotl", "sample": 3}, "data.sample", "data.choice axolotl uses all rows"),
        ({"answer_tokens": "apart"}, "data.answer_tokens", "has no effect without data.text_template"),
        ({"pack_length": 99999}, "data.pack_length", "has no effect without data.packing"),
        ({"packing": "first_fit", "pack_length": 2}, "data.pack_length", "a row may have data.max_length"),
    ],
)
def test_keys_that_contradict_are_refused(
    problems: Callable[..., list[Problem]], keys: dict[str, Any], key: str, message: str
) -> None:
    (problem,) = problems({f"data.{name}": value for name, value in keys.items()})
    assert problem.key == key
    assert message in problem.message


def test_pretraining_has_keys_of_its_own(problems: Callable[..., list[Problem]]) -> None:
    changes = {"stage": "pretrain", "data.train": "data/pretrain/train.txt", "data.ignore_columns": []}
    found = problems({**changes, "data.holdout": 0.1, "data.sample": 3, "data.system": "Be brief."})
    assert {problem.key for problem in found} == {"data.holdout", "data.sample", "data.system"}
    assert any("which uses pretrain.split; set that instead" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, ("",)),
        ({"eval": "x"}, ("",)),
        ({"holdout": 0.1}, ("",)),
        ({"eval": {"a": "x", "b": "x"}}, ("a", "b")),
        ({"eval": {"a": "x"}, "holdout": 3}, ("holdout", "a")),
    ],
)
def test_the_names_of_the_sets(keys: dict[str, Any], names: tuple[str, ...]) -> None:
    assert evaluation_names(DataSection(train="t", **keys)) == names


def test_data_stats_and_explain_show_the_use_of_rows(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "rows", rows_of("sft")[:10])
    keys = {"stage": "sft", "data.train": str(path), **IGNORED, "data.sample": 8, "data.holdout": 2}
    recipe = str(write_recipe(keys))
    assert main(["data", "stats", recipe]) == 0
    output = capsys.readouterr().out
    assert f"{path} (for training)\n  rows       6 read, 6 used" in output
    assert f"{path} (held out)\n  rows       2 read, 2 used" in output
    sampled = np.random.RandomState(42).permutation(10)[:8]
    split = datasets.Dataset.from_dict({"n": sampled}).train_test_split(test_size=2, seed=42)
    unused = set(range(10)) - set(sampled.tolist())
    for number, expected in (
        (min(unused), "is not used: it is not among the rows of data.sample 8"),
        (split["test"]["n"][0], "is held out for evaluation by data.holdout 2"),
        (split["train"]["n"][0], "is trained on"),
    ):
        assert main(["data", "explain", recipe, f"--row={number + 1}"]) == 0
        assert f"{path}:{number + 1}: {expected}\n" in capsys.readouterr().out
    words = ["--row=1", "--data.choice=ms-swift", "--data.holdout=null", "--data.sample=30"]
    assert main(["data", "explain", recipe, *words]) == 0
    assert f"{path}:1: is trained on 3 times in an epoch\n" in capsys.readouterr().out


def text_of(stage: Stage[Any], sample: Any) -> str:
    """The text of a sample up to its answer, or further."""
    found = sample.answer if hasattr(sample, "answer") else sample
    ids = found.ids if hasattr(found, "weights") else found.prompt
    return str(stage.context.tokenizer.decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
def test_rows_without_a_system_turn_get_that_of_the_recipe(
    tmp_path: Path, opened: Opened, stage: str, place: str
) -> None:
    ask = [{"role": "user", "content": "Hi?"}]
    answer = {"role": "assistant", "content": "Hello."}
    row: dict[str, Any] = {"messages": [*ask, answer]}
    if stage == "dpo":
        row = {"prompt": ask, "chosen": [answer], "rejected": [{**answer, "content": "No."}]}
    elif stage == "kto":
        row = {"prompt": ask, "completion": [answer], "label": True}
    key = "messages" if stage == "sft" else "prompt"
    own = {**row, key: [{"role": "system", "content": "Sing."}, *row[key]]}
    made = opened(stage, system="Be brief.", chat_template="chatml")
    first, second = (text_of(made, sample) for sample in made.reader.read(written(tmp_path, "rows", [row, own])))
    assert first.count("Be brief.") == first.count("system") == 1
    assert second.count("Sing.") == second.count("system") == 1


def test_explain_shows_an_added_system_turn(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    own = [{"role": "system", "content": "Sing."}, *talk]
    path = written(tmp_path, "rows", [{"messages": talk}, {"messages": own}])
    keys = {"stage": "sft", "data.train": str(path), "data.ignore_columns": [], "data.system": "Be brief."}
    recipe = str(write_recipe({**keys, "data.chat_template": "chatml"}))
    assert main(["data", "explain", recipe, "--row=1"]) == 0
    output = capsys.readouterr().out
    assert "the system turn is that of data.system" in output
    assert output.count(" system ") > 3
    assert main(["data", "explain", recipe, "--row=2"]) == 0
    assert "the system turn is that of data.system" not in capsys.readouterr().out
