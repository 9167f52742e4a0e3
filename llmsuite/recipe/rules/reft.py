"""Rules about interventions on hidden states."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.frozen import keys_that_change_the_model


def _two_kinds(context: RuleContext) -> Iterator[Violation]:
    rank = context.recipe.reft.rank
    lora = context.recipe.lora.rank
    if rank is not None and lora is not None:
        yield "reft.rank", f"is {rank}, and lora.rank is {lora}; a run trains one of them: set the other to null"


def _no_prompts(context: RuleContext) -> Iterator[Violation]:
    rank = context.recipe.reft.rank
    if rank is not None and "prompt_lengths" not in context.stage.capabilities:
        stage = context.recipe.stage
        yield "reft.rank", f"is {rank}; batches of stage {stage} have no prompt lengths: use sft, or set it to null"


def _trained_model(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.reft.rank is None:
        return
    if recipe.engine.compiles_layers:
        message = f"is {recipe.reft.rank}; compiled layers have no input for the positions that are edited"
        yield "reft.rank", f"{message}: set engine.program to step, or engine.mode to dynamic"
    yield from keys_that_change_the_model(recipe, "reft.rank")


def _no_such_layer(context: RuleContext) -> Iterator[Violation]:
    reft = context.recipe.reft
    config = context.config
    if reft.rank is None or config is None:
        return
    if not context.shard_plan.layers:
        yield "reft.rank", f"is {reft.rank}; the shard plan of family {context.family.name} names no layers"
    beyond = [number for number in reft.layers or () if number >= config.num_hidden_layers]
    if beyond:
        last = config.num_hidden_layers - 1
        yield "reft.layers", f"has {beyond[0]}; the layers of the model are 0 to {last}"
    if reft.rank > config.hidden_size:
        yield "reft.rank", f"is {reft.rank}, more than hidden_size = {config.hidden_size}; lower it, for example to 4"


REFT_RULES = (
    Rule(
        "`reft.rank` with `lora.rank`",
        "a run trains and saves one kind of adapter",
        ("--reft.rank=4", "--lora.rank=8"),
        _two_kinds,
    ),
    Rule(
        "`reft.rank` with another stage than `sft` and `lora`",
        "interventions edit tokens at both ends of a prompt, so batches need prompt lengths",
        ("--reft.rank=4",),
        _no_prompts,
    ),
    Rule(
        "`reft.rank` with `to_static` and `program: layers`, `qat`, `mtp_loss_weight` or `expert_bias_rate`",
        "compiled layers have no input for the edited positions; the other keys train the frozen model",
        ("--reft.rank=4", "--engine.mode=to_static"),
        _trained_model,
    ),
    Rule(
        "`reft.layers` or `reft.rank` beyond the layers or the hidden size of the model",
        "there is nothing to edit",
        (),
        _no_such_layer,
    ),
)
"""Rules about section `reft`."""
