"""How a Qwen model is cut for tensor and sequence parallelism: as Llama, but that only queries, keys and values have
biases. Imports no Paddle."""

from __future__ import annotations

import dataclasses

from llmsuite.models.llama.shard_plan import PLAN as LLAMA

PLAN = dataclasses.replace(
    LLAMA,
    cut=tuple(cut for cut in LLAMA.cut if not (".mlp." in cut[0] and cut[0].endswith(".bias"))),
)
