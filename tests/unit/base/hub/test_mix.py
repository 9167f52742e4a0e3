"""Names on a hub among the files that a run mixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.base.files import read_json_file
from llmsuite.base.hub.local_copies import PINS
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.recipe.fetch import fetch_names
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.conftest import position
from tests.support.written_family import write_family
from tests.tools.hub_server import HubServer, Repository

ROWS = "".join(json.dumps({"src": f"What is {n}?", "tgt": f"It is {n}."}) + "\n" for n in range(8)).encode()
TEXT = "".join(json.dumps({"text": f"{n} and {n} are {n + n}. " * 20}) + "\n" for n in range(8)).encode()


def small(stage: str, mix: dict[str, float], directory: Path) -> dict[str, Any]:
    """A run of two steps of the model in `directory`, whose rows are mixed with others."""
    section = "pretrain" if stage == "pretrain" else "data"
    return {
        "stage": stage,
        "model": {"family": "llama", "weights": str(directory)},
        "data": {"train": "rows.jsonl", "max_length": 64},
        f"{section}.mix": mix,
        "train.max_steps": 2,
        "train.global_batch_size": 2,
        "train.micro_batch_size": 2,
        "output_dir": "runs/mixed",
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("mix") / "model", "llama")


@pytest.fixture
def rows(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Rows on a hub, in addition to others in the working directory."""
    monkeypatch.chdir(tmp_path)
    repository = hub.datasets["org/rows"] = Repository({"train.jsonl": ROWS, "text.jsonl": TEXT})
    return repository


@pytest.mark.parametrize(("stage", "file", "content"), [("sft", "train", ROWS), ("pretrain", "text", TEXT)])
def test_a_run_records_the_commit_and_resumes_with_it(
    stage: str, file: str, content: bytes, rows: Repository, model: Path,
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Path("rows.jsonl").write_bytes(content)
    Path("more.jsonl").write_bytes(content)
    mix = {"more.jsonl": 2.0, f"hf:org/rows/{file}.jsonl": 0.5}
    recipe = str(write_recipe(small(stage, mix, model)))
    section = "pretrain" if stage == "pretrain" else "data"
    assert main(["run", recipe]) == 0
    pinned = {"more.jsonl": 2.0, f"hf:org/rows/{file}.jsonl@{rows.commit}": 0.5}
    assert read_json_file(Path("runs/mixed/recipe.json"))[section]["mix"] == pinned
    rows.files[f"{file}.jsonl"] = content[: len(content) // 2]
    rows.renew()
    monkeypatch.setenv(PINS, "")
    assert main(["run", recipe, "--resume"]) == 0
    assert read_json_file(Path("runs/mixed/recipe.json"))[section]["mix"] == pinned


@pytest.fixture
def fetched(
    rows: Repository, model: Path, write_recipe: Callable[..., Path], registry: Registry
) -> Callable[[dict[str, float]], RunPlan]:
    Path("rows.jsonl").write_bytes(ROWS)

    def fetch(mix: dict[str, float]) -> RunPlan:
        return fetch_names(plan_run(write_recipe(small("sft", mix, model)), [], registry).loaded, registry, print)

    return fetch


def test_the_launcher_fetches_what_is_mixed(
    fetched: Callable[[dict[str, float]], RunPlan], hub: HubServer, rows: Repository
) -> None:
    fetched({"hf:org/rows/train.jsonl": 1.0}).fetched(print)
    assert hub.downloads("train.jsonl") == 1


def test_a_name_that_occurs_twice_is_fetched_once(
    fetched: Callable[[dict[str, float]], RunPlan], tmp_path: Path, rows: Repository
) -> None:
    with pytest.raises(RecipeError) as caught:
        fetched({"hf:org/rows/train.jsonl": 1.0, "hf:org/rows/train.jsonl@main": 2.0})
    (problem,) = caught.value.problems
    same = f"hf:org/rows/train.jsonl@{rows.commit}"
    message = f"hf:org/rows/train.jsonl@main is {same}, which is already in the mix; name it once, with one weight"
    assert (problem.key, problem.message) == ("data.mix", message)
    assert problem.where == position(tmp_path / "recipe.json", '"mix"')


def test_data_that_no_hub_has_are_reported(fetched: Callable[[dict[str, float]], RunPlan], hub: HubServer) -> None:
    with pytest.raises(RecipeError) as caught:
        fetched({"org/none": 1.0})
    (problem,) = caught.value.problems
    assert problem.key == "data.mix"
    assert problem.message.startswith("org/none is not a local path (working directory: ")
