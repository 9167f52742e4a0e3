"""Names on a hub in recipes and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from llmsuite.base.cache import isolated_cache
from llmsuite.base.files import read_json_file
from llmsuite.base.hub.local_copies import PINS
from llmsuite.cli.main import main
from tests.support.written_family import write_family
from tests.tools.hub_server import HubServer

ROWS = [{"src": f"What is {n}?", "tgt": f"It is {n}."} for n in range(8)]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("hub") / "model", "llama")


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps from a model of the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return write_recipe(
        {
            "stage": "sft",
            "model": {"family": "llama", "weights": "org/model"},
            "data": {"train": "rows.jsonl", "max_length": 64},
            "train.max_steps": 2,
            "train.global_batch_size": 2,
            "train.micro_batch_size": 2,
            "output_dir": "runs/hub",
        }
    )


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which commits this process has pinned."""
    monkeypatch.setenv(PINS, "")


def test_validate_fetches_the_config_or_nothing(hub: HubServer, model: Path, recipe: Path, capsys: Any) -> None:
    assert main(["validate", str(recipe), "--model.preset=llama-7b"]) == 0
    note = "note: model.weights: org/model is not on this machine; `llmsuite run` downloads it first"
    assert note in capsys.readouterr().out
    assert hub.asked == []
    assert main(["validate", str(recipe)]) == 2
    assert "model.weights: hf:org/model: " in capsys.readouterr().err
    hub.add("org/model", files_of(model))
    hub.asked.clear()
    assert main(["validate", str(recipe)]) == 0
    assert note in capsys.readouterr().out
    assert [path.rpartition("/")[2] for method, path in hub.asked if method == "GET"] == ["model", "config.json"]
    assert main(["plan", str(recipe)]) == 0
    assert main(["validate", str(recipe), "--model.preset=llama-7b"]) == 2
    output = capsys.readouterr().err
    assert "has another shape" in output
    assert output.endswith("`--model.preset=null` takes the shape from config.json\n")


def test_a_run_records_the_commit_and_resumes_with_it(
    hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    repo = hub.add("org/model", files_of(model))
    first = f"hf:org/model@{repo.commit}"
    assert main(["run", str(recipe)]) == 0
    assert f"fetching {first}" in capsys.readouterr().out
    assert read_json_file(Path("runs/hub/recipe.json"))["model"]["weights"] == first
    repo.files["config.json"] += b" "
    repo.renew()
    new_process(monkeypatch)
    again = ["run", str(recipe), "--resume", "--train.max_steps=2", "--checkpoint.keep_last=3"]
    assert main(again) == 0
    assert "nothing to do: step 2 of 2 is done" in capsys.readouterr().out
    new_process(monkeypatch)
    assert main(["run", str(recipe), "--output_dir=runs/other"]) == 0
    assert read_json_file(Path("runs/other/recipe.json"))["model"]["weights"] == f"hf:org/model@{repo.commit}"
    new_process(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["run", str(recipe), "--output_dir=runs/offline"]) == 0
    assert main(["run", "runs/hub/recipe.json", "--output_dir=runs/recorded"]) == 0
    assert read_json_file(Path("runs/recorded/recipe.json"))["model"]["weights"] == first


def test_adapters_know_their_model_by_its_name(
    hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    repo = hub.add("org/model", files_of(model))
    assert main(["run", str(recipe), "--lora.rank=2"]) == 0
    adapter = Path("runs/hub/checkpoints/step-2")
    assert read_json_file(adapter / "base.json")["path"] == f"hf:org/model@{repo.commit}"
    settings = read_json_file(adapter / "adapter_config.json")
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/model", repo.commit)
    # elsewhere: another machine has only the adapter
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / "other")))
    new_process(monkeypatch)
    ask = ["--prompt", "Hi", "--max_new_tokens", "3"]
    capsys.readouterr()
    assert main(["generate", "runs/hub", *ask]) == 0
    output = capsys.readouterr().out
    (adapter / "base.json").unlink()  # as PEFT writes adapters
    hub.add("org/adapter", files_of(adapter))
    new_process(monkeypatch)
    assert main(["generate", "hf:org/adapter", *ask]) == 0
    assert capsys.readouterr().out == output
    assert main(["merge", "hf:org/adapter", "--base", "org/model", "-o", "merged"]) == 0
    assert main(["generate", "merged", *ask]) == 0
    assert capsys.readouterr().out.endswith(output)


def test_models_on_the_command_line(hub: HubServer, model: Path, tmp_path: Path, capsys: Any) -> None:
    hub.add("org/model", files_of(model))
    ask = ["--prompt", "Hi", "--max_new_tokens", "3"]
    assert main(["generate", str(model), *ask]) == 0
    output = capsys.readouterr().out
    assert main(["generate", "org/model", *ask]) == 0
    answer = capsys.readouterr()
    assert answer.out == output
    assert "fetching hf:org/model@" in answer.err
    assert main(["import", "hf:org/model", "-o", str(tmp_path / "imported")]) == 0
    assert main(["generate", str(tmp_path / "imported"), "--tokenizer", "org/model", *ask]) == 0
    assert capsys.readouterr().out.endswith(output)
    for words in (["convert", "--layout", "paddlenlp", "-o", str(tmp_path / "converted")],):
        assert main([words[0], "hf:org/model", *words[1:]]) == 0
    text = tmp_path / "t.txt"
    text.write_text("one two three " * 20)
    assert main(["eval", "org/model", "--perplexity", str(text)]) == 0
    assert hub.downloads("config.json") == 1


