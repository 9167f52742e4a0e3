"""Lazy samples of files that are larger than memory equal the samples of rows in memory."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.data import conversation_formats, preference_formats, prompt_formats, rejected_formats
from llmsuite.data.lazy_sequences import LazySequence, Subset, lengths_of
from llmsuite.data.mixture import Mixture
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.collator import collate_of
from llmsuite.engine.data import make_stage
from llmsuite.engine.row_samples import LazySamples, _code
from llmsuite.engine.stage import Stage, StageContext
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.kto import KtoStage
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import DpoSection, KtoSection, RmSection, SftSection
from llmsuite.stages.sft import SftStage
from tests.support import dpo_case, grpo_case
from tests.support.paths import DATA, ROOT

Made = Callable[..., Stage[Any]]
FORMATS = {
    f.name: f
    for f in (
        *conversation_formats.BUILTIN,
        *preference_formats.BUILTIN,
        *rejected_formats.BUILTIN,
        *prompt_formats.BUILTIN,
    )
}


def context(report: Callable[[str], None] = lambda text: None, **data: Any) -> StageContext:
    found = dpo_case.stage(report=report).context
    section = dataclasses.replace(found.data, **{"max_length": 256, "ignore_columns": ["*"], **data})
    return dataclasses.replace(found, data=section, data_formats=FORMATS, caches_tokens=True)


STAGES: dict[str, tuple[str, Made]] = {
    "sft": ("sft", lambda **how: SftStage(SftSection(), context(**how))),
    "sft, cut": ("sft", lambda **how: SftStage(SftSection(truncate=True), context(**how))),
    "dpo": ("preference", lambda **how: DpoStage(DpoSection(), context(**how))),
    "rm": ("preference", lambda **how: RmStage(RmSection(), context(**how))),
    "kto": ("unpaired", lambda **how: KtoStage(KtoSection(), context(**how))),
    "apo_zero": ("unpaired", lambda **how: KtoStage(KtoSection(loss="apo_zero"), context(**how))),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is larger than what is held in memory, and is read in many windows."""
    monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("llmsuite.engine.row_samples._WINDOW_ROWS", 7)


def plain(samples: Sequence[Any]) -> list[Any]:
    return [json.loads(json.dumps(dataclasses.asdict(sample), default=np.ndarray.tolist)) for sample in samples]


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("name", STAGES)
def test_the_samples_are_those_of_rows_in_memory(name: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = STAGES[name]
    if packing == "best_fit" and folder == "unpaired":
        return  # it does not pack
    path = DATA / folder / "train.jsonl"
    found = []
    for most in (32 << 20, 0):
        monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", most)
        monkeypatch.setattr("llmsuite.engine.row_samples._WINDOW_ROWS", 7)
        said: list[str] = []
        stage = made(report=said.append, max_length=90, packing=packing)
        samples = stage.reader.read(path)
        assert isinstance(samples, LazySequence) == (most == 0 or packing == "best_fit")
        lengths = lengths_of(samples, stage.row_lengths)
        measured = stage.row_lengths(samples)
        assert lengths is not None
        assert measured is not None
        assert lengths.tolist() == measured.tolist()
        found.append((plain(samples), lengths.tolist(), said, dataclasses.asdict(stage.reader.counts[path])["dropped"]))
    assert found[0] == found[1]
    dropped = sum(found[0][3].values())
    assert (dropped > 0) == (name != "sft, cut"), "some rows are too long"
    assert packing == "best_fit" or len(found[0][0]) + dropped == len(path.read_text().splitlines())


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_pairs_of_ranked_answers_are_those_of_rows_in_memory(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = []
    for i in range(30):
        rows.append({"prompt": f"What is {i}?", "responses": ["a", f"b{i}", "c" * i], "scores": [1, i % 3, i % 5]})
    path.write_text("\n".join(map(json.dumps, rows)))
    found = []
    for most in (32 << 20, 0):
        monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", most)
        monkeypatch.setattr("llmsuite.engine.row_samples._WINDOW_ROWS", 7)
        said: list[str] = []
        able = dataclasses.replace(context(report=said.append, packing=packing), capabilities=frozenset({"ranked"}))
        samples = DpoStage(DpoSection(), able).reader.read(path)
        found.append((plain(samples), said))
    assert found[0] == found[1]
    assert packing == "best_fit" or len(found[0][0]) > 40
    assert any("rows with ranked answers make" in line for line in found[0][1])


def test_prompts_are_those_of_rows_in_memory(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (32 << 20, 0):
        monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", most)
        stage = grpo_case.stage(registry)
        path = ROOT / stage.context.data.train
        samples = stage.reader.read(path)
        assert isinstance(samples, LazySamples) == (most == 0)
        found.append(list(samples))
    assert found[0] == found[1]


def variants(directory: Path) -> Iterator[Path]:
    """The same rows in a file of each kind."""
    import pyarrow
    import pyarrow.parquet

    lines = (DATA / "preference" / "eval.jsonl").read_text().splitlines()
    rows = [{key: json.loads(line)[key] for key in ("prompt", "chosen", "rejected")} for line in lines]
    text = [{key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows]
    yield write(directory / "lines.jsonl", "\ufeff\n" + "".join(json.dumps(row) + "\n\n" for row in text))
    yield write(directory / "list.json", json.dumps(text, indent=1, ensure_ascii=False))
    (directory / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, text)).encode()))
    yield directory / "packed.jsonl.gz"
    with open(directory / "table.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(text[0]))
        table.writeheader()
        table.writerows(text)
    yield directory / "table.csv"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(text), directory / "table.parquet")
    yield directory / "table.parquet"
    several = directory / "several"
    several.mkdir()
    write(several / "a.jsonl", "".join(json.dumps(row) + "\n" for row in text[:20]))
    write(several / "b.json", json.dumps(text[20:]))
    yield several


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.usefixtures("all_large")
def test_the_samples_of_a_file_of_any_kind(tmp_path: Path) -> None:
    found = []
    for path in variants(tmp_path):
        samples = STAGES["dpo"][1]().reader.read(path)
        assert isinstance(samples, LazySamples), path
        found.append(plain(samples))
    assert len(found) == 6
    assert all(one == found[0] for one in found)
    assert len(found[0]) == 48


@pytest.mark.usefixtures("all_large")
def test_a_value_that_json_lacks_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    for number, value in enumerate((datetime.datetime(2024, 1, 1), b"bytes", float("nan"))):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "more": value}]), path)
        with pytest.raises(UserError, match=r"parquet: row 1: has a value that JSON lacks"):
            STAGES["dpo"][1]().reader.read(path)


