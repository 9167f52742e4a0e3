"""Words of runs that train prefixes."""

from __future__ import annotations

from tests.parity.cases import GRADIENT_LIMIT

PREFIX = ("--lora.rank=null", "--lora.lora_plus_ratio=1", "--prefix.tokens=6", "--data.packing=best_fit")
RUN = {"stage": "sft", "run": (*PREFIX, "--train.learning_rate=10", "--train.max_grad_norm=null")}
NETWORK_WORDS = "--prefix.projection=true", "--prefix.projection_hidden_size=12"
NETWORK = {**RUN, "run": (*RUN["run"], *NETWORK_WORDS, "--train.learning_rate=2")}
"""The same prefixes, made by a network, at a rate that magnifies rounding less."""
NETWORK_STEM = "adapter_state"
CHANGE_LIMIT = GRADIENT_LIMIT
"""What has changed is made of three gradients, and so as far off as they are."""
ONE_PASS = ("--train.micro_batch_size=8",)
