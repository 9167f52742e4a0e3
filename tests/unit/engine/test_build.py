"""Models that are refused when they are built."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.engine.build import check_stages
from llmsuite.parallel.program.pipeline import Pipeline
from tests.support.tiny_llama import FAMILY

FIRST = "model.layers.0.mlp.up_proj.lora_A"
LAST = "model.layers.2.self_attn.q_proj.lora_B"


def test_programs_of_a_pipeline_train_on_each_stage() -> None:
    assert FAMILY.shard_plan is not None
    pipeline = Pipeline(None, FAMILY.shard_plan, [0, 1, 3], 2, False, "1F1B", 0)
    check_stages(pipeline, [FIRST, LAST])
    check_stages(pipeline, [FIRST, "score.weight"])
    with pytest.raises(UserError, match=r"has no matrix of pipeline stage 1, .* add one of layers 1 to 2, or"):
        check_stages(pipeline, [FIRST])
    with pytest.raises(UserError, match=r"has no matrix of pipeline stage 0, .* add one of layers 0 to 0, or"):
        check_stages(pipeline, [LAST, "lm_head.lora_A"])
    with pytest.raises(UserError, match=r"^reft.layers: has no layer of pipeline stage 1, .* add one of layers 1 to 2"):
        check_stages(pipeline, ["model.layers.0.reft.reft_bias"], edits=True)