class Counting(DpoStage):
    """Counts the rows that samples are made of."""

    row_by_row = True
    num_made = 0

    def make_samples(self, rows: Sequence[Any], counts: Any) -> list[Any]:
        Counting.num_made += len(rows)
        return super().make_samples(rows, counts)


@pytest.mark.usefixtures("all_large")
def test_rows_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", (DATA / "preference" / "eval.jsonl").read_text())

    def count(read: Callable[[], Any] = lambda: None, **how: Any) -> tuple[int, list[str]]:
        said: list[str] = []
        stage = Counting(DpoSection(), context(report=said.append, **how))
        before = Counting.num_made
        samples = stage.reader.read(path)
        read()
        _ = samples[3], samples[-1], list(samples[5:7])
        return Counting.num_made - before, said

    first = count()
    again = count()
    assert first[0] == 48 + 4
    assert again == (4, first[1]), "a later start makes those samples only that it uses, and says the same"
    assert count(shuffle=False, packing="none", num_workers=2)[0] == 4, "keys that make no other samples"
    assert count(max_length=200)[0] > 48
    assert count(max_samples=20)[0] == 20 + 4
    assert count(chat_template="plain")[0] > 48
    with open(path, "a", encoding="utf-8") as file:
        file.write(path.read_text().splitlines()[0] + "\n")
    assert count()[0] == 49 + 4

    def write_more() -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")

    with pytest.raises(UserError, match=r"rows\.jsonl: was written to while it was being read"):
        count(write_more)


@pytest.mark.usefixtures("all_large")
def test_a_copy_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r"} for i in range(3)]
    path = write(tmp_path / "rows.json", json.dumps(rows))
    first = plain(STAGES["dpo"][1]().reader.read(path))
    (copy,) = (tmp_path / "cache" / "rows").glob("*.jsonl")
    copy.unlink()
    assert plain(STAGES["dpo"][1]().reader.read(path)) == first
    assert copy.exists()


