"""Shard plan of ERNIE-4.5 for tensor and sequence parallelism: that of Llama. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.llama.shard_plan import PLAN as LLAMA

PLAN = LLAMA
