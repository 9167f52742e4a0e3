"""Rules of what a stage learns, with which adapters or rounding, and how it is evaluated."""

from __future__ import annotations

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _no_evaluation(asked: RuleContext) -> Violation:
    # a stage that has a key `split` takes what it evaluates on from data.train
    split = getattr(getattr(asked.recipe, asked.recipe.stage, None), "split", None)
    if asked.recipe.checkpoint.best_metric and not asked.recipe.data.eval and not split:
        yield "checkpoint.best_metric", "is a metric of the evaluation; set data.eval, or remove it"


def _nothing_to_go_back_to(asked: RuleContext) -> Violation:
    if asked.recipe.train.may_roll_back and asked.recipe.checkpoint.save_steps is None:
        key = "on_nonfinite" if asked.recipe.train.on_nonfinite == "roll_back" else "on_spike"
        yield f"train.{key}", "is roll_back, which needs checkpoints: set checkpoint.save_steps, or choose skip"


def _nothing_to_switch_off(asked: RuleContext) -> Violation:
    stage = asked.recipe.stage
    reference = getattr(getattr(asked.recipe, stage, None), "reference", None)
    if reference == "adapter_off" and asked.recipe.lora.rank is None:
        yield f"{stage}.reference", "is adapter_off, which takes an adapter; set lora.rank, or set it to cache"


def _nothing_to_train(asked: RuleContext) -> Violation:
    if asked.stage.adapters and asked.recipe.lora.rank is None:
        yield "lora.rank", f"is null, but stage {asked.recipe.stage} trains adapters only; set it to 8, for one"


def _rounded_adapters(asked: RuleContext) -> Violation:
    if asked.recipe.qat.weight_bits is not None and asked.recipe.lora.rank is not None:
        message = "is 8, but lora.rank trains adapters of a model that stays as it is; set one of the two to null"
        yield "qat.weight_bits", message


def _not_rounded(asked: RuleContext) -> Violation:
    if asked.recipe.qat.weight_bits is not None and not asked.stage.quantises and not asked.stage.adapters:
        message = (
            f"is 8, which the stage {asked.recipe.stage} does not go with; use it with pretrain or sft, or set null"
        )
        yield "qat.weight_bits", message


def _observed_in_a_program(asked: RuleContext) -> Violation:
    if asked.recipe.qat.activation_bits is not None and asked.recipe.engine.mode == "to_static":
        yield (
            "qat.activation_bits",
            "is 8, but what to_static compiles cannot tell how large inputs were; set it to null, or engine.mode to "
            "dynamic",
        )


def _not_one_group(asked: RuleContext) -> Violation:
    degree, key = asked.recipe.parallel.tensor_parallel_degree, "launch.num_devices"
    if not asked.stage.trains and asked.num_devices != degree:
        yield key, f"makes {asked.num_devices} ranks; stage {asked.recipe.stage} uses tensor parallel degree = {degree}"


def _no_metrics(asked: RuleContext) -> Violation:
    if asked.recipe.loggers:
        yield "loggers", f"stage {asked.recipe.stage} has no metrics to log; remove it"


STAGE_RULES = (
    Rule(
        "`roll_back` without `save_steps`",
        "there is no checkpoint to go back to",
        ("--train.on_nonfinite=roll_back", "--checkpoint.save_steps=null"),
        _nothing_to_go_back_to,
    ),
    Rule(
        "`best_metric` without evaluation",
        "there is no value to compare",
        ("--data.eval=null", "--checkpoint.best_metric=eval/loss"),
        _no_evaluation,
    ),
    Rule(
        "a reference by `adapter_off` without an adapter",
        "the reference would be what is trained",
        ("--dpo.reference=adapter_off",),
        _nothing_to_switch_off,
    ),
    Rule(
        "stage `lora` without `lora.rank`",
        "nothing would be trained",
        (),
        _nothing_to_train,
    ),
    Rule(
        "`qat` with adapters",
        "the rounded weights would not be those that are trained",
        (),
        _rounded_adapters,
    ),
    Rule(
        "`qat` with another stage than `pretrain` and `sft`",
        "it is tested with those",
        ("--qat.weight_bits=8",),
        _not_rounded,
    ),
    Rule(
        "`qat.activation_bits` with `to_static`",
        "inputs are observed between operations",
        (),
        _observed_in_a_program,
    ),
)
"""Between sections and the stage."""

UNTRAINED_STAGE_RULES = (
    Rule(
        "a stage that does not train with other ranks than the tensor parallel ones",
        "they would have nothing to do",
        (),
        _not_one_group,
    ),
    Rule("loggers with a stage that does not train", "there are no metrics", (), _no_metrics),
)
"""Of a stage that does not train."""
