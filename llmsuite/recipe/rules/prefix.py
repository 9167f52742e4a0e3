"""Rules about prefix tuning."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.prefix_shapes import WINDOW, attentions
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.frozen import what_changes_the_model
from llmsuite.schema.rule import Rule, Violation


def _two_kinds(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    for other, rank in (("lora.rank", recipe.lora.rank), ("reft.rank", recipe.reft.rank)):
        if recipe.prefix.tokens is not None and rank is not None:
            told = f"is {recipe.prefix.tokens}, and {other} is {rank}"
            yield "prefix.tokens", f"{told}; one kind is trained in a run: set the other to null"


def _other_stage(context: RuleContext) -> Iterator[Violation]:
    tokens = context.recipe.prefix.tokens
    if tokens is not None and not context.stage.takes_prefix:
        stage = context.recipe.stage
        yield "prefix.tokens", f"is {tokens}; stage {stage} is not for prefixes: use sft, or set it to null"


def _not_beside(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.prefix.tokens is not None:
        yield from what_changes_the_model(context.recipe, "prefix.tokens")


def _no_heads(context: RuleContext) -> Iterator[Violation]:
    tokens, config = context.recipe.prefix.tokens, context.config
    if tokens is None or config is None:
        return
    names = context.family.names()
    shapes = names.parameter_shapes(config) if hasattr(names, "parameter_shapes") else {}
    if len(attentions(shapes, context.shard_plan.layers)) < config.num_hidden_layers:
        yield (
            "prefix.tokens",
            f"is {tokens}; attention of family {context.family.name} has no k_proj and v_proj that give each head its "
            "keys and values, which a prefix is made of: set it to null",
        )


def _no_room(context: RuleContext) -> Iterator[Violation]:
    tokens, config, longest = context.recipe.prefix.tokens, context.config, context.recipe.data.max_length
    if tokens is None or config is None or longest > config.max_position_embeddings:
        return
    if longest + tokens > config.max_position_embeddings:
        room = config.max_position_embeddings - tokens
        least = f"lower data.max_length to {room}" if room > 0 else "lower it"
        yield (
            "prefix.tokens",
            f"is {tokens}, and data.max_length {longest}; the model has at most {config.max_position_embeddings} "
            f"positions (max_position_embeddings) for both: {least}",
        )


def _window(context: RuleContext) -> Iterator[Violation]:
    window = getattr(context.config, "sliding_window", None)
    if context.recipe.prefix.tokens is not None and window is not None:
        yield "prefix.tokens", f"is {context.recipe.prefix.tokens}; {WINDOW.format(window)}"


PREFIX_RULES = (
    Rule(
        "`prefix.tokens` with `lora.rank` or `reft.rank`",
        "a run trains one kind, and saves it",
        ("--prefix.tokens=4", "--lora.rank=8"),
        _two_kinds,
    ),
    Rule(
        "`prefix.tokens` with another stage than `sft` and `lora`",
        "it is tested with these two only",
        ("--prefix.tokens=4",),
        _other_stage,
    ),
    Rule(
        "`prefix.tokens` with `qat`, `mtp_loss_weight` or `expert_bias_rate`",
        "they train what is frozen, or round it",
        (),
        _not_beside,
    ),
    Rule(
        "`prefix.tokens` with a family whose heads have no keys and values of their own, such as DeepSeek",
        "its cache has what all heads share, which is no place for a prefix",
        (),
        _no_heads,
    ),
    Rule(
        "`prefix.tokens` and `data.max_length` above `max_position_embeddings` together",
        "a prefix takes positions",
        ("--prefix.tokens=4096",),
        _no_room,
    ),
    Rule(
        "`prefix.tokens` with a model whose attention has a window (`sliding_window`)",
        "later tokens would not see the prefix",
        (),
        _window,
    ),
)
"""Rules about the section `prefix`."""
