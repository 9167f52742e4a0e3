"""A run of a recipe made of another suite's file has the losses that the suite's own script had with it.

tests/reference/make_trl_runs.py has run TRL's scripts and written their losses, make_suite_runs.py LLaMA-Factory's
command, make_swift_runs.py those of ms-swift. The first loss of `megatron`, Axolotl and PaddleFormers is computed by
hand, of the tokens that their templates teach.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.reference import make_swift_runs
from tests.reference.loss_by_hand import first_loss
from tests.reference.make_suite_runs import FILES, MODEL, write_inputs
from tests.reference.make_trl_runs import COUNT, ROWS
from tests.reference.tiny_llama_files import write_model, write_rows
from tests.support.paths import REFERENCE, ROOT

SWIFT: dict[str, Any] = json.loads((REFERENCE / "conversions/swift.json").read_text(encoding="utf-8"))
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
    words = ("--leave_out", "train_dataset_type") if suite == "paddleformers" else ()  # the rows have no tools
    runner.run("recipe", action, str(file), "-o", str(recipe), *words)
    runner.run("run", str(recipe), "--device=cpu", "--model.preset=null")  # the name is that of a larger model
    ours = [record["loss"] for record in runner.metrics(suite)]
    by_hand = first_loss(tmp_path / MODEL, tmp_path / "rows/train.jsonl", apart=suite == "paddleformers")
    assert ours[0] == pytest.approx(by_hand, rel=1e-6)
    assert len(ours) == 8
    if suite == "llamafactory":
        theirs = json.loads((REFERENCE / "conversions/llamafactory.json").read_text(encoding="utf-8"))
        assert theirs["arguments"] == FILES[suite]
        assert ours == pytest.approx(theirs["losses"], rel=2e-6)


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_losses_of_swift(command: str, runner: Runner, tmp_path: Path) -> None:
    """Rows are conversations, and pairs in the form of ms-swift's own documentation."""
    job = SWIFT[command]
    assert job["arguments"] == make_swift_runs.JOBS[command]
    make_swift_runs.write_inputs(tmp_path)
    name = f"{command}-of-swift"
    places = {
        "model": str(tmp_path / make_swift_runs.MODEL),
        "dataset": [str(tmp_path / rows) for rows in job["arguments"]["dataset"]],
        "output_dir": str(runner.directory / name),
    }
    file = tmp_path / f"{command}.yaml"
    recipe = tmp_path / "recipe.json"
    file.write_text(json.dumps({**job["arguments"], **places}), encoding="utf-8")
    runner.run("recipe", "from-swift", str(file), "-o", str(recipe))
    runner.run("run", str(recipe), "--device=cpu", "--model.preset=null")  # the name is that of a larger model
    ours = [record["loss"] for record in runner.metrics(name)]
    assert ours == pytest.approx(job["losses"], rel=2e-6)
    assert ours[-1] < ours[0] - 0.1  # it is a run in which something is learnt


def test_dpo_of_swift_starts(runner: Runner, tmp_path: Path) -> None:
    """In the first step the model is the reference, so each pair has the loss ln 2."""
    write_inputs(tmp_path)
    pairs = [{"question": f"Say {i}.", "answer_zh": f"{i} 😀", "answer_en": f"{i}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    values = {
        **FILES["swift"], "command": "swift rlhf", "rlhf_type": "dpo", "model": str(tmp_path / MODEL),
        "dataset": "hjh0119/shareAI-Llama3-DPO-zh-en-emoji", "max_steps": 3, "gradient_accumulation_steps": 4,
        "save_steps": 3, "output_dir": str(runner.directory / "dpo-swift"),
    }  # fmt: skip
    file = tmp_path / "dpo.yaml"
    recipe = tmp_path / "recipe.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    runner.run("recipe", "from-swift", str(file), "-o", str(recipe))
    # rows as those of the data set; the name of the model is that of a larger one
    runner.run("run", str(recipe), f"--data.train={tmp_path / 'pairs.jsonl'}", "--device=cpu", "--model.preset=null")
    ours = [record["loss"] for record in runner.metrics("dpo-swift")]
    assert ours[0] == pytest.approx(math.log(2), rel=1e-6)
    assert ours[-1] < ours[0] - 0.01


@pytest.mark.parametrize("suite", ["swift", "trl"])
def test_grpo_starts(suite: str, runner: Runner, tmp_path: Path) -> None:
    """In the first step all ratios are 1 and the advantages of a group sum to 0, so the loss is 0, whatever the
    rewards; with as many tokens in each completion, as truncated ones have, also with TRL's mean over tokens."""
    write_inputs(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}], "solution": f"${i}$"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {
        "num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-3, "bf16": False, "fp16": False,
        "output_dir": str(runner.directory / f"grpo-{suite}"), "logging_steps": 1, "report_to": "none",
    }  # fmt: skip
    files = {
        "swift": {
            "command": "swift rlhf", "rlhf_type": "grpo", "model": str(tmp_path / MODEL), "tuner_type": "full",
            "dataset": str(tmp_path / "prompts.jsonl"), "torch_dtype": "float32", "max_length": 64,
            "reward_funcs": ["accuracy", "format"],
        },
        "trl": {
            "model_name_or_path": str(tmp_path / MODEL), "dataset_name": str(tmp_path / "prompts.jsonl"),
            "reward_funcs": ["accuracy_reward", "think_format_reward"], "vllm_max_model_length": 128,
        },
    }  # fmt: skip
    file = tmp_path / "grpo.yaml"
    recipe = tmp_path / "recipe.json"
    file.write_text(json.dumps({**files[suite], **common}), encoding="utf-8")
    runner.run("recipe", f"from-{suite}", str(file), "-o", str(recipe))
    runner.run("run", str(recipe), "--device=cpu", "--model.preset=null")  # the name is that of a larger model
    first = runner.metrics(f"grpo-{suite}")[0]
    assert first["loss"] == pytest.approx(0.0, abs=1e-5)
    names = {"swift": ("swift_accuracy", "swift_format"), "trl": ("trl_accuracy", "trl_think_format")}[suite]
    assert {f"rewards/{name}" for name in names} <= {key for key in first if first[key] is not None}
