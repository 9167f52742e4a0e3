"""A run of a recipe made of another suite's file has the losses that the suite's own script had with it.

tests/reference/make_trl_runs.py has run TRL's scripts and written their losses, make_suite_runs.py LLaMA-Factory's
command. The first loss of ms-swift, Axolotl and PaddleFormers is computed by hand, of the tokens that their templates
teach.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.reference.loss_by_hand import first_loss
from tests.reference.make_suite_runs import FILES, MODEL, write_inputs
from tests.reference.make_trl_runs import COUNT, ROWS
from tests.reference.tiny_llama_files import write_model, write_rows
from tests.support.paths import REFERENCE, ROOT

FOUND: dict[str, Any] = json.loads((REFERENCE / "conversions/trl.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_losses_of_trl(command: str, runner: Runner, tmp_path: Path) -> None:
    job = FOUND[command]
    write_model(tmp_path / "tiny-llama", ROOT / "data/tokenizer")
    write_rows(tmp_path / "rows", ROOT / ROWS[command], COUNT)
    places = {
        "model_name_or_path": str(tmp_path / "tiny-llama"), "dataset_name": str(tmp_path / "rows"),
        "output_dir": str(runner.directory / command),
    }  # fmt: skip
    file = tmp_path / f"{command}.yaml"
    recipe = tmp_path / "recipe.json"
    file.write_text(json.dumps({**job["arguments"], **places}), encoding="utf-8")
    runner.run("recipe", "from-trl", str(file), "-o", str(recipe))
    runner.run("run", str(recipe))
    ours = [record["loss"] for record in runner.metrics(command)]
    # sums of a few hundred float32 terms in another order, and eight steps of Adam from there
    assert ours == pytest.approx(job["losses"], abs=2e-4)
    assert ours[0] == pytest.approx(job["losses"][0], rel=2e-6)
    assert abs(ours[-1] - ours[0]) > 0.2  # it is a run in which something is learnt


@pytest.mark.parametrize("suite", FILES)
def test_losses_of_other_suites(suite: str, runner: Runner, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    text = json.dumps(FILES[suite])
    for name in (MODEL, "rows/train.jsonl"):
        text = text.replace(f'"{name}"', f'"{tmp_path / name}"')
    text = text.replace('"dataset_dir": "rows"', f'"dataset_dir": "{tmp_path / "rows"}"')
    text = text.replace('"out"', f'"{runner.directory / suite}"')
    file = tmp_path / "job.yaml"
    recipe = tmp_path / "recipe.json"
    file.write_text(text, encoding="utf-8")
    action = "from-swift" if suite == "megatron" else f"from-{suite}"
    runner.run("recipe", action, str(file), "-o", str(recipe))
    runner.run("run", str(recipe), "--device=cpu")
    ours = [record["loss"] for record in runner.metrics(suite)]
    by_hand = first_loss(tmp_path / MODEL, tmp_path / "rows/train.jsonl", apart=suite == "paddleformers")
    assert ours[0] == pytest.approx(by_hand, rel=1e-6)
    assert len(ours) == 8
    if suite == "llamafactory":
        theirs = json.loads((REFERENCE / "conversions/llamafactory.json").read_text(encoding="utf-8"))
        assert theirs["arguments"] == FILES[suite]
        assert ours == pytest.approx(theirs["losses"], rel=2e-6)
