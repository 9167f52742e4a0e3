"""Words of recipes for meshes of runs with fake quantisation."""

from __future__ import annotations

TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}
SP = {"sequence_parallel": True}
STATIC = "--engine.mode=to_static"
RECOMPUTE = "--engine.recompute=full"
ADAMW = {"optimizer": "adamw"}
