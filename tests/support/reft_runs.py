"""Words of runs that train interventions on hidden states."""

from __future__ import annotations

from tests.parity.lora import case

STEM = "reft"
REFT = ("--lora.rank=null", "--lora.lora_plus_ratio=1", "--reft.rank=4", "--data.packing=best_fit")
# Adam, as clipped plain gradients move too little to see; but it magnifies the last bits of small ones
ALL = {"stage": "sft", "optimizer": "adamw", "run": (*REFT, "--train.learning_rate=0.05")}
# of which the first part of a pipeline has none
SOME = {**ALL, "run": (*REFT, "--reft.layers=[2,3]", "--reft.positions=f5+l5", "--train.learning_rate=0.2")}
CHANGE_LIMIT = 1e-5
ONE_PASS = ("--train.micro_batch_size=8",)
ONES = {
    "all": case("all", words=ONE_PASS, **ALL),  # type: ignore[arg-type]
    "some": case("some", words=ONE_PASS, **SOME),  # type: ignore[arg-type]
}
