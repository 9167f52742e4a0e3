"""Columns somebody has become the fields of a format; tables are read to the letter, and each fault has its line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.data.columns import rename_columns
from llmsuite.data.conversation_formats import BUILTIN
from llmsuite.data.documents import read_documents
from llmsuite.data.keys import ColumnRules
from llmsuite.data.mixture import Mixture
from llmsuite.data.prompt_formats import alpaca_unpaired
from llmsuite.data.read import read_rows
from llmsuite.data.rows import Conversation, Message
from llmsuite.engine.resume import file_digests, run_digest
from llmsuite.engine.run_record import training_keys
from llmsuite.engine.stage import Stage
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.stages.explain import open_stage
from tests.conftest import position

FORMATS = {f.name: f for f in BUILTIN}
COLUMNS = {"instruction": "question", "input": "context", "output": "{answer} ({id})"}
TABLE = '\ufeffid,question,context,answer\r\n1,"What is ""x"", or y?","a, b\r\nc",{id}\r\n\r\n2,Who?,,Me.\r\n'


def read(path: Path, columns: dict[str, str] | None = None, **more: Any) -> Any:
    return read_rows(path, "conversation", "auto", FORMATS, columns=ColumnRules(columns or {}), **more)


def talk(question: str, answer: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), (False, True))


def write(directory: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz"])
def test_a_table_is_read_to_the_letter(tmp_path: Path, name: str) -> None:
    data = (TABLE.replace(",", "\t").replace("\t or", ", or") if ".tsv" in name else TABLE).encode()
    path = write(tmp_path, gzip.compress(data) if name.endswith(".gz") else data, name)
    rows = read(path, COLUMNS)
    context = "a\t b\r\nc" if ".tsv" in name else "a, b\r\nc"
    # what a cell says is text, whatever braces it has
    assert list(rows) == [talk(f'What is "x", or y?\n{context}', "{id} (1)"), talk("Who?", "Me. (2)")]
    assert rows.places == [f"{path}:2", f"{path}:5"]


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("a,b\n1,2\n1,2,3\n", 3, "has 3 columns, and the header 2: a, b"),
        ("a,b\n1\n", 2, "has 1 columns, and the header 2: a, b"),
        (b"a,b\n1,2\n'\xff',2\n", 3, "is not UTF-8"),
        ('a,b\n"1"x,2\n', 2, "cannot be read: ',' expected after '\"'"),
        ('a,b\n1,2\n"1,2\n3,4\n', 3, "cannot be read: unexpected end of data"),
        ("a,b,a\n1,2,3\n", 1, "names the column 'a' twice"),
        (b"a,b\xe9\n1,2\n", 1, "is not UTF-8; save the file as UTF-8"),
        ("a,b\n1,2\n1\r2,3\n", 3, r"has a \r within a line; lines end with \n or \r\n"),
        ("a;b\n1;2\n", 1, "has the one column 'a;b'; a .csv file has ',' between its cells, and not ';'"),
    ],
)
def test_faults_of_a_table_have_their_line(tmp_path: Path, content: str | bytes, line: int, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read(path, {"instruction": "a", "output": "b"} if line > 1 else None)
    assert f"{path}:{line}: {words}" in str(caught.value)


def test_faulty_rows_of_a_table_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, b"instruction,output\nHi?,Hello.\nalone\nSo\xff?,Yes.\nAnd?,Bye.\n")
    rows = read(path, on_bad_row="skip")
    assert list(rows) == [talk("Hi?", "Hello."), talk("And?", "Bye.")]
    assert rows.faults.total == 2


def test_templates_take_names_and_nothing_else() -> None:
    row = {"a": "{b}", "b": 3, "c": None, "d": [1], "e.f": "dot", "": "index", "g": True}
    fields = {"x": "{{{a}}} {b}{c}|{e.f}", "y": "d", "z": ""}
    assert rename_columns(row, fields) == {"x": "{{b}} 3|dot", "y": [1], "z": "index"}
    for source in ("{a.__class__}", "{a!r}", "{a:>9}", "{a[0]}", "A"):
        with pytest.raises(ValueError, match=r"has no column .* which data\.columns\.x takes: it has 'a', 'b'"):
            rename_columns(row, {"x": source})
    for source in ("{d}", "{g}"):
        with pytest.raises(ValueError, match=r"the template of data\.columns\.x takes texts and numbers"):
            rename_columns(row, {"x": source})


def test_a_missing_column_is_named_with_line_and_columns(tmp_path: Path) -> None:
    path = write(tmp_path, '{"q": "Hi?", "a": "Hello."}\n{"q": "Hi?", "b": "Hello."}\n', "rows.jsonl")
    columns = {"instruction": "q", "output": "a"}
    with pytest.raises(UserError) as caught:
        read(path, columns)
    assert str(caught.value).startswith(
        f"{path}:2: has no column 'a', which data.columns.output takes: it has 'q', 'b'"
    )
    assert list(read(path, columns, limit=1)) == [talk("Hi?", "Hello.")]  # it ends before the fault
    with pytest.raises(UserError, match=r'add --data\.columns=\'{"instruction":"q","output":"a"}\'$'):
        read(path)


def test_a_wrong_column_is_reported_once(tmp_path: Path) -> None:
    rows = ['{"q": "Hi?", "a": "Hello."}'] * 12
    path = write(tmp_path, "\n".join([*rows, "{", *rows]), "rows.jsonl")
    with pytest.raises(UserError) as caught:
        read(path, {"instruction": "question", "output": "a"})
    first, other, more = str(caught.value).splitlines()
    assert first == f"{path}:1: has no column 'question', which data.columns.instruction takes: it has 'q', 'a'; " + (
        "a text has to name a column in braces"
    )
    assert other.startswith(f"{path}:13: is not a JSON line")
    assert more == "and 23 more"


def test_a_tag_of_a_table_is_text() -> None:
    row = {"instruction": "Hi?", "output": "Hello."}
    assert [alpaca_unpaired({**row, "label": tag}).desirable for tag in ("True", "0")] == [True, False]
    with pytest.raises(ValueError, match="true or false is needed"):
        alpaca_unpaired({**row, "label": "yes"})


@pytest.mark.parametrize("source", ["{", "}", "{a", "{}", "{{}}", "{a}}", "{a{b}}"])
def test_a_template_is_checked_with_the_recipe(
    write_recipe: Callable[..., Path], registry: Registry, source: str
) -> None:
    path = write_recipe({"data.columns": {"prompt": source}})
    with pytest.raises(RecipeError) as caught:
        plan_run(path, (), registry)
    (problem,) = caught.value.problems
    assert problem.key == "data.columns.prompt"
    assert problem.where == position(path, '"prompt"')


@pytest.fixture
def opened(plan: Callable[..., RunPlan], registry: Registry) -> Callable[..., Stage[Any]]:
    def make(stage: str = "sft", **data: Any) -> Stage[Any]:
        keys = {f"data.{key}": value for key, value in data.items()}
        made = plan({"stage": stage, "model.tokenizer": "data/tokenizer", **keys})
        return open_stage(made.model, made.data, made.parallel, made.train, registry)

    return make


def test_columns_train_the_same_as_the_fields(tmp_path: Path, opened: Callable[..., Stage[Any]]) -> None:
    fields = [{"instruction": "What?", "input": "This.", "output": "That. (7)"}]
    named = write(tmp_path, "\n".join(map(json.dumps, fields)), "rows.jsonl")
    table = write(tmp_path, "id,question,context,answer\n7,What?,This.,That.\n")
    (expected,), (found,) = opened().reader.read(named), opened(columns=COLUMNS).reader.read(table)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.weights.tolist() == expected.weights.tolist()


def test_several_files_have_weights(tmp_path: Path, opened: Callable[..., Stage[Any]]) -> None:
    first, second = (
        write(tmp_path, "instruction,output\n" + "".join(f"{name}{i}?,Yes.\n" for i in range(count)), f"{name}.csv")
        for name, count in (("a", 4), ("b", 3))
    )
    stage = opened(mix={str(second): 1.5})
    samples, evaluation = stage.reader.read_all(first, {"": second})
    assert isinstance(samples, Mixture)
    assert (len(samples), len(evaluation[""])) == (4 + 6, 3)  # 6 of the second for 4 of the first: each of its 3 twice
    texts = [stage.context.tokenizer.decode(sample.ids.tolist()) for sample in samples]
    assert sum("a" in text.split("?")[0] for text in texts) >= 4
    assert len(set(texts)) == 7
    assert len(opened(mix={str(second): 1.5}, max_samples=2).reader.read_all(first, {})[0]) == 2 + 3
    together = opened(mix={str(second): None}).reader.read_all(first, {})[0]
    assert len(together) == 4 + 3  # the rows of both, each once
    assert len({tuple(sample.ids.tolist()) for sample in together}) == 7
    with pytest.raises(UserError, match=r"data\.mix: nowhere\.csv is not a file"):
        opened(mix={"nowhere.csv": 1.0}).reader.read_all(first, {})


def test_a_run_resumes_only_with_the_same_columns_and_files(
    tmp_path: Path, opened: Callable[..., Stage[Any]], plan: Callable[..., RunPlan]
) -> None:
    train = write(tmp_path, "a,b\nx,y\n")
    other = write(tmp_path, "a,b\n1,2\n", "other.csv")

    def digest(**data: Any) -> str:
        keys = {"stage": "sft", "data.train": str(train), **{f"data.{key}": value for key, value in data.items()}}
        made = plan({"data.eval": None, **keys})
        return run_digest(training_keys(as_plain(made.recipe)), "model", file_digests(made.data, opened(**data)))

    columns = {"instruction": "a", "output": "b"}
    digests = [digest(columns=columns), digest(columns={**columns, "output": "{b}"}), digest(max_samples=1)]
    digests += [digest(columns=columns, mix={str(other): 1.0})]
    other.write_text("a,b\n1,3\n")
    digests += [digest(columns=columns, mix={str(other): 1.0})]
    assert len(set(digests)) == 5
    assert digest(columns=columns) == digests[0]


def test_text_of_pretraining_is_made_of_columns(tmp_path: Path, opened: Callable[..., Stage[Any]]) -> None:
    table = write(tmp_path, 'title,body\nOne,"a\nb"\nTwo,c\n')
    rows = write(tmp_path, '{"title": "One", "body": "a\\nb"}\n{"title": "Two", "body": "c"}\n', "rows.jsonl")
    for path in (table, rows):
        assert [text for text, _ in read_documents(path, "lines", "{title}: {body}")] == ["One: a\nb", "Two: c"]
        assert [text for text, _ in read_documents(path, "lines", "body")] == ["a\nb", "c"]
    with pytest.raises(UserError, match="has no column 'x'"):
        list(read_documents(table, "lines", "{x}"))
    with pytest.raises(UserError, match="the one field of pretraining is 'text'"):
        opened("pretrain", columns={"body": "title"})
    with pytest.raises(UserError, match=r"text\.txt has no columns"):
        opened("pretrain", columns={"text": "title"}).reader.read(write(tmp_path, "a\n", "text.txt"))
    stage = opened("pretrain", columns={"text": "{title}: {body}"}, max_length=4, max_samples=2)
    assert len(stage.reader.read(table)) == 2


def test_explain_shows_the_sources_of_fields(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(tmp_path, TABLE)
    keys = {"stage": "sft", "data.train": str(table), "data.columns": COLUMNS, "model.tokenizer": "data/tokenizer"}
    assert main(["data", "explain", str(write_recipe(keys)), "--row", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"{table}:5: instruction is made of 'question': 'Who?'\n" in shown
    assert f"{table}:5: output is made of '{{answer}} ({{id}})': 'Me. (2)'\n" in shown
