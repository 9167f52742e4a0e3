"""Shard plan of Qwen for tensor and sequence parallelism: that of Llama, with biases of queries, keys and values only.
Imports no Paddle."""

from __future__ import annotations

import dataclasses

from llmsuite.models.llama.shard_plan import PLAN as LLAMA

PLAN = dataclasses.replace(
    LLAMA,
    shard_dims=tuple(entry for entry in LLAMA.shard_dims if not (".mlp." in entry[0] and entry[0].endswith(".bias"))),
)