@pytest.mark.usefixtures("all_large")
def test_faults_and_drops_are_reported_as_for_rows_in_memory(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    empty = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]}
    control = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]}
    lines = [json.dumps(good), "{", json.dumps(empty), json.dumps({"messages": 3}), json.dumps(control)] * 4
    path = write(tmp_path / "rows.jsonl", "\n".join(lines))
    with pytest.raises(UserError, match=r"rows.jsonl:2: is not a JSON line") as caught:
        STAGES["sft"][1]().reader.read(path)
    assert "rows.jsonl:19: " in str(caught.value)
    for _ in range(2):
        said: list[str] = []
        stage = STAGES["sft"][1](report=said.append, on_bad_row="skip")
        assert len(stage.reader.read(path)) == 8
        assert said[0].startswith(
            f"warning: {path}:5: the text of a turn has the control token <|im_end|>, and so have 3"
        )
        assert said[1].startswith(f"{path}: 8 of 20 rows are used; dropped: 4 with no supervised turn of the assistant")
        assert "8 that cannot be read: " in said[1]
        assert f"(4, first at {path}:2)" in said[1]
    with pytest.raises(UserError, match="none of its 4 rows can train anything"):
        STAGES["sft"][1]().reader.read(write(tmp_path / "empty.jsonl", f"{json.dumps(empty)}\n" * 4))
    with pytest.raises(UserError, match="has no rows"):
        STAGES["sft"][1]().reader.read(write(tmp_path / "none.jsonl", "\n"))


class Silent(DpoStage):
    """Leaves out rows without saying which."""

    def make_samples(self, rows: Sequence[Any], counts: Any) -> list[Any]:
        counts.drop("for no reason")
        return super().make_samples(rows[1:], counts)


class Together(DpoStage):
    """Whose samples depend on several rows."""

    row_by_row = False


@pytest.mark.usefixtures("all_large")
def test_a_stage_that_is_row_by_row_names_the_rows_it_drops() -> None:
    path = DATA / "preference" / "eval.jsonl"
    with pytest.raises(UserError, match=r"Silent: returned 6 samples of 7 rows .*counts\.drop\(reason, number\)"):
        Silent(DpoSection(), context()).reader.read(path)
    assert isinstance(Together(DpoSection(), context()).reader.read(path), list)


@pytest.mark.parametrize(("made", "said"), [([], "no sample, and counted"), (None, "a NoneType, which is no sequence")])
def test_a_stage_that_makes_no_samples(made: Any, said: str) -> None:
    class Empty(DpoStage):
        def make_samples(self, rows: Sequence[Any], counts: Any) -> Any:
            return made

    with pytest.raises(UserError, match=f"`make_samples` of stage Empty returned {said}"):
        Empty(DpoSection(), context()).reader.read(DATA / "preference" / "eval.jsonl")


class Halfway(Stage[Any]):
    row_kind = "preference"


class Uncounted(DpoStage):
    def collate(self, samples: Sequence[Any]) -> Any:
        return {name: value for name, value in super().collate(samples).items() if name != "num_tokens"}


def stage_of(registry: Registry, factory: Callable[[], Any], **spec: Any) -> Stage[Any]:
    plan = plan_run(ROOT / "recipes" / "llama" / "dpo.json", [], registry, smoke=True)
    train_plan = dataclasses.replace(plan.train, stage=dataclasses.replace(plan.train.stage, factory=factory, **spec))
    return make_stage(
        plan.model, plan.data, plan.parallel, train_plan, registry, lambda: "", TextTokenizer(DATA / "tokenizer")
    )


