"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmsuite.base.resources import bundled
from llmsuite.base.version import version_line
from llmsuite.cli.main import main, split_overrides
from llmsuite.contract.registry import ALLOW_LIST, Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.recipe.load import REMOVE
from tests.conftest import STAGES, position

NO_VALUE = "unknown option. To set a key of the recipe, give its value too: --train.max_steps=3"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process; returns exit code, stdout and stderr."""
    monkeypatch.setenv(ALLOW_LIST, "")

    def call(*words: object) -> tuple[int, str, str]:
        try:
            code: Any = main([str(word) for word in words])
        except SystemExit as left:  # the parser's own way out
            code = left.code
        return code, *capsys.readouterr()

    return call


def table(text: str) -> dict[str, list[str]]:
    """Rows by their first column; columns are two spaces apart."""
    return {row[0]: row[1:] for row in (re.split(r"\s{2,}", line) for line in text.splitlines())}


def test_version_and_help(run: Run, registry: Registry) -> None:
    assert run("--version") == (0, f"{version_line()}\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for command in registry.commands.values():
        assert re.search(rf"^ +{command.name} +{command.help.split()[0]}", out, re.MULTILINE)
        code, text, err = run(command.name, "--help")
        assert (code, err) == (0, "")
        assert "usage:" in text


def test_command_is_required_and_known(run: Run, registry: Registry) -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "command" in err
    assert run("rnu", "x.json") == (
        2,
        "",
        f"no command is called 'rnu'; did you mean 'run'? registered: {', '.join(sorted(registry.commands))}. "
        f"{ALLOW_LIST} allows no plugins\n",
    )


def test_validate_prints_the_plan_in_a_line(run: Run, write_recipe: Callable[..., Path]) -> None:
    path = write_recipe({"launch.num_devices": 2})
    code, out, err = run("validate", path)
    assert (code, err) == (0, "")
    assert out == (
        f"{path}: ok (dpo, llama, pp1 dp2 sharding1 tp1 on cpu; "
        "8 samples per step = 2 x 2 micro-batches x 2 data ranks)\n"
    )
    _, out, _ = run("validate", path, "--device=gpu")
    note = "  note: data.train: data/preference/train.jsonl is a sample of 85 kB; name your own data, or hf:ORG/NAME"
    assert out.splitlines()[1].startswith(note)


@pytest.mark.parametrize("key", ["data.train", "model.weights"])
def test_validate_names_the_key_of_a_name_that_is_none(key: str, run: Run, write_recipe: Callable[..., Path]) -> None:
    code, out, err = run("validate", write_recipe(), f"--{key}=hf:a/b/../c")
    assert (code, out, err) == (2, "", f"{key}: 'hf:a/b/../c' leaves the repository; name a file inside\n")


def test_validate_refuses_data_that_is_not_there(run: Run, write_recipe: Callable[..., Path]) -> None:
    path = write_recipe({"data.eval": "nothing.jsonl", "data.mix": {"none.csv": 1.0}})
    code, out, err = run("validate", path)
    assert (code, out) == (2, "")
    of_eval, of_mix = err.splitlines()
    assert of_eval.startswith(position(path, '"eval"') + ": data.eval: nothing.jsonl is not a file")
    assert of_mix.startswith(position(path, '"mix"') + ": data.mix: none.csv is not a file")
    assert run("run", path) == (2, "", err)
    assert run("validate", path, "--smoke")[0] == 0


def test_validate_notes_a_warm_up_without_an_end(run: Run, write_recipe: Callable[..., Path]) -> None:
    steps = {"train.max_steps": 20, "train.warmup_ratio": 0.0}
    for warm, many in ((20, 1), (19, 0)):
        _, out, _ = run("validate", write_recipe({**steps, "train.warmup_steps": warm}))
        note = "  note: train.warmup_steps: is 20, and train.max_steps 20, so the learning rate rises to the end"
        assert out.splitlines()[1:] == [note] * many


def test_validate_notes_a_directory_with_rows_to_evaluate_on(
    run: Run, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    row = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    for name in ("train.jsonl", "test.jsonl", "validation.jsonl.gz"):
        (rows / name).write_bytes(gzip.compress(row) if name.endswith(".gz") else row)
    path = write_recipe({"data.train": str(rows)})

    def notes(*words: object) -> list[str]:
        code, out, _ = run("validate", path, *words)
        assert code == 0
        return out.splitlines()[1:]

    note = f"are read, so the run also trains on validation.jsonl.gz and test.jsonl; name {rows}/train.jsonl"
    found = f"data.train: all files of {rows} {note} there, and {rows}/validation.jsonl.gz in data.eval"
    assert notes() == [f"  note: {found}"]
    assert notes(f"--data.eval={rows}/test.jsonl") == [f"  note: data.train: all files of {rows} {note} there"]
    assert notes(f"--data.train={rows}/train.jsonl") == []
    assert notes(f"--data.train={rows}/train.jsonl", f'--data.mix={{"{rows}": 1.0}}') == [
        f"  note: data.mix: all files of {rows} {note} there"
    ]
    (rows / "train.jsonl").rename(rows / "train-00000-of-00002.jsonl")
    (rows / "latest-00001-of-00002.jsonl").write_bytes(row)
    (found,) = notes()
    assert found.endswith("test.jsonl; move files that are not training data to another directory")
    for name in ("train-00000-of-00002.jsonl", "latest-00001-of-00002.jsonl"):
        (rows / name).unlink()
    assert notes() == [], "there is nothing else"


def test_validate_reports_every_problem_of_every_recipe(run: Run, write_recipe: Callable[..., Path]) -> None:
    good = write_recipe(name="good.json")
    bad = write_recipe({"train.max_step": 1, "seed": -1}, name="bad.json")
    worse = write_recipe({"data.train": REMOVE}, name="worse.json")
    code, out, err = run("validate", bad, good, worse, "nothing.json")
    assert code == 2
    assert out.splitlines()[0].startswith(f"{good}: ok")
    assert err.splitlines() == [
        position(bad, '"max_step":') + ": train.max_step: unknown key; did you mean 'max_steps'?",
        position(bad, '"seed"') + ": seed: expected integer >= 0, found -1",
        position(worse, '"data"') + ": data.train: is required: text",
        "nothing.json: cannot be read: No such file or directory",
    ]
    assert run("validate", good, good)[0] == 0


def test_validate_with_overrides(run: Run, write_recipe: Callable[..., Path]) -> None:
    path = write_recipe()
    for words in (["--train.global_batch_size=4"], ["--train.global_batch_size", "4"]):
        code, out, _ = run("validate", path, *words)
        assert (code, "; 4 samples per step" in out) == (0, True)
        code, out, _ = run("validate", *words, path)  # where they stand does not matter
        assert (code, "; 4 samples per step" in out) == (0, True)
    code, out, err = run("validate", path, "--train.max_steps", "-1", "--sed=1")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "--train.max_steps=-1: train.max_steps: expected integer > 0 or null, found -1",
        "--sed=1: sed: unknown key; did you mean 'seed'?",
    ]
    assert "cpu; 16 samples" in run("validate", path, "--smoke")[1]


@pytest.mark.parametrize("path", sorted(bundled("recipes").glob("*/*.json")), ids=lambda p: p.name)
def test_validate_shipped_recipes_from_anywhere(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = path.relative_to(bundled("recipes").parent)  # as `llmsuite list recipes` prints it
    assert run("validate", name)[0] == 0
    assert run("validate", name, "--smoke")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed"], f"--seed: {NO_VALUE}"),
        (["--seed", "--smoke"], f"--seed: {NO_VALUE}"),
        (["--smok"], "--smok: this command has no such option; did you mean --smoke?"),
        (["--smoek", "x"], "--smoek: this command has no such option; did you mean --smoke?"),
    ],
)
def test_words_that_are_neither_options_nor_overrides(
    run: Run, write_recipe: Callable[..., Path], words: list[str], message: str
) -> None:
    assert run("validate", write_recipe(), *words) == (2, "", f"{message}\n")


def test_options_with_values_are_no_overrides() -> None:
    words = ["serve", "--port=80", "--host", "here", "x.json", "--port", "81", "--seed", "1", "-v"]
    own, overrides = split_overrides(words, {"--port", "--host"})
    assert own == ["serve", "--port=80", "--host", "here", "x.json", "--port", "81", "-v"]
    assert overrides == ["--seed=1"]


def test_commands_without_recipe_take_no_overrides(run: Run) -> None:
    for words in (["list", "stages", "--seed=1"], ["schema", "--seed", "1"], ["plugins", "list", "-x"], ["list", "x"]):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.splitlines()[0].endswith("--help")


def test_show_names_the_origin_of_each_value(run: Run, write_recipe: Callable[..., Path]) -> None:
    path = write_recipe({"model.config": {"rope_theta": 5}, "launch.num_devices": 2})
    words = ["--seed=7", '--checkpoint={"keep_last": 3}', "--model.config.num_hidden_layers=4"]
    code, out, err = run("show", path, *words)
    assert (code, err) == (0, "")
    rows = table(out)
    assert rows["stage"] == ['"dpo"', position(path, '"stage"')]
    assert rows["train.max_steps"] == ["10", position(path, '"max_steps"')]
    assert rows["train.num_epochs"] == ["null", "default"]
    assert rows["dpo.beta"] == ["0.1", "default"]
    assert rows["seed"] == ["7", "--seed=7"]
    assert rows["checkpoint.keep_last"] == ["3", '--checkpoint={"keep_last": 3}']
    assert rows["checkpoint.save_steps"] == ["null", "default"]
    assert rows["model.config.rope_theta"] == ["5.0", position(path, '"rope_theta"')]
    assert rows["model.config.num_hidden_layers"] == ["4", "--model.config.num_hidden_layers=4"]
    assert rows["model.config.hidden_size"] == ["4096", "model shape"]
    assert rows["data_parallel_degree"] == ["2", "derived"]
    assert rows["accumulate_steps"] == ["2", "derived"]


def test_show_smoke(run: Run, write_recipe: Callable[..., Path]) -> None:
    path = write_recipe({"dpo": {"beta": 0.3}})
    rows = table(run("show", path, "--smoke", "--train.max_steps=3")[1])
    assert rows["train.max_steps"] == ["3", "--train.max_steps=3"]
    assert rows["model.config.hidden_size"] == ["64", "--smoke"]
    assert rows["data.max_length"] == ["256", "--smoke"]
    assert rows["dpo.beta"] == ["0.3", position(path, '"beta"')]
    assert rows["train.warmup_ratio"] == ["0.0", "default"]


def test_show_json(run: Run, write_recipe: Callable[..., Path], plan: Callable[..., Any]) -> None:
    code, out, _ = run("show", write_recipe(), "--json", "--seed=7")
    assert code == 0
    assert json.loads(out) == as_plain(plan(None, "--seed=7").recipe)


def test_schema_accepts_a_recipe(run: Run, write_recipe: Callable[..., Path]) -> None:
    for words in (["schema"], ["schema", "--stage", "dpo"]):
        code, out, _ = run(*words)
        assert code == 0
        jsonschema.Draft202012Validator(json.loads(out)).validate(json.loads(write_recipe().read_text()))
    assert run("schema", "--stage", "dppo") == (
        2, "",
        f"no stage is called 'dppo'; did you mean 'ppo'? registered: {', '.join(STAGES)}. "
        f"{ALLOW_LIST} allows no plugins\n",
    )  # fmt: skip


def test_run_stops_before_anything_starts(run: Run, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    wrong = {"launch.nodes": 2, "data.eval": "nothing.jsonl", "seed": "1", "engine.precision": "fp16"}
    for key, value in wrong.items():
        path = write_recipe({key: value, "output_dir": str(tmp_path / "run")})
        code, out, err = run("run", path)
        assert (code, out) == (2, "")
        assert err.startswith(position(path, f'"{key.rpartition(".")[2]}": ') + f": {key}: ")
        assert not (tmp_path / "run").exists()


def test_where_to_listen_is_looked_at_before_the_model(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"--host 127.0.0.1 --port {port}: cannot listen there: Address already in use\n"
        assert run("serve", "no-model", "--port", port) == (2, "", expected)
    assert "cannot listen there: Name or service" in run("serve", "x", "--host", "no-such-host.invalid", "--port", 0)[2]
    for host in ("::", "localhost"):
        assert "no-model" in run("serve", "no-model", "--host", host, "--port", 0)[2]


@pytest.mark.parametrize("name", ["", ".inside", "nowhere.inside", "broken.inside"])
def test_no_code_of_a_package_runs_when_a_file_in_it_is_imported(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected = f"package:{name}: no Python package {name!r} is installed\n"
    assert run("import", f"package:{name}", "-o", tmp_path / "model") == (2, "", expected)
    assert run("import", "package:broken", "-o", tmp_path / "model")[2].endswith("ships 0 .gguf files; one is needed\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("eval", "MODEL", "--perplexity"), "--perplexity"),
        (("eval", "MODEL", "--exact_match"), "--exact_match"),
        (("eval", "MODEL", "--preference"), "--preference"),
        (("generate", "MODEL", "--input"), "--input"),
    ],
)
def test_files_are_looked_for_before_the_model(words: tuple[str, ...], option: str, run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    assert run(*words, missing) == (2, "", f"{option}: {missing} does not exist (working directory: {Path.cwd()})\n")
    results = tmp_path / "none" / "results.json"
    missing.write_text("")
    expected = f"--output: {results.parent} is no directory\n"
    assert run(*words, missing, "--output", results) == (2, "", expected)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("generate", "--prompt", "Hi", "--num_beams=2", "--presence_penalty=1"),
            "--num_beams: beam search has no penalty but --length_penalty; leave out --presence_penalty",
        ),
        (
            ("generate", "--prompt", "Hi", "--length_penalty=2"),
            "--length_penalty: belongs to beam search; add --num_beams",
        ),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_what_a_model_would_be_read_for_in_vain_is_refused(run: Run, words: tuple[str, ...], says: str) -> None:
    command, *options = words
    code, out, err = run(command, "no-model", *options)
    assert (code, out) == (2, "")
    assert err.startswith(says)


RECIPE_COMMAND = """
import llmsuite
from llmsuite.contract.hookspecs import Command


