"""Our additions to programs on a rank of a pipeline; Paddle's part, on several ranks, is tested in `tests/multi`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.pipeline import Pipeline
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.recompute import recompute_layers
from tests.support import alone, many
from tests.support.families import FAMILIES
from tests.support.program_batches import random_batch
from tests.support.program_loss import program_loss
from tests.support.step_programs import ADAMW, SGD
from tests.support.tiny_llama import CONFIG, FAMILY, values

NUM_LAYERS = CONFIG.num_hidden_layers
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
EMBEDDING = "model.embed_tokens.weight"


def _llama(config: Any) -> Any:
    model = FAMILY.factory()(config, CpuBackend().ops("fp32"))
    for name, parameter in model.named_parameters():
        parameter.set_value(values(config)[name])
    return model


def _pipeline(
    model: Any, bounds: list[int], stage: int = 0, is_tied: bool = False, num_stages: int | None = None
) -> Pipeline:
    assert FAMILY.shard_plan is not None
    return Pipeline(model, FAMILY.shard_plan, bounds, num_stages or len(bounds) - 1, is_tied, "1F1B", stage)


@pytest.mark.parametrize(("schedule", "train"), [("1F1B", SGD), ("FThenB", ADAMW)])
def test_micro_batches_are_added_up(schedule: Any, train: Any) -> None:
    """Paddle's pipelines alone average, after a clip that got the sum. With one stage nothing is sent."""
    found = []
    for is_pipeline in (False, True):
        model = _llama(CONFIG)
        pipeline = dataclasses.replace(_pipeline(model, [0, NUM_LAYERS]), schedule=schedule) if is_pipeline else None
        optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), train, 4)
        programs = StepPrograms(MeshLayout(model, pipeline=pipeline), optimizer, program_loss)
        outputs = [programs.run(step, random_batch(with_documents=True), 2) for step in (1, 2)]
        found.append((outputs, {name: value.numpy() for name, value in model.named_parameters()}))
    (expected, whole), (outputs, parameters) = found
    assert expected[0]["grad_norm"] > 0.3, "the limit, else nothing is clipped"
    for step in range(2):
        assert outputs[step] == pytest.approx(expected[step], rel=1e-6)
    for name, value in whole.items():
        assert parameters[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_stacks_of_experts_that_data_ranks_share_out() -> None:
    """They are cut by experts, before tensor parallel cuts them, and in no slices."""
    spec = FAMILIES["qwen_moe"]
    assert spec.shard_plan is not None
    with paddle.LazyGuard():
        model = spec.factory()(spec.config_cls(**spec.smoke), CpuBackend().ops("fp32"))
    pipeline = Pipeline(model, spec.shard_plan, [0, 2, 4], 2, False, "1F1B", 0, num_slices=4, ep_size=2)
    name = "model.layers.3.mlp.experts.up_proj.weight"
    parameter = dict(model.named_parameters())[name]
    shape = parameter.shape
    dtype = parameter.dtype
    assert name in pipeline.expert_parallel
    assert all(".experts." in shared for shared in pipeline.expert_parallel)
    part, placements, dim = pipeline.placeholder(name, shape, dtype, 2)
    assert (part.shape, placements, dim) == ([shape[0] // 4, *shape[1:]], [dist.Shard(0)], None)
    assert dataclasses.replace(pipeline, ep_size=1).expert_parallel == frozenset()


def test_layers_are_computed_again() -> None:
    model = _llama(CONFIG)
    assert FAMILY.shard_plan is not None
    recompute_layers(model, FAMILY.shard_plan, 1)
    optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), SGD, 4)
    pipeline = _pipeline(model, [0, NUM_LAYERS])
    programs = StepPrograms(
        MeshLayout(model, pipeline=pipeline), optimizer, program_loss, options=Options(recompute=True)
    )
    programs.run(1, random_batch(with_documents=False), 2)
    made = programs.operations()
    assert made["custom_op.llmsuite_attention"] == 2 * made["custom_op.llmsuite_attention_grad"] == 2 * NUM_LAYERS


def test_stages_of_parameters() -> None:
    with paddle.LazyGuard():
        pipeline = _pipeline(FAMILY.factory()(CONFIG, CpuBackend().ops("fp32")), [0, 1, NUM_LAYERS])
    parameters = dict(pipeline.model.named_parameters())
    stages = {name: pipeline.stage_of(name) for name in parameters}
    assert stages[EMBEDDING] == stages["model.layers.0.mlp.up_proj.weight"] == 0
    assert stages["model.layers.1.mlp.up_proj.weight"] == stages["model.norm.weight"] == stages["lm_head.weight"] == 1
    name = "model.layers.1.mlp.up_proj.weight"
    dtype = paddle.float32
    wide = CONFIG.intermediate_size
    for tp, size, placements in ((1, wide, [dist.Replicate()]), (2, wide // 2, [dist.Shard(1)])):
        part, found, dim = pipeline.placeholder(name, parameters[name].shape, dtype, tp)
        assert (part.shape, found, dim) == ([CONFIG.hidden_size, size], placements, None)
        sliced = dataclasses.replace(pipeline, num_slices=2)
        part, found, dim = sliced.placeholder(name, parameters[name].shape, dtype, tp)
        assert (part.shape, found, dim) == ([CONFIG.hidden_size // 2, size], placements, 0)
    copied = dataclasses.replace(sliced, shares_embedding=True)
    dims = [each.placeholder(EMBEDDING, parameters[EMBEDDING].shape, dtype, 1)[2] for each in (sliced, copied)]
    assert dims == [1, None], "its rows are odd"
    assert not parameters[name]._is_initialized()


def test_chunks_of_a_stage() -> None:
    """Part p of the layers is on stage p % stages, and Paddle is configured for that."""
    deep = dataclasses.replace(CONFIG, num_hidden_layers=5)
    with paddle.LazyGuard():
        model = FAMILY.factory()(deep, CpuBackend().ops("fp32"))
    pipeline = dataclasses.replace(_pipeline(model, [0, 2, 3, 4, 5], num_stages=2), schedule="interleaved")
    stages = [pipeline.stage_of(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(5)]
    assert stages == [0, 0, 1, 0, 1]
    assert (pipeline.stage_of("lm_head.weight"), pipeline.num_chunks) == (1, 2)
    strategy = dist.Strategy()
    pipeline.configure(strategy, 4)
    found = strategy.pipeline
    assert (found.schedule_mode, found.accumulate_steps, found.pp_degree, found.vpp_degree) == ("VPP", 4, 2, 2)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tied_embedding_is_the_same_at_both_ends(stages: int) -> None:
    """The first stage updates it; evaluations of the last one use a copy. In the middle there is none."""

    def work(mesh: Mesh) -> tuple[Any, Any]:
        with paddle.LazyGuard():
            whole = FAMILY.factory()(TIED, CpuBackend().ops("fp32"))
        stage = mesh.coordinate["pp"]
        own = {"model.norm.weight": paddle.full([2], float(stage))}
        if stage in (0, stages - 1):
            own[EMBEDDING] = paddle.full([3, 2], float(stage))
        pipeline = _pipeline(whole, [0, 1, NUM_LAYERS] if stages == 2 else [0, 1, 2, 3], stage, is_tied=True)
        pipeline.update_copies(own)
        outputs = pipeline.broadcast_from_last(np.array([1.5, -2.0]) if stage == stages - 1 else None, 2)
        return {name: value.numpy().tolist() for name, value in own.items()}, outputs.tolist()

    found = many.run(Degrees(stages, 1, 1, 1), work)
    (first, _), (last, _) = found[0], found[-1]
    assert first[EMBEDDING] == last[EMBEDDING] == [[0, 0]] * 3
    assert [own["model.norm.weight"] for own, _ in found] == [[float(stage)] * 2 for stage in range(stages)]
    assert [outputs for _, outputs in found] == [[1.5, -2.0]] * stages
