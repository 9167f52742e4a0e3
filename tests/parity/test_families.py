"""Every family trains alike on any mesh: DPO of its smoke shape against one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, run_cases

STEPS = 3
COMMON = (
    f"--train.max_steps={STEPS}",
    "--train.optimizer=sgd",
    "--train.max_grad_norm=0.5",
    "--train.warmup_ratio=0",
    "--train.weight_decay=0",
    "--train.adam_beta2=0.999",  # its default, as some recipes have another, which sgd does not read
    "--data.eval=null",
)
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2": ("qwen", ("--model.config.model_type=qwen2",)),
    "qwen3 tied": ("qwen", ("--model.config.tie_word_embeddings=true",)),
    "llama with biases": ("llama", ("--model.config.attention_bias=true", "--model.config.mlp_bias=true")),
    "mixtral": ("mixtral", ()),
    "qwen3 moe": ("qwen_moe", ()),
    "qwen2 moe tied": (
        "qwen_moe",
        ("--model.config.model_type=qwen2_moe", "--model.config.tie_word_embeddings=true"),
    ),
    "qwen hybrid moe": ("qwen_hybrid_moe", ()),
    "qwen hybrid moe 3.5": ("qwen_hybrid_moe", ("--model.config.model_type=qwen3_5_moe_text",)),
    "ernie": ("ernie", ()),
    "ernie with biases": ("ernie", ("--model.config.use_bias=true", "--model.config.tie_word_embeddings=false")),
    "gemma 2": ("gemma", ()),
    "gemma 3": ("gemma", ("--model.preset=gemma-3-1b",)),
    "phi": ("phi", ("--model.config.partial_rotary_factor=0.75", "--model.config.sliding_window=9")),
    "granite": ("granite", ()),
    "smollm3": ("smollm3", ()),
    "olmo": ("olmo", ()),
    "olmo 3": ("olmo", ("--model.preset=olmo-3-7b",)),
    "seed oss": ("seed_oss", ()),
    "hunyuan": ("hunyuan", ()),
    "glm": ("glm", ()),
    "cohere": ("cohere", ()),
    "starcoder": ("starcoder", ()),
    "internlm": ("internlm", ()),
    "ministral": ("ministral", ()),
    "granite moe": ("granite_moe", ()),
    "minimax": ("minimax", ()),
    "gpt oss": ("gpt_oss", ()),
    "glm moe": ("glm_moe", ()),
    "glm moe with norms of heads": ("glm_moe", ("--model.config.use_qk_norm=true",)),
    "ernie moe": ("ernie_moe", ()),
    "ernie moe without shared experts": ("ernie_moe", ("--model.config.moe_num_shared_experts=0",)),
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
_ALL = '{"tensor_parallel_degree":2,"pipeline_parallel_degree":2,"sequence_parallel":true}'
_ALL_FUSED = f'{_ALL[:-1]},"fuse_projections":true}}'
MESHES = {
    "tp2": (2, '{"tensor_parallel_degree":2}', "dynamic"),
    "tp2 fused": (2, '{"tensor_parallel_degree":2,"fuse_projections":true}', "dynamic"),
    "tp2 sequence": (2, '{"tensor_parallel_degree":2,"sequence_parallel":true}', "dynamic"),
    "pp2": (2, '{"pipeline_parallel_degree":2}', "dynamic"),
    "stage3": (2, '{"sharding":"stage3"}', "dynamic"),
    "tp2 compiled": (2, '{"tensor_parallel_degree":2}', "to_static"),
    "all at once": (4, _ALL, "dynamic"),
    "all at once, fused": (4, _ALL_FUSED, "dynamic"),
    "all at once, compiled": (4, _ALL, "to_static"),
}


RATES = {"granite": 0.2, "gpt oss": 0.5}
"""Learning rates of families that learn too little with the one of others."""
EXPERTS = (
    *("mixtral", "qwen_moe", "qwen_hybrid_moe", "glm_moe", "granite_moe", "minimax", "gpt_oss", "ernie_moe"),
    "deepseek",
)
OF_EXPERTS = {
    "ep2": (2, '{"expert_parallel_degree":2}', "dynamic"),
    "ep2 stage3 compiled": (2, '{"expert_parallel_degree":2,"sharding":"stage3"}', "to_static"),
}
UNCUT = ("minimax", "olmo")
"""Families without tensor parallel."""
OFFSET = ("gemma", "qwen_hybrid_moe")
"""Families whose norms multiply by 1 + weight."""
LINEAR = ("qwen_hybrid_moe",)
"""Families with linear attention, which is not compiled with tensor parallel."""


def _meshes(package: str) -> list[str]:
    """Names of the meshes of a family."""
    if package in UNCUT:
        return [name for name, (_, parallel, _) in MESHES.items() if "tensor" not in parallel]
    if package in LINEAR:
        eager = [name for name, (*_, mode) in MESHES.items() if mode == "dynamic"]
        return [*eager, *OF_EXPERTS]
    return [*MESHES, *(OF_EXPERTS if package in EXPERTS else ())]


POINTS = [(family, mesh) for family, (package, _) in FAMILIES.items() for mesh in _meshes(package)]


def _cases(family: str) -> list[Case]:
    """In one process, and on every mesh."""
    package, more = FAMILIES[family]
    recipe = f"recipes/{package}/dpo.json"
    words = [*COMMON, f"--train.learning_rate={RATES.get(family, 0.05)}", *more]
    one = Case(f"{family}-one", 1, ["--launch.num_devices=1", "--parallel={}", *words], recipe=recipe)
    meshes = [
        Case(
            f"{family}-{name}",
            ranks,
            [f"--launch.num_devices={ranks}", f"--parallel={parallel}", f"--engine.mode={mode}", *words],
            recipe=recipe,
        )
        for name, (ranks, parallel, mode) in {**MESHES, **OF_EXPERTS}.items()
        if (family, name) in POINTS
    ]
    return [one, *meshes]


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all of them; what was printed of those that did not end well."""
    return run_cases(runner, [case for family in FAMILIES for case in _cases(family)])


@pytest.mark.parametrize(("family", "mesh"), POINTS)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], family: str, mesh: str) -> None:
    one = f"{family}-one"
    many = f"{family}-{mesh}"
    assert one not in failed, failed[one]
    assert many not in failed, failed[many]
    expected = runner.metrics(one)
    found = runner.metrics(many)
    assert len(expected) == len(found) == STEPS
    assert expected[-1]["loss"] < 0.99 * expected[0]["loss"], "nothing was learnt, so nothing was compared"
    for a, b in zip(expected, found):
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    ours = runner.weights(one, STEPS)
    theirs = runner.weights(many, STEPS)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # biases and sinks start at zero, and some of their gradients are rounding alone: those of keys without
        # rotation; gains of norms that multiply by 1 + weight start at zero too
        starts_at_zero = name.endswith(("bias", "sinks")) or (
            FAMILIES[family][0] in OFFSET and name.endswith("norm.weight")
        )
        floor = 1e-8 * value.size**0.5 if starts_at_zero else 0.0
        assert np.linalg.norm(theirs[name] - value) <= 1e-6 * np.linalg.norm(value) + floor, name
