"""Rules about stages: their adapters, quantisation, evaluation and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmsuite.adapters.parameters import factor_shapes
from llmsuite.base.errors import UserError
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.contract.schema.section import changed_keys, value_at
from llmsuite.contract.schema.stage_keys import HasReference, mean_of_micro_batches
from llmsuite.models.block_quant import LLM_INT8
from llmsuite.models.protocols import HasShapes, num_stored_mtp_layers
from llmsuite.models.targets import expert_modules, has_own_head, linear_modules, matches, quantised_modules
from llmsuite.recipe.rules.context import RuleContext


def _no_evaluation(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.checkpoint.best_metric and not context.evaluates:
        yield "checkpoint.best_metric", "is a metric of the evaluation; set data.eval or data.holdout, or remove it"


def _nothing_to_evaluate(context: RuleContext) -> Iterator[Violation]:
    if ("data", "eval") in context.given:
        return  # set to null: this turns the evaluation off
    steps = context.recipe.train.eval_steps
    if steps is not None and not context.evaluates:
        yield (
            "train.eval_steps",
            f"is {steps}, but there is no evaluation data; set data.eval or data.holdout, or remove it",
        )


def _nothing_to_pack(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.data.packing != "none" and "packing" not in context.stage.capabilities:
        message = f"is {context.recipe.data.packing}; stage {context.recipe.stage} does not pack samples"
        yield "data.packing", f"{message}; remove it"


def _no_plain_text(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.data.text_template is not None and "plain_text" not in context.stage.capabilities:
        message = f"is set; stage {context.recipe.stage} does not train on rows of plain text"
        yield "data.text_template", f"{message}; remove it"


def _no_ranked_answers(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.data.ranked_pairs != "all" and "ranked" not in context.stage.capabilities:
        stage = context.recipe.stage
        message = f"is {context.recipe.data.ranked_pairs}; stage {stage} does not train on ranked answers"
        yield "data.ranked_pairs", f"{message}; remove it"


def _no_thoughts(context: RuleContext) -> Iterator[Violation]:
    if not context.recipe.data.supervise_thoughts and "thoughts" not in context.stage.capabilities:
        message = f"is false; stage {context.recipe.stage} cannot leave thoughts out of what it trains on"
        yield "data.supervise_thoughts", f"{message}; remove it"


def _no_ends_of_answers(context: RuleContext) -> Iterator[Violation]:
    end = context.recipe.data.end_of_answer
    stage = context.recipe.stage
    if end != "token" and "answer_ends" not in context.stage.capabilities:
        yield "data.end_of_answer", f"is {end}; stage {stage} trains on no answers of rows; remove it"
    elif end == "token_in_text" and "thoughts" not in context.stage.capabilities:  # which trains on all of an answer
        yield (
            "data.end_of_answer",
            f"is {end}; stage {stage} has no text after its answers; set it to token or template",
        )


def _prompts_with_thoughts(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.data.supervise_thoughts:
        return
    message = (
        "is set, and with data.supervise_thoughts false a prompt would have the thoughts of the row; set it to null"
    )
    if recipe.generation.max_new_tokens is not None:
        yield "generation.max_new_tokens", message
    if recipe.reft.rank is not None:
        yield "reft.rank", message


def _unused_in_stage(context: RuleContext) -> Iterator[Violation]:
    for key, reason in context.section.unused_elsewhere():
        *path, name = key.split(".")
        if name in changed_keys(value_at(context.recipe, *path)):
            yield key, reason


def _grouped_means(context: RuleContext) -> Iterator[Violation]:
    key = mean_of_micro_batches(context.section)
    if key is None:
        return
    recipe = context.recipe
    name = f"{context.stage.section_name}.{key}"
    if recipe.train.micro_batch_tokens is not None:
        message = f"is {recipe.train.micro_batch_tokens}, but {name} averages each micro-batch by itself"
        yield "train.micro_batch_tokens", f"{message}; set it to null, and train.micro_batch_size"
    elif recipe.data.group_by_length and recipe.train.micro_batch_size > 1:
        message = f"puts samples of one length together, but {name} averages each micro-batch by itself"
        yield "data.group_by_length", f"{message}; set it to false"


def _no_checkpoint_to_roll_back_to(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.train.may_roll_back and context.recipe.checkpoint.save_steps is None:
        key = "on_spike"
        if context.recipe.train.on_nonfinite == "roll_back":
            key = "on_nonfinite"
        yield f"train.{key}", "is roll_back, which needs checkpoints: set checkpoint.save_steps, or choose skip"


def _nothing_to_switch_off(context: RuleContext) -> Iterator[Violation]:
    if not isinstance(context.section, HasReference):
        return
    if context.section.reference == "adapter_off" and context.recipe.lora.rank is None:
        other = "copy" if context.profile.updates else "cache"
        key = f"{context.stage.section_name}.reference"
        yield key, f"is adapter_off, which needs adapters; set lora.rank, or set it to {other}"
    elif context.section.reference == "adapter_off" and context.recipe.lora.modules_to_save:
        key = f"{context.stage.section_name}.reference"
        why = "is adapter_off, but modules of lora.modules_to_save have no initial values left"
        yield key, f"{why}; set it to cache, or remove those"


def _nothing_to_train(context: RuleContext) -> Iterator[Violation]:
    if "adapters_only" in context.stage.capabilities and not context.recipe.freezes_model:
        yield "lora.rank", f"is null, but stage {context.recipe.stage} trains adapters only; set it, for example to 8"


def _quantised_adapters(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.qat.weight_bits is not None and context.recipe.lora.rank is not None:
        message = "is 8, but lora.rank trains adapters and freezes the model; set one of the two to null"
        yield "qat.weight_bits", message


def _no_mtp(context: RuleContext) -> Iterator[Violation]:
    weight = context.recipe.train.mtp_loss_weight
    key = "train.mtp_loss_weight"
    if not weight:
        return
    layers = num_stored_mtp_layers(context.config)
    if "mtp" not in context.stage.capabilities:
        yield key, f"is {weight}; stage {context.recipe.stage} does not support multi-token prediction; set it to 0"
    elif context.config is not None and layers != 1:
        has = "the model has no multi-token prediction layer"
        if layers:
            has = f"num_nextn_predict_layers is {layers}"
        yield key, f"is {weight}, but {has}; exactly one such layer can be trained (DeepSeek-V3); set it to 0"
    lora = context.recipe.lora
    embedding = context.shard_plan.embedding
    patterns = lora.target_modules or () if lora.rank is not None else ()
    found = [pattern for pattern in patterns if matches(embedding, pattern)]
    if found:
        yield (
            "lora.target_modules",
            f"{found[0]!r} matches the embedding ({embedding}), which the multi-token prediction layer also reads "
            f"({key} is {weight}); an adapter supports one place only: name other modules, such as self_attn.*, or set "
            "the weight to 0",
        )


def _not_quantised(context: RuleContext) -> Iterator[Violation]:
    # adapters are reported by another rule
    is_supported = not context.stage.capabilities.isdisjoint(("qat", "adapters_only"))
    if context.recipe.qat.weight_bits is not None and not is_supported:
        message = f"is 8, which stage {context.recipe.stage} does not support; use pretrain or sft, or set it to null"
        yield "qat.weight_bits", message


def _observed_in_a_program(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.qat.activation_bits is not None and context.recipe.engine.mode == "to_static":
        yield (
            "qat.activation_bits",
            "is 8, but programs compiled by to_static cannot record the magnitudes of their inputs; set it to null, or "
            "engine.mode to dynamic",
        )


def _no_quantised_base(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    if lora.base_format is None or lora.rank is None or context.config is None:
        return
    key = "lora.base_dtype"
    block = lora.base_block
    tp = context.recipe.parallel.tensor_parallel_degree
    if context.recipe.engine.mode == "to_static":
        yield key, f"is {lora.base_dtype}, which to_static does not support; set engine.mode to dynamic"
    names = context.family.names()
    if not isinstance(names, HasShapes):
        yield (
            key,
            f"is {lora.base_dtype}; family {context.family.name} has no parameter_shapes; set it to null",
        )
        return
    if lora.base_dtype == LLM_INT8:
        for degree, size in (("tensor", tp), ("expert", context.recipe.parallel.expert_parallel_degree)):
            if size > 1:
                message = f"is {LLM_INT8}, whose outliers are of all inputs and rows of a product"
                yield key, f"{message}; set parallel.{degree}_parallel_degree to 1"
        return
    shapes = names.parameter_shapes(context.config)
    for module in quantised_modules(shapes, context.shard_plan):
        name = f"{module}.weight"
        cut = context.shard_plan.dim(name) == 0 and not context.shard_plan.is_expert(name)
        parts = tp if cut else 1
        inputs = shapes[name][-2]
        if inputs % (parts * block):
            per_rank = ""
            if parts > 1:
                per_rank = f", {inputs // parts} on each of {tp} ranks"
            divisor = math.gcd(block, inputs // parts)
            message = f"is {block}, which does not divide the {inputs} inputs of {module}{per_rank}"
            yield "lora.base_block", f"{message}; use {divisor}"
            return


def _nothing_to_drop(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    key = "lora.dropout"
    if not lora.dropout or lora.rank is None:
        return
    if context.recipe.engine.mode == "to_static":
        yield (
            key,
            f"is {lora.dropout}, but with to_static equal layers share one program, and dropout masks differ between "
            "layers; set it to 0, or engine.mode to dynamic",
        )
    names = context.family.names()
    if context.config is None or not isinstance(names, HasShapes) or context.stage.head == "score":
        return
    if "lm_head.weight" not in names.parameter_shapes(context.config):  # tied to the embedding
        return
    found = [pattern for pattern in lora.target_modules or () if matches("lm_head", pattern)]
    if found:
        yield (
            key,
            f"is {lora.dropout}, and {found[0]!r} of lora.target_modules matches lm_head; dropout supports the decoder "
            "layers only, because its mask needs the position of each token and the head gets selected tokens. Set it "
            "to 0, or name other modules",
        )


def _no_logits(context: RuleContext) -> Iterator[Violation]:
    chunk = context.recipe.engine.loss_chunk_tokens
    if chunk is not None and context.stage.head == "score":
        stage = context.recipe.stage
        yield "engine.loss_chunk_tokens", f"is {chunk}, but stage {stage} computes scores, not logits; set it to null"


def _no_initial_gradients(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    stage = context.stage
    key = "lora.init"
    if recipe.lora.rank is None or not recipe.lora.adapter_method.needs_gradients or not stage.trains:
        return
    if recipe.engine.mode == "to_static":
        yield (
            key,
            "is lora_ga, which needs gradients of frozen matrices; programs compiled by to_static do not compute them; "
            "set it to pissa or default, or engine.mode to dynamic",
        )
    if recipe.engine.precision == "fp16":
        yield (
            key,
            "is lora_ga, whose gradients may overflow before the loss scale has adapted; set it to pissa or default, "
            "or engine.precision to bf16",
        )
    if context.profile.updates:
        message = f"is lora_ga, which needs gradients of training data, but stage {recipe.stage} trains on rollouts"
        yield key, f"{message}; set it to pissa or default"


def _no_such_target(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    plan = context.shard_plan
    if lora.rank is None or not lora.target_modules or context.config is None:
        return
    names = context.family.names()
    if not isinstance(names, HasShapes):
        return
    key = "lora.target_modules"
    method = lora.adapter_method
    name, usual = ("init", "default") if method.is_init else ("method", "lora")
    shapes = names.parameter_shapes(context.config)
    linear = linear_modules(shapes, plan)
    experts = expert_modules(shapes, plan)
    embedding = []
    if has_own_head(shapes):
        embedding = [plan.embedding]
    for pattern in lora.target_modules:
        for modules, reason, what, others in (
            (experts, method.on_experts, "routed experts", "shared_experts.* and "),
            (embedding, method.on_embedding, "the embedding", ""),
        ):
            found = [name for name in modules if matches(name, pattern)]
            if found and reason:
                yield (
                    key,
                    f"{pattern!r} matches {what} ({found[0]}), and lora.{name} is {method.name}: {reason}; set "
                    f"lora.{name} to {usual}, or name other modules, such as {others}self_attn.*",
                )
        tied = not has_own_head(shapes) and any(matches(name, pattern) for name in (plan.embedding, "lm_head"))
        if tied and not any(matches(name, pattern) for name in (*linear, *experts)):
            yield (
                key,
                f"{pattern!r} is the embedding or the head, which are one matrix in this model (tie_word_embeddings); "
                "an adapter supports only one of them; remove it",
            )


def _no_such_structure(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    plan = context.shard_plan
    method = lora.adapter_method
    if lora.rank is None or method.is_init:
        return
    if context.recipe.engine.mode == "to_static" and not method.supports_programs:
        yield (
            "lora.method",
            f"is {lora.method}, which is recomputed in the backward pass; programs compiled by to_static do not "
            "support this; set engine.mode to dynamic",
        )
    if method.supports_padding and method.fits_any_rank:
        return
    names = context.family.names()
    if context.config is None or not isinstance(names, HasShapes):
        return
    shapes = names.parameter_shapes(context.config)
    patterns = lora.target_modules
    found = [pattern for pattern in patterns or () if matches("lm_head", pattern)]
    if found and not method.supports_padding:
        yield (
            "lora.target_modules",
            f"{found[0]!r} matches lm_head, whose outputs may be padded, which {lora.method} does not support; name "
            "other modules, such as self_attn.*, or set lora.method to lora",
        )
    experts = [] if patterns is None else expert_modules(shapes, plan)
    for module in [*linear_modules(shapes, plan), *experts]:
        if module != "lm_head" and (patterns is None or any(matches(module, pattern) for pattern in patterns)):
            try:
                factor_shapes(method, lora.rank, shapes[f"{module}.weight"])
            except UserError as error:
                key, _, message = str(error).partition(": ")
                yield key, message
                return


def _not_one_group(context: RuleContext) -> Iterator[Violation]:
    degree = context.recipe.parallel.tensor_parallel_degree
    stage = context.recipe.stage
    if not context.stage.trains and context.num_devices != degree:
        message = f"{context.num_devices} devices, but stage {stage} runs on tensor parallel degree = {degree}"
        yield "launch.num_devices", f"{message}; use {degree}"


def _no_metrics(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.loggers:
        yield "loggers", f"stage {context.recipe.stage} has no metrics to log; remove it"


_UNUSED_KEYS = Rule(
    "a key that the stage does not use, such as `data.mix` with `pretrain`",
    "it would have no effect",
    (),
    _unused_in_stage,
)

STAGE_RULES = (
    Rule(
        "`mean` or `sft_mean` `micro_batches` with `micro_batch_tokens`, or with `group_by_length` and several samples "
        "each",
        "lengths would decide which samples are averaged together",
        (),
        _grouped_means,
    ),
    Rule(
        "`roll_back` without `save_steps`",
        "there is no checkpoint to return to",
        ("--train.on_nonfinite=roll_back", "--checkpoint.save_steps=null"),
        _no_checkpoint_to_roll_back_to,
    ),
    Rule(
        "`best_metric` without evaluation",
        "there is no value to compare",
        ("--data.eval=null", "--train.eval_steps=null", "--checkpoint.best_metric=eval/loss"),
        _no_evaluation,
    ),
    Rule(
        "`eval_steps` without `data.eval`",
        "there is no evaluation data; `data.eval: null` turns the evaluation of a recipe off",
        (),
        _nothing_to_evaluate,
    ),
    Rule("`packing` with a stage that does not pack", "it would have no effect", (), _nothing_to_pack),
    Rule(
        "`data.text_template` with a stage that does not train on plain text",
        "it would have no effect",
        (),
        _no_plain_text,
    ),
    Rule(
        "`data.ranked_pairs` with a stage that makes no pairs of ranked answers",
        "it would have no effect",
        (),
        _no_ranked_answers,
    ),
    Rule(
        "`data.supervise_thoughts: false` with a stage that trains on all of an answer",
        "it would have no effect",
        (),
        _no_thoughts,
    ),
    Rule(
        "`data.end_of_answer` with a stage that does not train on answers of rows; token_in_text with one whose rows "
        "are no conversations",
        "it would have no effect",
        (),
        _no_ends_of_answers,
    ),
    Rule(
        "generated evaluations, and `reft`, with `data.supervise_thoughts: false`",
        "an answer begins at its first supervised token",
        (),
        _prompts_with_thoughts,
    ),
    _UNUSED_KEYS,
    Rule(
        "a reference `adapter_off` without adapters, or with `lora.modules_to_save`",
        "the reference would be the trained model itself, or have its trained modules",
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
        "the quantised weights are frozen",
        (),
        _quantised_adapters,
    ),
    Rule(
        "`lora.base_dtype` with `to_static`, or blocks that do not divide the inputs of a matrix on every rank",
        "a quantised matrix consists of full blocks, and is dequantised where it is multiplied",
        ("--lora.rank=8", "--lora.base_dtype=nf4", "--lora.base_block=48"),
        _no_quantised_base,
    ),
    Rule(
        "`lora.dropout` with `to_static`, or with an adapter on `lm_head`",
        "the dropout mask is a function of the layer, but compiled layers share a program; and of the token positions, "
        "but the head gets selected tokens",
        ("--lora.rank=8", "--lora.dropout=0.1", "--engine.mode=to_static"),
        _nothing_to_drop,
    ),
    Rule(
        "`lora.init` `lora_ga` with `to_static`, `fp16`, or a stage with rollouts",
        "it needs gradients of frozen matrices in the first global batches",
        ("--lora.rank=8", "--lora.init=lora_ga", "--engine.mode=to_static"),
        _no_initial_gradients,
    ),
    Rule(
        "`lora.target_modules` that match routed experts, with `lora.method` `vera` or `lora.init` `lora_ga`; or the "
        "embedding, with these, `mora` or `lokr`; or that name the embedding or the head where they are tied",
        "frozen factors would be copied for each expert, gradients have too few singular vectors, an embedding has no "
        "input vectors, and tied matrices cannot get different updates",
        (),
        _no_such_target,
    ),
    Rule(
        "`lora.method` `mora` or `lokr` with `to_static`, on `lm_head`, or with a rank that is too high for a matrix",
        "its update of a matrix is a function of all inputs and outputs, recomputed in the backward pass",
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
        "`mtp_loss_weight` with a model without exactly one multi-token prediction layer, with another stage than "
        "`pretrain`, `sft` and `lora`, or with an adapter of the embedding",
        "there is no such layer, or it is not trained",
        ("--train.mtp_loss_weight=0.3",),
        _no_mtp,
    ),
    Rule(
        "`loss_chunk_tokens` with `rm`, or another stage with scores",
        "there are no logits",
        (),
        _no_logits,
    ),
    Rule(
        "`qat.activation_bits` with `to_static`",
        "compiled programs cannot record the magnitudes of inputs",
        (),
        _observed_in_a_program,
    ),
)
"""Rules between sections and the stage."""

INFERENCE_STAGE_RULES = (
    _UNUSED_KEYS,
    Rule(
        "more or fewer devices than the tensor parallel degree, with a stage that does not train",
        "it runs on one tensor parallel group",
        (),
        _not_one_group,
    ),
    Rule("loggers with a stage that does not train", "there are no metrics", (), _no_metrics),
)
"""Rules for stages that do not train."""