def add_arguments(parser):
    parser.add_argument("recipe", type=str, help="a recipe")
    parser.add_argument("--loud", action="store_true", help="in capitals")


def run(args, registry):
    text = f"{args.recipe} {args.overrides}"
    print(text.upper() if args.loud else text)
    return 3


@llmsuite.hookimpl
def llmsuite_register_recipe_commands():
    return [Command(name="shout", help="say it", add_arguments=add_arguments, run=run, takes_overrides=True)]
"""


def test_a_plugin_adds_a_subcommand_of_recipe(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "shouting.py"
    file.write_text(RECIPE_COMMAND)
    plugin = f"--plugin={file}"
    assert run("recipe", "shout", "a.json", "--loud", "--seed=3", plugin) == (3, "A.JSON ['--SEED=3']\n", "")
    assert run("recipe", "shout", plugin)[::2] == (
        2,
        "recipe shout: RECIPE is missing. For help: llmsuite recipe shout --help\n  RECIPE: a recipe\n",
    )
    code, out, _ = run("recipe", "shout", "--help", plugin)
    assert (code, "say it" in out, "--loud" in out) == (0, True, True)
    assert "shout: say it" in " ".join(run("recipe", "--help", plugin)[1].split())
    assert "expected one of new, " in run("recipe", "wisper", plugin)[2]
    assert run("recipe", "shout", "a.json")[0] == 2  # without the plugin


@pytest.mark.parametrize("name", ["new", "from-here", "two words", "--loud"])
def test_a_subcommand_of_recipe_has_a_name_of_its_own(run: Run, tmp_path: Path, name: str) -> None:
    file = tmp_path / f"shouting_{name.encode().hex()}.py"  # each test needs a module of its own
    file.write_text(RECIPE_COMMAND.replace('"shout"', repr(name)))
    code, _, err = run("recipe", "shout", "a.json", f"--plugin={file}")
    assert code == 2
    assert f"a subcommand of `llmsuite recipe` cannot be called {name!r}" in err


def test_a_subcommand_of_recipe_that_does_not_work_is_named(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "shouting_not.py"
    file.write_text(RECIPE_COMMAND.replace("    parser.add", "    1 / 0\n    parser.add", 1))
    code, _, err = run("recipe", "shout", "a.json", f"--plugin={file}")
    assert code == 2
    assert "recipe command 'shout'" in err
    assert "ZeroDivisionError" in err
