"""Rules about prefix tuning."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.adapters.prefix_shapes import WINDOW, attentions
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.models.protocols import HasShapes, window_of
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.frozen import keys_that_change_the_model


def _two_kinds(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    for other, rank in (("lora.rank", recipe.lora.rank), ("reft.rank", recipe.reft.rank)):
        if recipe.prefix.tokens is not None and rank is not None:
            message = f"is {recipe.prefix.tokens}, and {other} is {rank}"
            yield "prefix.tokens", f"{message}; a run trains one of them: set the other to null"


def _other_stage(context: RuleContext) -> Iterator[Violation]:
    tokens = context.recipe.prefix.tokens
    if tokens is not None and "prefix" not in context.stage.capabilities:
        stage = context.recipe.stage
        yield "prefix.tokens", f"is {tokens}; stage {stage} does not support prefix tuning: use sft, or set it to null"


def _trained_model(context: RuleContext) -> Iterator[Violation]:
    if context.recipe.prefix.tokens is not None:
        yield from keys_that_change_the_model(context.recipe, "prefix.tokens")


def _no_heads(context: RuleContext) -> Iterator[Violation]:
    tokens = context.recipe.prefix.tokens
    config = context.config
    if tokens is None or config is None:
        return
    names = context.family.names()
    shapes = names.parameter_shapes(config) if isinstance(names, HasShapes) else {}
    if len(attentions(shapes, context.shard_plan.layers)) < config.num_hidden_layers:
        yield (
            "prefix.tokens",
            f"is {tokens}; attention of family {context.family.name} has no k_proj and v_proj with keys and values "
            "for each head, which a prefix consists of: set it to null",
        )


def _no_room(context: RuleContext) -> Iterator[Violation]:
    tokens = context.recipe.prefix.tokens
    config = context.config
    longest = context.recipe.data.max_length
    if tokens is None or config is None or longest > config.max_position_embeddings:
        return
    if longest + tokens > config.max_position_embeddings:
        room = config.max_position_embeddings - tokens
        advice = "lower it"
        if room > 0:
            advice = f"lower data.max_length to {room}"
        yield (
            "prefix.tokens",
            f"is {tokens}, and data.max_length {longest}; the model has at most {config.max_position_embeddings} "
            f"positions (max_position_embeddings) for both: {advice}",
        )


def _window(context: RuleContext) -> Iterator[Violation]:
    window = window_of(context.config)
    if context.recipe.prefix.tokens is not None and window is not None:
        yield "prefix.tokens", f"is {context.recipe.prefix.tokens}; {WINDOW.format(window)}"


PREFIX_RULES = (
    Rule(
        "`prefix.tokens` with `lora.rank` or `reft.rank`",
        "a run trains and saves one kind of adapter",
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
        "they train or quantise the model, which is frozen",
        (),
        _trained_model,
    ),
    Rule(
        "`prefix.tokens` with a family without keys and values per head, such as DeepSeek (MLA)",
        "its KV cache holds a latent vector shared by all heads, not keys and values",
        (),
        _no_heads,
    ),
    Rule(
        "`prefix.tokens` and `data.max_length` above `max_position_embeddings` together",
        "a prefix uses positions",
        ("--prefix.tokens=4096",),
        _no_room,
    ),
    Rule(
        "`prefix.tokens` with sliding-window attention (`sliding_window`)",
        "later tokens would not attend to the prefix",
        (),
        _window,
    ),
)
"""Rules about section `prefix`."""
