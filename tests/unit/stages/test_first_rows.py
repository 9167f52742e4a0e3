"""What `validate` says of the first rows of data: what the readers of a run say, of every key that names rows."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.resources import bundled
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.data.documents import read_documents
from llmsuite.data.keys import KEEP_ALL
from llmsuite.data.read import read_rows
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.prompts import Prompter
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.first_rows import check_rows

SFT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
PROMPT = {"prompt": "a", "answer": "b"}
Refused = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def refused(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Key and message of all that is wrong with the data of llama's recipe for a stage."""
    monkeypatch.chdir(tmp_path)

    def check(stage: str, *words: str) -> list[tuple[str, str]]:
        recipe = bundled("recipes") / "llama" / f"{stage}.json"
        local = ["--device=cpu", "--model.preset=llama-7b", "--model.weights=null"]
        if not any(word.startswith("--model.tokenizer") for word in words):
            local.append("--model.tokenizer=data/tokenizer")
        local += ["--engine.precision=fp32"] if stage == "infer" else []
        has_eval = any(word.startswith("--data.eval") for word in words) or stage == "infer"
        words = (*local, *([] if has_eval else ["--data.eval=null"]), *words)
        plan = plan_run(recipe, words, registry)
        try:
            check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry)
        except RecipeError as error:
            return [(problem.key, problem.message) for problem in error.problems]
        return []

    return check


def write(name: str, *rows: Any) -> str:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def said(read: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "content"),
    [
        ("sft", "Question,Our Answer\nWhy?,Because.\n"),
        ("sft", "alpha,beta\na,b\n"),
        ("sft", ""),
        ("sft", "a;b\nc;d\n"),
        ("dpo", f"{json.dumps(SFT)}\n"),
        ("sft", f"{json.dumps(PAIR)}\n"),
        ("kto", f"{json.dumps(PAIR)}\n"),
        ("grpo", '{"text": "a"}\n'),
        ("sft", '{"messages": "a"}\n{"messages": 1}\n'),
        ("sft", "not JSON\n"),
        ("sft", "[1, 2]\n"),
        ("sft", '{"messages": [], "messages": []}\n'),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_check_reports_the_errors_of_a_run(
    refused: Refused, registry: Registry, stage: str, content: str, packed: bool
) -> None:
    name = f"rows.{'jsonl' if content[:1] in ('{', '[', 'n') else 'csv'}{'.gz' if packed else ''}"
    Path(name).write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    kind = registry.stages[stage].row_kind
    readers = registry.stages_by_row_kind()
    wanted = said(lambda: read_rows(Path(name), kind, "auto", registry.data_formats, readers=readers))
    assert refused(stage, f"--data.train={name}") == [("data.train", wanted)]
    good = {"sft": SFT, "dpo": PAIR, "kto": {"prompt": "a", "completion": "b", "label": True}, "grpo": PROMPT}[stage]
    write("good.jsonl", good)
    assert refused(stage, "--data.train=good.jsonl", f"--data.eval={name}") == [("data.eval", wanted)]
    assert refused(stage, "--data.train=good.jsonl", f'--data.mix={{"{name}":1.0}}') == [("data.mix", wanted)]
    assert refused(stage, "--data.train=good.jsonl") == []


def test_files_that_cannot_be_read(refused: Refused) -> None:
    assert refused("sft", "--data.train=no.jsonl")[0][1].startswith("no.jsonl is not a file (working directory: ")
    Path("a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    assert refused("sft", "--data.train=a.jsonl.gz")[0][1].startswith("a.jsonl.gz: cannot be read: ")
    Path("a.parquet").write_bytes(b"PAR1")
    assert refused("sft", "--data.train=a.parquet")[0][1].startswith("a.parquet: cannot be read: ")
    Path("a.arrow").touch()
    assert "files are not read; save it as" in refused("sft", "--data.train=a.arrow")[0][1]


@pytest.mark.parametrize("suffix", ["json", "parquet", "csv.gz", "tsv"])
def test_every_kind_of_file_is_checked(refused: Refused, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    name = f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"ask": "a", "reply": "b"}]), name)
    else:
        text = {"json": '[{"ask": "a", "reply": "b"}]', "csv.gz": "ask,reply\na,b\n", "tsv": "ask\treply\na\tb\n"}[
            suffix
        ]
        Path(name).write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    ((key, message),) = refused("sft", f"--data.train={name}")
    assert (key, "keys ['ask', 'reply'] fit no format" in message) == ("data.train", True)
    assert refused("sft", f"--data.train={name}", '--data.columns={"instruction":"ask","output":"reply"}') == []
    ((_, typo),) = refused("sft", f"--data.train={name}", '--data.columns={"instruction":"aks","output":"reply"}')
    assert (
        "has no column 'aks', which data.columns.instruction takes: it has 'ask', 'reply'; did you mean 'ask'?" in typo
    )
    ((_, typo),) = refused("sft", f"--data.train={name}", '--data.columns={"instrution":"ask","output":"reply"}')
    assert """Did you mean --data.columns='{"instruction":"ask","output":"reply"}'""" in typo