@pytest.mark.parametrize(
    ("cls", "kind", "said"),
    [
        (DpoSection, "preference", "its factory returned <class '.*DpoSection'>; it has to return a cl"),
        (DpoStage, "pairs", "row_kind is 'pairs' in its StageSpec and 'preference' in its class DpoStage; both have"),
        (Halfway, "preference", "its class Halfway has no method collate, loss$"),
    ],
)
def test_a_factory_that_returns_no_stage_is_refused(registry: Registry, cls: type, kind: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^stage dpo: {said}"):
        stage_of(registry, lambda: cls, row_kind=kind)


def test_a_stage_counts_the_tokens_of_its_batches(registry: Registry) -> None:
    rows = DATA / "preference" / "eval.jsonl"
    right, wrong = (stage_of(registry, lambda cls=cls: cls) for cls in (DpoStage, Uncounted))  # type: ignore[misc]
    assert collate_of(right)(right.reader.read(rows)[:2])["num_tokens"] > 0
    with pytest.raises(UserError, match="stage dpo: `collate`: the batch has None for 'num_tokens'; it is an integer"):
        collate_of(wrong)(wrong.reader.read(rows)[:2])


def test_parts_and_mixtures_know_their_lengths() -> None:
    def measure(samples: Sequence[int]) -> np.ndarray:
        return np.array([[number, 10 * number] for number in samples])

    mixed = Mixture([[1, 2, 3], Subset([4, 5], np.array([1, 0]))], [1.0, 2.0])
    assert list(mixed) == [1, 2, 3, 5, 4, 5, 4, 5, 4]
    assert (mixed[-1], list(mixed[2:9:3])) == (4, [3, 5, 4])
    lengths = lengths_of(mixed, measure)
    assert lengths is not None
    assert lengths.tolist() == measure(list(mixed)).tolist()
    assert lengths_of(mixed, lambda samples: None) is None
    with pytest.raises(IndexError):
        mixed[9]


MEMORY = """
import json, sys, threading, time
from pathlib import Path
from llmsuite.data import disk_rows
from llmsuite.engine import row_samples
from tests.support.own_memory import own_memory
from tests.unit.engine.test_row_samples import STAGES

name, path, first, disk_rows.MAX_IN_MEMORY_BYTES = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
row_samples._WINDOW_BYTES = 64 << 10
stage = STAGES[name][1](chat_template="plain")
list(stage.reader.read(first))  # what is taken once, whatever the file
before, most, ended = own_memory(), 0, threading.Event()

def watch():
    global most
    while not ended.wait(0.005):
        most = max(most, own_memory())

thread = threading.Thread(target=watch)
thread.start()
samples = stage.reader.read(path)
total = sum(int(stage.row_lengths(samples[at : at + 1]).sum()) for at in range(0, len(samples), 7))
ended.set()
thread.join()
print(json.dumps([len(samples), total, max(most, own_memory()) - before]))
"""


@pytest.mark.further
@pytest.mark.parametrize(("name", "folder"), [("sft", "sft"), ("dpo", "preference")])
def test_memory_does_not_grow_with_the_file(name: str, folder: str, tmp_path: Path) -> None:
    """The memory peak of a file held in memory and of the same file read lazily; windows are small compared with it."""
    lines = (DATA / folder / "train.jsonl").read_text().splitlines()
    first = write(tmp_path / "first.jsonl", "".join(line + "\n" for line in lines))
    path = write(tmp_path / "rows.jsonl", first.read_text() * 24)
    found = []
    for most in (32 << 20, 0):
        words = [sys.executable, "-c", MEMORY, name, str(path), str(first), str(most)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (*in_memory_samples, held), (*lazy_samples, stored) = found
    print(
        f"{name}: {held / 1e6:.1f} MB held, {stored / 1e6:.1f} MB not, of a file of {path.stat().st_size / 1e6:.1f} MB"
    )
    assert in_memory_samples == lazy_samples
    assert held > 3 * stored


def test_a_cache_entry_depends_on_the_code_of_columns_and_text_templates() -> None:
    names = {file.name for file in _code(STAGES["sft"][1]().reader)}
    assert {"columns.py", "text_template.py", "row_converter.py", "sft.py"} <= names


def test_parts_of_a_large_file_have_the_counts_of_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = []
    for i in range(40):
        answer = {"role": "user" if i % 7 == 3 else "assistant", "content": "x " * (i * 3)}
        rows.append({"messages": [{"role": "user", "content": f"q{i}"}, answer]})
        if i % 11 == 5:  # a fault of the template, found when the sample is made
            rows[-1]["chat_template_kwargs"] = {"nonesuch": True}
    path.write_text("\n".join(["no row", *map(json.dumps, rows)]))
    found = []
    for most in (32 << 20, 0):
        monkeypatch.setattr("llmsuite.data.disk_rows.MAX_IN_MEMORY_BYTES", most)
        monkeypatch.setattr("llmsuite.engine.row_samples._WINDOW_ROWS", 7)
        made = context(max_length=60, on_bad_row="skip", holdout=0.4)
        parts = SftStage(SftSection(), made).reader.read_parts(path)
        counts = [part.counts for of_kind in parts for part in of_kind]
        found.append([(c.read, c.unread, c.dropped, c.faults.counts, c.lost) for c in counts])
    assert found[0] == found[1]
    assert len(found[0]) == 2
    assert all(dropped for _, _, dropped, _, _ in found[0])
    assert sum(sum(faults.values()) for *_, faults, _ in found[0]) > found[0][0][1], "some are of the template"


def test_what_is_known_of_the_whole_file_is_said_once(all_large: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "q <|im_end|>"}, {"role": "assistant", "content": "x " * 90}]
    path.write_text("\n".join([json.dumps({"messages": turns})] * 20))
    said: list[str] = []
    stage = SftStage(SftSection(truncate=True), context(report=said.append, max_length=60, holdout=0.4))
    stage.reader.read_parts(path)
    text = "\n".join(said)
    assert text.count("20 rows of the whole file are cut to data.max_length") == 1
    assert text.count("<|im_end|>") == 1
