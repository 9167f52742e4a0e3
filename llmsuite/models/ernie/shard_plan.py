"""How an ERNIE-4.5 model is cut for tensor and sequence parallelism: as Llama. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.ernie.config import ErnieConfig
from llmsuite.models.llama.shard_plan import PLAN as LLAMA
from llmsuite.models.shard_plan import indivisible


def _problems(config: ErnieConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    return indivisible(sizes, tp)


PLAN = dataclasses.replace(LLAMA, problems=_problems)
