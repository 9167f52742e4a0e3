"""A model in FP8, as DeepSeek-V3 is published: trained on several meshes as in one process, saved, and loaded in little
memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmsuite.checkpoint.model_dir import open_model
from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, run_cases
from tests.support.families import FAMILIES
from tests.support.fp8_model import publish
from tests.tools.fp8_memory import RECIPE

BLOCK = (16, 24)
"""So small that tensor parallel cuts blocks."""
_MESHES = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "ep2": (2, {"expert_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs the cases; what was printed of those that did not end well."""
    family = FAMILIES["deepseek"]
    shape = {"kv_lora_rank": 20, "moe_intermediate_size": 28, "hidden_size": 72, "num_nextn_predict_layers": 1}
    publish(runner.directory / "published", family, family.config_cls(**{**family.smoke, **shape}), BLOCK)
    cases = []
    for name, (ranks, parallel) in _MESHES.items():
        words = [
            *COMMON, *OPTIMIZERS["adamw"], f"--model.weights={runner.directory / 'published'}", "--model.config={}",
            f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", "--train.micro_batch_size=2",
            "--checkpoint.save_steps=1",
            f"--checkpoint.keep_last={STEPS}",
        ]  # fmt: skip
        cases.append(Case(name, ranks, words, recipe=RECIPE))
    return run_cases(runner, cases)


@pytest.mark.parametrize("mesh", ["tp2", "ep2", "pp2"])
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    for name in ("one", mesh):
        assert name not in failed, failed[name]
    assert compare(runner, "one", mesh).problems == []


def test_a_run_is_merged_to_fp8_and_answers(runner: Runner, failed: dict[str, str]) -> None:
    assert failed == {}
    merged = runner.directory / "merged"
    runner.run("merge", str(runner.directory / "pp2"), "-o", str(merged), "--dtype", "fp8")
    published, trained, stored = (
        open_model(runner.directory / path, FAMILIES) for path in ("published", f"pp2/checkpoints/step-{STEPS}", merged)
    )
    assert stored.is_fp8
    assert len(published.carried) > 20
    for name in published.carried:  # what is not trained is as it was
        assert np.array_equal(published.read(name).astype("float32"), trained.read(name)), name
    for name in trained.names:
        a = trained.read(name)
        b = stored.read(name).astype("float32")
        assert np.abs(a - b).max() <= np.abs(a).max() / 16, name
    runner.run("generate", str(merged), "--prompt", "one", "--max_new_tokens", "2")


def test_loading_takes_little_more_than_the_slice(runner: Runner) -> None:
    directory = runner.directory / "memory"
    family = FAMILIES["deepseek"]
    publish(directory / "small", family, family.config_cls(**family.smoke))
    shape = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 32, "num_hidden_layers": 6}
    publish(directory / "model", family, family.config_cls(**{**family.smoke, **shape}))
    for axis in ("tensor", "expert"):
        words = [f'--parallel={{"{axis}_parallel_degree":2}}', "--launch.num_devices=2"]
        code, printed = runner.launch(2, "tests.tools.fp8_memory", str(directory), *words)
        assert code == 0, printed
        for rank in range(2):
            found = json.loads((directory / f"memory-{rank}.json").read_text())
            assert found["model"] > (60 << 20)
            assert found["peak"] < 1.3 * found["model"], (axis, rank, found)