def test_a_model_that_does_not_exist_is_reported(
    hub: HubServer, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["generate", "{}", "--prompt", "Hi"], ["merge", "{}", "-o", "m"], ["import", "{}", "-o", "m"]):
        assert main([word.format("org/none") for word in words]) == 2
        output = capsys.readouterr().err
        assert f"org/none does not exist here, and hf:org/none: {hub.url} has no model org/none" in output
    assert main(["generate", "runs/none", "--prompt", "Hi"]) == 2
    output = capsys.readouterr().err
    assert "runs/none is not a directory with a model; import one with" in output
    assert "or name one on a hub, such as hf:ORG/NAME" in output


def test_data_of_a_hub(hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tools.hub_server import Repository

    hub.add("org/model", files_of(model))
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    rows = hub.datasets["org/rows"] = Repository({"README.md": b"rows", "data/train.jsonl": content})
    assert main(["run", str(recipe), "--data.train=hf:org/rows/data/train.jsonl"]) == 0
    recorded = read_json_file(Path("runs/hub/recipe.json"))["data"]["train"]
    assert recorded == f"hf:org/rows/data/train.jsonl@{rows.commit}"
    rows.files["data/train.jsonl"] = content[: len(content) // 2]
    rows.renew()
    new_process(monkeypatch)
    assert main(["run", str(recipe), "--data.train=hf:org/rows/data/train.jsonl", "--resume"]) == 0


def test_a_recipe_of_an_adapter(
    hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("org/model", files_of(model))
    assert main(["run", str(recipe), "--lora.rank=2"]) == 0
    hub.add("org/adapter", files_of(Path("runs/hub/checkpoints/step-2")))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    answering = {
        "stage": "infer",
        "model": {"family": "llama", "weights": "hf:org/adapter", "preset": None},
        "data": {"prompts": "prompts.jsonl"},
        "infer": {"max_new_tokens": 3},
        "output_dir": "runs/answers",
    }
    (tmp_path / "infer.json").write_text(json.dumps(answering))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    new_process(monkeypatch)
    assert main(["run", "infer.json"]) == 0
    assert len((tmp_path / "runs" / "answers" / "answers.jsonl").read_text().splitlines()) == 1


def test_the_tokens_are_written_nowhere(
    hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("org/model", files_of(model), gated=True)
    monkeypatch.setenv("HF_TOKEN", "allowed")
    assert main(["run", str(recipe), "--train.max_steps=1"]) == 0
    assert hub.tokens == {"Bearer allowed"}
    written = [p for p in tmp_path.rglob("*") if p.is_file() and b"allowed" in p.read_bytes()]
    assert written == []


def test_a_hub_without_xet_storage_is_named(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def upload_folder(self: Any, **arguments: Any) -> None:
        raise ConnectionError(f"Network error: 404 Not Found, {hub.url}/api/models/me/tuned/xet-write-token/main")

    monkeypatch.setenv("HF_TOKEN", "allowed")
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)  # as huggingface_hub 1.33 does
    assert main(["push", str(model), "hf:me/tuned"]) == 2
    output = capsys.readouterr().err
    assert f"{hub.url} cannot be reached (Network error: 404 Not Found" in output
    assert "if it has no Xet storage, set HF_HUB_DISABLE_XET=1" in output


def test_a_model_is_pushed(
    hub: HubServer, model: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hub.add("org/model", files_of(model))
    assert main(["run", str(recipe), "--model.weights=hf:org/model"]) == 0
    assert main(["push", "runs/hub", "me/tuned"]) == 2
    assert "can be pushed to Hugging Face only, as hf:ORG/NAME" in capsys.readouterr().err
    assert main(["push", "runs/hub", "hf:me/tuned"]) == 2
    assert "you are not logged in; log in with `hf auth login`" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "of-somebody")
    assert main(["push", "runs/hub", "hf:me/tuned"]) == 2
    assert "does not let this token write there" in capsys.readouterr().err
    assert main(["push", "runs/hub", "hf:me/tuned--once"]) == 2
    assert f"hf:me/tuned--once: {hub.url} does not accept it: Cannot have -- or .. in" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "allowed")
    with monkeypatch.context() as patch:
        # the library takes the environment of its import
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which the hub of the test does not have
        assert main(["push", "runs/hub", "hf:me/tuned", "--private"]) == 0
    repo = hub.models["me/tuned"]
    assert f"pushed runs/hub/checkpoints/step-2: hf:me/tuned@{repo.commit}" in capsys.readouterr().out
    assert repo.private
    checkpoint = Path("runs/hub/checkpoints/step-2")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= repo.files.keys()
    assert not any(path.startswith(("optimizer", "manifest", "train")) for path in repo.files)
    assert all(repo.files[path] == (checkpoint / path).read_bytes() for path in repo.files)
    ask = ["--prompt", "Hi", "--max_new_tokens", "3"]
    assert main(["generate", "runs/hub", *ask]) == 0
    output = capsys.readouterr().out
    assert main(["generate", "hf:me/tuned", *ask]) == 0
    assert capsys.readouterr().out == output
