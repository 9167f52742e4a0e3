"""Every family trains alike on any mesh: DPO of its smoke shape against one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multi.conftest import Runner

STEPS = 3
COMMON = (
    f"--train.max_steps={STEPS}",
    "--train.optimizer=sgd",
    "--train.learning_rate=0.05",
    "--train.max_grad_norm=0.5",
    "--train.warmup_ratio=0",
    "--train.weight_decay=0",
    "--data.eval=null",
)
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2": ("qwen", ("--model.config.model_type=qwen2",)),
    "qwen3 tied": ("qwen", ("--model.config.tie_word_embeddings=true",)),
    "gpt": ("gpt", ()),
    "deepseek v3": ("deepseek", ()),
    "deepseek v2": (
        "deepseek",
        (
            "--model.config.model_type=deepseek_v2",
            "--model.config.topk_method=group_limited_greedy",
            "--model.config.norm_topk_prob=false",
            "--model.config.q_lora_rank=null",
        ),
    ),
}
MESHES = {
    "tp2": (2, '{"tensor_parallel_degree":2}'),
    "tp2 sequence": (2, '{"tensor_parallel_degree":2,"sequence_parallel":true}'),
    "pp2": (2, '{"pipeline_parallel_degree":2}'),
    "all at once": (
        4,
        '{"tensor_parallel_degree":2,"pipeline_parallel_degree":2,"sequence_parallel":true}',
    ),
}


def _run(runner: Runner, name: str, family: str, ranks: int, parallel: str) -> None:
    package, more = FAMILIES[family]
    where = (f"--launch.num_devices={ranks}", f"--parallel={parallel}", f"--output_dir={runner.directory / name}")
    words = ["run", f"recipes/{package}/dpo.json", "--smoke", *where, *COMMON, *more]
    # a cache of its own: what the ranks compute before the first step is compared too
    runner.run(*words, LLMSUITE_CACHE=str(runner.directory / f"cache-{name}"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, runner: Runner) -> str:
    """Also runs it in one process, as `FAMILY-one`."""
    name = str(request.param)
    _run(runner, f"{name}-one", name, 1, "{}")
    return name


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_equals_one_process(runner: Runner, family: str, mesh: str) -> None:
    one, many = f"{family}-one", f"{family}-{mesh}"
    _run(runner, many, family, *MESHES[mesh])
    expected, found = runner.metrics(one), runner.metrics(many)
    assert len(expected) == len(found) == STEPS
    assert expected[-1]["loss"] < 0.99 * expected[0]["loss"], "nothing was learnt, so nothing was compared"
    for a, b in zip(expected, found):
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    ours, theirs = runner.weights(one, STEPS), runner.weights(many, STEPS)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # biases start at zero, and some of their gradients are rounding alone: those of keys without rotation
        floor = 1e-8 * value.size**0.5 if name.endswith("bias") else 0.0
        assert np.linalg.norm(theirs[name] - value) <= 1e-6 * np.linalg.norm(value) + floor, name
