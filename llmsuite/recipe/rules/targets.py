"""The rules about `target_modules` and `modules_to_save`."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.models.head import SCORE, is_tied
from llmsuite.models.protocols import HasShapes
from llmsuite.models.targets import HEAD, adaptable_modules, full_modules, linear_modules, matches, pick_modules
from llmsuite.recipe.rules.context import RuleContext


def _no_such_matrix(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    qat = context.recipe.qat
    requested = []
    if lora.rank is not None and lora.target_modules:
        requested.append(("lora.target_modules", lora.target_modules, adaptable_modules))
    if qat.weight_bits is not None and qat.target_modules:
        requested.append(("qat.target_modules", qat.target_modules, linear_modules))
    names = None
    if requested and context.config is not None:
        names = context.family.names()
    if not isinstance(names, HasShapes):
        return
    shapes = names.parameter_shapes(context.config)
    plan = context.shard_plan
    for key, patterns, modules in requested:
        try:
            # a head tied to the embedding is reported by another rule
            pick_modules([*modules(shapes, plan), plan.embedding, "lm_head"], plan, patterns, key)
        except UserError as error:
            yield key, str(error).removeprefix(f"{key}: ")


def _not_trained_in_full(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    if lora.rank is None or not lora.modules_to_save or context.config is None:
        return
    key = "lora.modules_to_save"
    plan = context.shard_plan
    is_scored = context.stage.head == "score"
    if not plan.embedding:
        yield key, f"is set, but family {context.family.name} has no shard plan, which names its embedding; remove it"
        return
    for pattern in lora.modules_to_save:
        if is_scored and matches(SCORE.removesuffix(".weight"), pattern):
            yield key, f"names {pattern!r}, which stage {context.recipe.stage} trains in any case; remove it"
        elif is_scored and matches(HEAD, pattern):
            yield key, f"names {pattern!r}, but a model with scores has no {HEAD}; remove it"
        elif not any(matches(module, pattern) for module in (plan.embedding, HEAD)):
            yield (
                key,
                f"{pattern!r} is neither the embedding ({plan.embedding}) nor {HEAD}; other modules are not trained in "
                "full next to adapters: remove it",
            )
    are_tied = not is_scored and is_tied(context.config)
    if are_tied and not lora.ensure_weight_tying:
        yield (
            key,
            f"names {', '.join(lora.modules_to_save)}, but embedding and head are one matrix in this model "
            "(tie_word_embeddings), and one of them would not follow the other; set lora.ensure_weight_tying to true, "
            "which trains the matrix of both",
        )
    in_full = full_modules(lora.modules_to_save, plan, are_tied)
    for pattern in lora.target_modules or ():
        both = [module for module in in_full if matches(module, pattern)]
        if both:
            yield (
                "lora.target_modules",
                f"{pattern!r} matches {both[0]}, which lora.modules_to_save trains in full; remove one of the two",
            )


def _not_next_to_full_modules(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.lora.rank is None or not recipe.lora.modules_to_save:
        return
    key = "lora.modules_to_save"
    if recipe.lora.adapter_method.needs_gradients:
        yield key, "is set, and lora.init is lora_ga, which has gradients of matrices with adapters only; remove one"
    if context.profile.updates:
        yield key, f"is set, but rollouts of stage {recipe.stage} support adapters only; remove it"
    if recipe.train.mtp_loss_weight:
        weight = recipe.train.mtp_loss_weight
        yield key, f"is set, and train.mtp_loss_weight is {weight}; a shared embedding is frozen: remove one of the two"


def _untrained_rows(context: RuleContext) -> Iterator[Violation]:
    model = context.recipe.model
    keys = {
        "model.new_tokens": bool(model.new_tokens),
        "model.new_special_tokens": bool(model.new_special_tokens),
        "model.vocab_size": model.vocab_size is not None,
    }
    key = next((key for key, is_given in keys.items() if is_given), None)
    if key is None or context.config is None:
        return
    if not context.stage.trains:
        yield key, f"is set, but stage {context.recipe.stage} does not train, and new rows say nothing; remove it"
        return
    if not context.recipe.freezes_model:
        return
    lora = context.recipe.lora
    is_scored = context.stage.head == "score"
    are_tied = not is_scored and is_tied(context.config)
    plan = context.shard_plan
    needed = [plan.embedding] if are_tied or is_scored else [plan.embedding, HEAD]
    in_full = [] if lora.rank is None else full_modules(lora.modules_to_save, plan, are_tied)
    missing = [module.rpartition(".")[2] for module in needed if module not in in_full]
    if missing:
        yield key, f"is set, but {' and '.join(missing)} would stay frozen; name them in lora.modules_to_save"


TARGET_RULES = (
    Rule(
        "`target_modules` of `lora` or `qat` that match no matrix of the model",
        "nothing would be trained or quantised",
        ("--lora.rank=8", '--lora.target_modules=["q_pro"]'),
        _no_such_matrix,
    ),
    Rule(
        "`lora.modules_to_save` that names other modules than the embedding and `lm_head`, one that has an adapter, or "
        "one of a tied model without `lora.ensure_weight_tying`",
        "nothing else is trained in full next to adapters, and tied matrices cannot get different updates",
        ("--lora.rank=8", '--lora.modules_to_save=["norm"]'),
        _not_trained_in_full,
    ),
    Rule(
        "`model.new_tokens`, `model.new_special_tokens` or `model.vocab_size` with a frozen embedding or head, or with "
        "a stage that does not train",
        "rows of new tokens have to be trained, and an adapter is saved with them",
        (),
        _untrained_rows,
    ),
    Rule(
        "`lora.modules_to_save` with `lora.init` `lora_ga`, a stage with rollouts, or `train.mtp_loss_weight`",
        "these expect that everything except adapters is frozen",
        ("--lora.rank=8", "--lora.init=lora_ga", '--lora.modules_to_save=["lm_head"]'),
        _not_next_to_full_modules,
    ),
)
"""Rules about matrices."""
