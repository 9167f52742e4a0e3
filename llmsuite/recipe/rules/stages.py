"""Rules about stages: their adapters, quantisation, evaluation and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmsuite.errors import UserError
from llmsuite.models.targets import (
    expert_modules,
    factor_shapes,
    has_own_head,
    linear_modules,
    matches,
    quantised_modules,
)
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _no_evaluation(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.checkpoint.best_metric and not context.evaluates:
        yield "checkpoint.best_metric", "is a metric of the evaluation; set data.eval, or remove it"


def _nothing_to_evaluate(context: RuleContext) -> Iterator[Violation]:
    if ("data", "eval") in context.given:
        return  # null, where it is nothing: that turns the evaluation off
    if (steps := context.recipe.train.eval_steps) is not None and not context.evaluates:
        yield "train.eval_steps", f"is {steps}, and there is nothing to evaluate on; set data.eval, or remove it"


def _nothing_to_pack(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.data.packing != "none" and context.stage.packs is False:
        why = f"is {context.recipe.data.packing}; the samples of stage {context.recipe.stage} are not packed"
        yield "data.packing", f"{why}; remove it"


def _mixed_elsewhere(context: RuleContext) -> Iterator[Violation]:
    stage = context.recipe.stage
    if context.recipe.data.mix and hasattr(getattr(context.recipe, stage, None), "mix"):
        yield "data.mix", f"has no effect in stage {stage}, whose files are mixed by {stage}.mix; name them there"


def _nothing_to_go_back_to(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.train.may_roll_back and context.recipe.checkpoint.save_steps is None:
        key = "on_nonfinite" if context.recipe.train.on_nonfinite == "roll_back" else "on_spike"
        yield f"train.{key}", "is roll_back, which needs checkpoints: set checkpoint.save_steps, or choose skip"


def _nothing_to_switch_off(context: RuleContext) -> Iterator[Violation]:
    stage = context.recipe.stage
    reference = getattr(getattr(context.recipe, stage, None), "reference", None)
    if reference == "adapter_off" and context.recipe.lora.rank is None:
        other = "copy" if context.stage.profile(getattr(context.recipe, stage)).updates else "cache"
        yield f"{stage}.reference", f"is adapter_off, which needs adapters; set lora.rank, or set it to {other}"


def _nothing_to_train(context: RuleContext) -> Iterator[Violation]:
    if context.stage.adapters and not context.recipe.freezes_model:
        yield "lora.rank", f"is null, but stage {context.recipe.stage} trains adapters only; set it to 8, for one"


def _quantised_adapters(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.qat.weight_bits is not None and context.recipe.lora.rank is not None:
        message = "is 8, but lora.rank trains adapters and freezes the model; set one of the two to null"
        yield "qat.weight_bits", message


def _no_further_tokens(context: RuleContext) -> Iterator[Violation]:
    weight, key = context.recipe.train.mtp_loss_weight, "train.mtp_loss_weight"
    if not weight:
        return
    layers = getattr(context.config, "num_nextn_predict_layers", 0)
    if not context.stage.predicts_further:
        yield key, f"is {weight}; the loss of stage {context.recipe.stage} predicts no further tokens; set it to 0"
    elif context.config is not None and layers != 1:
        has = (
            f"num_nextn_predict_layers is {layers}" if layers else "the model has no layer that predicts further tokens"
        )
        yield key, f"is {weight}, but {has}; one such layer can be trained (DeepSeek-V3); set it to 0"
    lora, embedding = context.recipe.lora, context.shard_plan.embedding
    patterns = lora.target_modules or () if lora.rank is not None else ()
    if found := [pattern for pattern in patterns if matches(embedding, pattern)]:
        yield (
            "lora.target_modules",
            f"{found[0]!r} matches the embedding ({embedding}), which the layer that predicts further tokens reads at "
            f"the other end of the model ({key} is {weight}); an adapter is for one end: name others, such as "
            "self_attn.*, or set the weight to 0",
        )


def _not_quantised(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.qat.weight_bits is not None and not context.stage.quantises and not context.stage.adapters:
        message = f"is 8, which stage {context.recipe.stage} does not support; use pretrain or sft, or set it to null"
        yield "qat.weight_bits", message


def _observed_in_a_program(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.qat.activation_bits is not None and context.recipe.engine.mode == "to_static":
        yield (
            "qat.activation_bits",
            "is 8, but programs compiled by to_static cannot record how large their inputs are; set it to null, or "
            "engine.mode to dynamic",
        )


def _no_quantised_base(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    if lora.base_format is None or lora.rank is None or context.config is None:
        return
    key, block, tp = "lora.base_dtype", lora.base_block, context.recipe.parallel.tensor_parallel_degree
    if context.recipe.engine.mode == "to_static":
        yield key, f"is {lora.base_dtype}, which programs compiled by to_static cannot read; set engine.mode to dynamic"
    names = context.family.names()
    if not hasattr(names, "parameter_shapes"):
        yield (
            key,
            f"is {lora.base_dtype}; family {context.family.name} does not say which matrices it has; set it to null",
        )
        return
    shapes = names.parameter_shapes(context.config)
    for module in quantised_modules(shapes, context.shard_plan):
        name = f"{module}.weight"
        cut = context.shard_plan.dim(name) == 0 and not context.shard_plan.is_expert(name)
        parts, inputs = tp if cut else 1, shapes[name][-2]
        if inputs % (parts * block):
            each = f"{inputs} inputs" + (f", {inputs // parts} on each of {tp} ranks" if parts > 1 else "")
            divisor = math.gcd(block, inputs // parts)
            yield "lora.base_block", f"is {block}; {module} has {each}, which are not whole blocks; use {divisor}"
            return


def _nothing_to_drop(context: RuleContext) -> Iterator[Violation]:
    lora, key = context.recipe.lora, "lora.dropout"
    if not lora.dropout or lora.rank is None:
        return
    if context.recipe.engine.mode == "to_static":
        yield (
            key,
            f"is {lora.dropout}, but layers that are alike share one program of to_static, and each has a mask of its "
            "own; set it to 0, or engine.mode to dynamic",
        )
    names = context.family.names()
    if context.config is None or not hasattr(names, "parameter_shapes") or context.stage.head == "score":
        return
    has_head = "lm_head.weight" in names.parameter_shapes(context.config)  # else it is the embedding
    if found := [pattern for pattern in lora.target_modules or () if has_head and matches("lm_head", pattern)]:
        yield (
            key,
            f"is {lora.dropout}, and {found[0]!r} of lora.target_modules matches lm_head; dropout is for the decoder "
            "layers, where it is known which tokens go in: a stage picks those that the head gets. Set it to 0, or "
            "name others",
        )


def _no_logits(context: RuleContext) -> Iterator[Violation]:
    chunk = context.recipe.engine.loss_chunk_tokens
    if chunk is not None and context.stage.head == "score":
        stage = context.recipe.stage
        yield "engine.loss_chunk_tokens", f"is {chunk}, but stage {stage} has scores and no logits; set it to null"


def _no_first_gradients(context: RuleContext) -> Iterator[Violation]:
    recipe, stage, key = context.recipe, context.stage, "lora.init"
    if recipe.lora.rank is None or recipe.lora.init != "lora_ga" or not stage.trains:
        return
    if recipe.engine.mode == "to_static":
        yield (
            key,
            "is lora_ga, which takes gradients of frozen matrices, and programs compiled by to_static have none; set "
            "it to pissa or default, or engine.mode to dynamic",
        )
    if recipe.engine.precision == "fp16":
        yield (
            key,
            "is lora_ga, whose gradients may overflow while the scale of the loss is not found yet; set it to pissa or "
            "default, or engine.precision to bf16",
        )
    if stage.profile(getattr(recipe, stage.section_name)).updates:
        message = f"is lora_ga, which takes gradients of data, and stage {recipe.stage} draws what it learns from"
        yield key, f"{message}; set it to pissa or default"


_NOT_ON_EXPERTS = {
    "vera": "its two frozen factors are the same for all matrices, and each expert would keep its own copy of them",
    "lora_ga": "an expert that few tokens reach has a gradient with fewer singular vectors than it takes",
}
_NOT_ON_EMBEDDINGS = {
    "vera": "neither its paper nor PEFT has it for a table of rows",
    "mora": "its update is a function of a vector of inputs, and an embedding has ids",
    "lokr": "its update is a function of a vector of inputs, and an embedding has ids",
    "lora_ga": "the gradient of a table has rows for the tokens of the first batches only",
}
"""Methods and beginnings of adapters that are refused there, and why."""


def _no_such_target(context: RuleContext) -> Iterator[Violation]:
    lora, plan = context.recipe.lora, context.shard_plan
    if lora.rank is None or not lora.target_modules or context.config is None:
        return
    names = context.family.names()
    if not hasattr(names, "parameter_shapes"):
        return
    key, shapes = "lora.target_modules", names.parameter_shapes(context.config)
    linear, experts = linear_modules(shapes, plan), expert_modules(shapes, plan)
    embedding = [plan.embedding] if has_own_head(shapes) else []
    for pattern in lora.target_modules:
        for of, kinds, what, others in (
            (experts, _NOT_ON_EXPERTS, "routed experts", "shared_experts.* and "),
            (embedding, _NOT_ON_EMBEDDINGS, "the embedding", ""),
        ):
            found = [name for name in of if matches(name, pattern)]
            for name in (name for name in ("method", "init") if found and getattr(lora, name) in kinds):
                value, usual = getattr(lora, name), "lora" if name == "method" else "default"
                yield (
                    key,
                    f"{pattern!r} matches {what} ({found[0]}), and lora.{name} is {value}: {kinds[value]}; set "
                    f"lora.{name} to {usual}, or name others, such as {others}self_attn.*",
                )
        tied = not has_own_head(shapes) and any(matches(name, pattern) for name in (plan.embedding, "lm_head"))
        if tied and not any(matches(name, pattern) for name in (*linear, *experts)):
            yield (
                key,
                f"{pattern!r} is the embedding or the head, which are one matrix in this model (tie_word_embeddings), "
                "and an adapter is for one of them; remove it",
            )


def _no_such_structure(context: RuleContext) -> Iterator[Violation]:
    lora, plan = context.recipe.lora, context.shard_plan
    if lora.rank is None or lora.num_pairs:
        return
    if context.recipe.engine.mode == "to_static":
        yield (
            "lora.method",
            f"is {lora.method}, which is computed again in the backward pass, as no program compiled by to_static is; "
            "set engine.mode to dynamic",
        )
    names = context.family.names()
    if context.config is None or not hasattr(names, "parameter_shapes"):
        return
    shapes, patterns = names.parameter_shapes(context.config), lora.target_modules
    if patterns is not None and (found := [pattern for pattern in patterns if matches("lm_head", pattern)]):
        yield (
            "lora.target_modules",
            f"{found[0]!r} matches lm_head, whose outputs may be padded, which {lora.method} would see; name others, "
            "such as self_attn.*, or set lora.method to lora",
        )
    experts = [] if patterns is None else expert_modules(shapes, plan)
    for module in [*linear_modules(shapes, plan), *experts]:
        if module != "lm_head" and (patterns is None or any(matches(module, pattern) for pattern in patterns)):
            try:
                factor_shapes(lora.method, lora.rank, shapes[f"{module}.weight"])
            except UserError as error:
                key, _, message = str(error).partition(": ")
                yield key, message
                return


def _not_one_group(context: RuleContext) -> Iterator[Violation]:
    degree, stage = context.recipe.parallel.tensor_parallel_degree, context.recipe.stage
    if not context.stage.trains and context.num_devices != degree:
        message = (
            f"{context.num_devices} devices, but stage {stage} runs on tensor parallel degree = {degree}; use {degree}"
        )
        yield "launch.num_devices", message


def _no_metrics(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.loggers:
        yield "loggers", f"stage {context.recipe.stage} has no metrics to log; remove it"


STAGE_RULES = (
    Rule(
        "`roll_back` without `save_steps`",
        "there is no checkpoint to return to",
        ("--train.on_nonfinite=roll_back", "--checkpoint.save_steps=null"),
        _nothing_to_go_back_to,
    ),
    Rule(
        "`best_metric` without evaluation",
        "there is no value to compare",
        ("--data.eval=null", "--train.eval_steps=null", "--checkpoint.best_metric=eval/loss"),
        _no_evaluation,
    ),
    Rule(
        "`eval_steps` without `data.eval`",
        "there is nothing to evaluate on; `data.eval: null` turns the evaluation of a recipe off",
        (),
        _nothing_to_evaluate,
    ),
    Rule("`packing` with a stage that does not pack", "it would have no effect", (), _nothing_to_pack),
    Rule("`data.mix` with a stage that has a `mix` of its own", "it would have no effect", (), _mixed_elsewhere),
    Rule(
        "a reference by `adapter_off` without an adapter",
        "the reference would be the trained model itself",
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
        "the quantised weights are not the ones that are trained",
        (),
        _quantised_adapters,
    ),
    Rule(
        "`lora.base_dtype` with `to_static`, or blocks that do not divide the inputs of a matrix on every rank",
        "a quantised matrix is a table of whole blocks, made whole where it is multiplied",
        ("--lora.rank=8", "--lora.base_dtype=nf4", "--lora.base_block=48"),
        _no_quantised_base,
    ),
    Rule(
        "`lora.dropout` with `to_static`, or with an adapter on `lm_head`",
        "the mask is a function of the layer's name, and compiled layers share their programs; and of the tokens, of "
        "which the head gets some",
        ("--lora.rank=8", "--lora.dropout=0.1", "--engine.mode=to_static"),
        _nothing_to_drop,
    ),
    Rule(
        "`lora.init` `lora_ga` with `to_static`, `fp16`, or a stage with rollouts",
        "it takes gradients of frozen matrices in the first global batches",
        ("--lora.rank=8", "--lora.init=lora_ga", "--engine.mode=to_static"),
        _no_first_gradients,
    ),
    Rule(
        "`lora.target_modules` that match routed experts, with `lora.method` `vera` or `lora.init` `lora_ga`; or the "
        "embedding, with these, `mora` or `lokr`; or that name the embedding or the head where they are tied",
        "frozen factors would be copied for each expert, gradients have too few singular vectors, a table has no "
        "inputs; two matrices that are one cannot get different updates",
        (),
        _no_such_target,
    ),
    Rule(
        "`lora.method` `mora` or `lokr` with `to_static`, on `lm_head`, or with a rank that is too high for a matrix",
        "its update of a matrix is a function of all inputs and outputs, computed again in the backward pass",
        ("--lora.rank=8", "--lora.method=mora", "--engine.mode=to_static"),
        _no_such_structure,
    ),
    Rule(
        "`qat` with another stage than `pretrain` and `sft`",
        "it is tested with these two only",
        ("--qat.weight_bits=8",),
        _not_quantised,
    ),
    Rule(
        "`mtp_loss_weight` with a model that has not one layer to predict further tokens, with another stage than "
        "`pretrain`, `sft` and `lora`, or an adapter of the embedding",
        "there is no such layer, or it is not trained",
        ("--train.mtp_loss_weight=0.3",),
        _no_further_tokens,
    ),
    Rule(
        "`loss_chunk_tokens` with `rm`, or another stage with scores",
        "it makes no logits",
        (),
        _no_logits,
    ),
    Rule(
        "`qat.activation_bits` with `to_static`",
        "inputs are observed between operations",
        (),
        _observed_in_a_program,
    ),
)
"""Rules between sections and the stage."""

UNTRAINED_STAGE_RULES = (
    Rule(
        "more or fewer devices than the tensor parallel degree, with a stage that does not train",
        "it runs on one tensor parallel group",
        (),
        _not_one_group,
    ),
    Rule("loggers with a stage that does not train", "there are no metrics", (), _no_metrics),
)
"""Rules for a stage that does not train."""
