"""A vocabulary that tensor parallel does not divide is padded, and nobody sees it: as in one process, everywhere."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, RECIPES, STATE_LIMIT, STEPS, Case, compare, run_cases

SIZE = 513
ROUNDING_ALONE = "self_attn.k_proj.bias"
"""It moves every score of a query alike, so its gradient is zero, but for rounding."""
MESHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt one": (1, "gpt", {}),
    "gpt tp2 pp2": (4, "gpt", {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": True}),
    "llama one": (1, "llama", {}),
    "llama tp2 stage3": (4, "llama", {"tensor_parallel_degree": 2, "sharding": "stage3"}),
}


def case(name: str, mesh: str, resume: bool = False) -> Case:
    ranks, family, parallel = MESHES[mesh]
    words = [
        *COMMON, *OPTIMIZERS["adamw"], f"--model.family={family}", f"--model.config.vocab_size={SIZE}",
        f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", "--train.micro_batch_size=2",
        "--engine.recompute=none", "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}",
    ]  # fmt: skip
    return Case(name, ranks, words, recipe=RECIPES["tokens"], resume=resume)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [case(name, name) for name in MESHES])
    for source in ("llama one", "llama tp2 stage3"):
        if source not in failed:
            step = "checkpoints/step-1"
            shutil.copytree(runner.directory / source / step, runner.directory / f"{source} resumed" / step)
    others = {"llama one": "llama tp2 stage3", "llama tp2 stage3": "llama one"}
    return failed | run_cases(runner, [case(f"{name} resumed", other, resume=True) for name, other in others.items()])


@pytest.mark.parametrize("mesh", [name for name in MESHES if not name.endswith(" one")])
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    one = f"{mesh.split()[0]} one"
    for name in (one, mesh):
        assert name not in failed, failed[name]
    problems = [*compare(runner, one, mesh).problems]
    problems += compare(runner, one, mesh, stem="optimizer", limit=STATE_LIMIT).problems
    assert [problem for problem in problems if ROUNDING_ALONE not in problem] == []
    shapes = {
        value.shape for name, value in runner.weights(mesh, STEPS).items() if "wte" in name or "embed_tok" in name
    }
    assert {shape[0] for shape in shapes} == {SIZE}


@pytest.mark.parametrize("source", ["llama one", "llama tp2 stage3"])
def test_checkpoints_are_of_no_mesh(runner: Runner, failed: dict[str, str], source: str) -> None:
    name = f"{source} resumed"
    assert name not in failed, failed[name]
    for a, b in zip(runner.metrics("llama one")[1:], runner.metrics(name), strict=True):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-6)


def test_two_ranks_answer_as_one(runner: Runner, failed: dict[str, str]) -> None:
    assert failed == {}
    found = []
    for count in (1, 2):
        target = runner.directory / f"answers-{count}.json"
        words = ["--max_new_tokens=20", "--temperature=2", "--num_return_sequences=6", "--seed=1", "--logprobs=3"]
        words += ["--prompt=one", "--output", str(target), "--num_devices", str(count)]
        runner.run("generate", str(runner.directory / "gpt tp2 pp2"), *words)
        found.append(json.loads(target.read_text().splitlines()[0])["answers"])
    assert [answer["ids"] for answer in found[0]] == [answer["ids"] for answer in found[1]]
    ids = [token for answer in found[1] for token in answer["ids"]]
    assert len(ids) >= 20
    assert max(ids) < SIZE