def test_each_file_of_a_directory_and_a_data_set_that_was_saved(refused: Refused) -> None:
    import datasets

    Path("rows").mkdir()
    write("rows/a.jsonl", SFT)
    assert refused("sft", "--data.train=rows") == []
    write("rows/b.jsonl", {"text": "a"})
    ((_, message),) = refused("sft", "--data.train=rows")
    assert message.startswith("rows/b.jsonl:1: has no key 'messages'")
    datasets.Dataset.from_list([{"ask": "a", "reply": "b"}]).save_to_disk("saved")
    ((_, message),) = refused("sft", "--data.train=saved")
    assert message.startswith("saved: row 1: keys ['ask', 'reply'] fit no format with conversation rows")
    assert refused("sft", "--data.train=saved", '--data.columns={"instruction":"ask","output":"reply"}') == []


def test_the_rest_of_a_file_is_not_read(refused: Refused) -> None:
    write("a.jsonl", SFT)
    with open("a.jsonl", "a") as file:
        file.write("not JSON\n" * 20)
    assert refused("sft", "--data.train=a.jsonl") == []
    Path("b.jsonl").write_text("not JSON\n" * 12)
    ((_, message),) = refused("sft", "--data.train=b.jsonl")
    assert len(message.splitlines()) == 10
    assert refused("sft", "--data.train=a.jsonl", "--data.on_bad_row=skip") == []
    ((_, message),) = refused("sft", "--data.train=b.jsonl", "--data.on_bad_row=skip")
    assert message.startswith("b.jsonl: has no rows: 12 that cannot be read")
    Path("b.jsonl").write_text("not JSON\n" * 120)
    assert refused("sft", "--data.train=b.jsonl", "--data.on_bad_row=skip") == [], "a row may follow"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"body": "a"}\n', []),
        ("a.csv", b"body,id\na,1\n", []),
        ("a.txt", b"\xff\n", []),
        ("a.jsonl", b"not JSON\n", []),
        ("a.json", b"[]", []),
        ("a.jsonl", b'{"body": "a"}\n', ['--data.columns={"text":"bodi"}']),
    ],
)
def test_text_of_pretraining(refused: Refused, name: str, content: bytes, words: list[str]) -> None:
    Path(name).write_bytes(content)
    key = "bodi" if words else "text"
    wanted = said(lambda: next(read_documents(Path(name), "lines", key)))
    assert refused("pretrain", f"--data.train={name}", *words) == [("data.train", wanted)]
    Path("good.jsonl").write_text('{"text": "a"}\n')
    if not words:
        assert refused("pretrain", "--data.train=good.jsonl", f'--pretrain.mix={{"{name}":1.0}}') == [
            ("pretrain.mix", wanted)
        ]


def test_other_requirements_of_pretraining_are_checked(refused: Refused) -> None:
    Path("empty.txt").write_text("\n \n")
    assert refused("pretrain", "--data.train=empty.txt") == [("data.train", "empty.txt: no text to index")]
    Path("a.txt").write_text("a" * 3_000_000)
    assert refused("pretrain", "--data.train=a.txt") == []
    columns = '--data.columns={"text":"body"}'
    assert refused("pretrain", "--data.train=a.txt", columns) == [
        ("data.columns", "a.txt has no columns; remove that key, or name a file of rows")
    ]
    ((key, message),) = refused("pretrain", "--data.train=a.txt", '--data.columns={"body":"text"}')
    assert (key, message.startswith("has body; the one field of pretraining is 'text'")) == ("data.columns", True)
    Path("b.idx").write_bytes(b"nothing")
    Path("b.bin").write_bytes(b"")
    assert refused("pretrain", "--data.train=b")[0][1].startswith("b.idx: is no index of a corpus")


@pytest.mark.parametrize("row", [{"Question": "a"}, {"messages": []}, 3, {"prompt": "a", "messages": []}])
def test_prompts_to_answer(refused: Refused, row: Any) -> None:
    write("a.jsonl", row)
    prompter = Prompter(TextTokenizer(bundled("data") / "tokenizer"), "chatml")
    wanted = said(lambda: prompter.read(Path("a.jsonl"), KEEP_ALL))
    assert refused("infer", "--data.prompts=a.jsonl") == [("data.prompts", wanted)]
    if row == {"Question": "a"}:
        assert """add --data.columns='{"prompt":"Question"}'""" in wanted
        assert refused("infer", "--data.prompts=a.jsonl", '--data.columns={"prompt":"Question"}') == []


def test_columns_that_rewards_need(refused: Refused) -> None:
    write("a.jsonl", {"prompt": "a", "Answer": "b"})
    ((key, message),) = refused("grpo", "--data.train=a.jsonl")
    assert key == "reward.exact.column"
    assert message == (
        "a.jsonl:1: the row has no 'answer' (reward.exact.column); its other columns: Answer; did you mean 'Answer'?"
    )
    assert refused("grpo", "--data.train=a.jsonl", "--reward.exact.column=Answer") == []
    assert refused("grpo", "--data.train=a.jsonl", "--reward.max_failed=1.0") == []
    write("a.jsonl", {"prompt": "a"}, PROMPT)
    assert refused("grpo", "--data.train=a.jsonl") == [], "some rows may lack it"


