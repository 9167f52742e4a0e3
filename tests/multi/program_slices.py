"""A rank of two whose parameters a whole-step program cuts as sharding stage 3 does; `test_programs` starts it."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

SIZE = 256
LAYERS = 3
BYTES = LAYERS * SIZE * SIZE * 4
"""Of the parameters of the whole model."""


def main(directory: str, num_frozen: str) -> int:
    """Take three steps with AdamW; `RANK.json` in the directory says how many bytes more are alive after each than
    before the model was made. So many of its layers are frozen, as the base of adapters is."""
    import numpy as np
    import paddle
    from paddle import nn
    from paddle.base import core

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.models.shard_plan import ShardPlan
    from llmsuite.parallel import collective
    from llmsuite.parallel.program.layout import MeshLayout
    from llmsuite.parallel.program.optimizer import ProgramOptimizer, ZeroGroup
    from llmsuite.parallel.program.programs import StepPrograms
    from llmsuite.parallel.program.slices import SlicedShard
    from llmsuite.parallel.sharding import ShardOptions
    from llmsuite.parallel.zero3 import Zero3Hooks, hook_program_gathering
    from tests.support.step_programs import ADAMW

    def alive() -> int:
        """The least of a second: the executor's threads free what a step made after its end."""
        gc.collect()
        counts = []
        for _ in range(10):
            counts.append(int(core.host_memory_stat_current_value("Allocated", 0)))
            time.sleep(0.1)
        return min(counts)

    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LayerList([nn.Linear(SIZE, SIZE, bias_attr=False) for _ in range(LAYERS)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = paddle.tanh(layer(x))
            return x

    def loss(model: Any, inputs: Any) -> dict[str, Any]:
        return {"loss": (model(inputs["x"]).square().sum(-1) * inputs["weights"]).sum()}

    mesh = collective.start(Degrees(1, 1, 2, 1))
    before = alive()
    model = Model()
    shards = []
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.stop_gradient = number < int(num_frozen)
        shards.append(SlicedShard(name, parameter, mesh, None, ShardOptions(is_frozen=parameter.stop_gradient)))
    plan = ShardPlan(
        shard_dims=(),
        embedding="none",
        tp_regions=(),
        layers="layers",
        first=(),
        last=(),
        last_norm="none",
        problems=lambda config, tp: iter(()),
    )
    Zero3Hooks(model, plan, shards, is_tied=False, ahead=False)
    hook_program_gathering(model, plan, is_tied=False)
    trained = shards[int(num_frozen) :]
    optimizer = ProgramOptimizer(trained, ADAMW, 4, ZeroGroup(2, mesh.data_rank, mesh.data_group))
    ranks = np.array([[0], [1]])
    slices = {shard.name: shard for shard in shards}
    programs = StepPrograms(MeshLayout(model, ranks, slices), optimizer, loss)
    kept = []
    for step in (1, 2, 3):
        x = np.random.default_rng([step, mesh.rank]).standard_normal([2, SIZE]).astype("float32")
        programs.run(step, {"x": x, "weights": np.full([2], 0.25, "float32")}, 1)
        kept.append(alive() - before)
    (Path(directory) / f"{os.environ['PADDLE_TRAINER_ID']}.json").write_text(json.dumps(kept))
    return 0
