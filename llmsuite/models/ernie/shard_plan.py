"""How an ERNIE-4.5 model is cut for tensor and sequence parallelism: as Llama. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.llama.shard_plan import PLAN as LLAMA

PLAN = LLAMA