def test_texts_that_end_completions_are_tokens(refused: Refused) -> None:
    write("a.jsonl", PROMPT)
    words = ("grpo", "--data.train=a.jsonl")
    ((key, message),) = refused(*words, '--rollout.stop=["<|of another|>"]')
    assert key == "rollout.stop"
    assert message == f"'<|of another|>' is no token of the vocabulary of {bundled('data') / 'tokenizer'}"
    eos = TextTokenizer(bundled("data") / "tokenizer").special_tokens["eos_token"]
    assert refused(*words, f"--rollout.stop={json.dumps([eos])}") == []


def test_a_template_that_refuses_the_turns(refused: Refused) -> None:
    shutil.copytree(bundled("data") / "tokenizer", "mine")
    config = json.loads(Path("mine/tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    Path("mine/tokenizer_config.json").write_text(json.dumps(config))
    Path("mine/chat_template.jinja").unlink(missing_ok=True)
    system = {"role": "system", "content": "s"}
    rows = {
        "sft": {"messages": [system, *SFT["messages"]]},
        "dpo": {**PAIR, "prompt": [system, {"role": "user", "content": "a"}]},
        "kto": {"messages": [system, *SFT["messages"]], "label": True},
        "grpo": {**PROMPT, "prompt": [system, {"role": "user", "content": "a"}]},
        "infer": {"prompt": [system, {"role": "user", "content": "a"}]},
    }
    for stage, row in rows.items():
        write("a.jsonl", row)
        key = "prompts" if stage == "infer" else "train"
        words = [f"--data.{key}=a.jsonl", "--data.chat_template=tokenizer"]
        ((_, message),) = refused(stage, *words, "--model.tokenizer=mine")
        assert message.startswith("a.jsonl:1: chat template of mine refuses the turns (system, user")
        assert "no system" in message
        assert refused(stage, words[0], "--data.chat_template=chatml") == []
    del config["chat_template"]
    Path("mine/tokenizer_config.json").write_text(json.dumps(config))
    assert "mine: has no chat template; set data.chat_template to" in refused(*("sft", "--model.tokenizer=mine"))[0][1]


def test_a_run_reports_the_same_before_it_starts(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "mine.csv"
    rows.write_text("Question,Our Answer\nWhy?,Because.\n")
    recipe = str(write_recipe({"stage": "sft", "data.train": str(rows)}))
    assert main(["--no-plugins", "validate", recipe]) == 2
    printed = capsys.readouterr().err
    assert printed.endswith("""add --data.columns='{"instruction":"Question","output":"Our Answer"}'\n""")
    assert main(["--no-plugins", "run", recipe]) == 2
    assert capsys.readouterr().err == printed
    assert main(["--no-plugins", "validate", recipe, "--smoke"]) == 0, "its data is embedded"
    assert main(["--no-plugins", "validate", recipe, '--data.columns={"instruction":"aks","output":"b"}']) == 2
    assert "has no column 'aks'" in capsys.readouterr().err


def test_plain_text_needs_no_chat_template(refused: Refused, tmp_path: Path) -> None:
    shutil.copytree(bundled("data") / "tokenizer", tmp_path / "tokenizer")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = tmp_path / "tokenizer" / name
        if name.endswith(".jinja"):
            file.unlink(missing_ok=True)
        else:
            keys = json.loads(file.read_text())
            keys.pop("chat_template", None)
            file.write_text(json.dumps(keys))
    tokenizer = f"--model.tokenizer={tmp_path / 'tokenizer'}"
    alpaca = {"instruction": "Hi?", "output": "Hello."}
    assert refused("sft", "--data.train=" + write("a.jsonl", {"text": "Hello."}), tokenizer) == []
    assert refused("sft", "--data.train=" + write("b.jsonl", alpaca), "--data.text_template=alpaca", tokenizer) == []
    ((key, message),) = refused("sft", "--data.train=b.jsonl", tokenizer)
    assert key == "data.train"
    assert "has no chat template" in message
    ((_, message),) = refused("sft", "--data.train=b.jsonl", "--data.text_template={question}{output}", tokenizer)
    assert "b.jsonl:1: has no field 'question', which data.text_template takes" in message
    ((key, message),) = refused("dpo", "--data.train=" + write("c.jsonl", PAIR | {"margin": 1}))
    assert "has the columns 'margin', which trl_preference does not read" in message
    assert refused("rm", "--data.train=c.jsonl") == []


def test_ranked_answers_are_rendered(refused: Refused) -> None:
    row = {"prompt": "a", "responses": ["b", "c", "d"], "scores": [1, 2, 2]}
    assert refused("dpo", "--data.train=" + write("a.jsonl", row)) == []
    ((_, message),) = refused("dpo", "--data.train=" + write("b.jsonl", {**row, "scores": [1]}))
    assert "'scores' is no list of a number for each of the 3 'responses'" in message
