"""Rules about interventions on hidden states."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.frozen import what_changes_the_model
from llmsuite.schema.rule import Rule, Violation


def _two_kinds(context: RuleContext) -> Iterator[Violation]:
    rank, lora = context.recipe.reft.rank, context.recipe.lora.rank
    if rank is not None and lora is not None:
        yield "reft.rank", f"is {rank}, and lora.rank is {lora}; one kind is trained in a run: set the other to null"


def _no_prompts(context: RuleContext) -> Iterator[Violation]:
    rank = context.recipe.reft.rank
    if rank is not None and not context.stage.tells_prompts:
        stage = context.recipe.stage
        yield "reft.rank", f"is {rank}; stage {stage} does not say where prompts end: use sft, or set it to null"


def _not_beside(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.reft.rank is None:
        return
    key = f"is {recipe.reft.rank}"
    if recipe.engine.compiles_layers:
        told = "programs of layers are not told which tokens are edited"
        yield "reft.rank", f"{key}; {told}: set engine.program to step, or engine.mode to dynamic"
    yield from what_changes_the_model(recipe, "reft.rank")


def _no_such_layer(context: RuleContext) -> Iterator[Violation]:
    reft, config = context.recipe.reft, context.config
    if reft.rank is None or config is None:
        return
    if not context.shard_plan.layers:
        yield "reft.rank", f"is {reft.rank}; family {context.family.name} does not say where its layers are"
    if beyond := [number for number in reft.layers or () if number >= config.num_hidden_layers]:
        last = config.num_hidden_layers - 1
        yield "reft.layers", f"has {beyond[0]}; the layers of the model are 0 to {last}"
    if reft.rank > config.hidden_size:
        yield "reft.rank", f"is {reft.rank}, more than hidden_size = {config.hidden_size}; lower it, to 4 for one"


REFT_RULES = (
    Rule(
        "`reft.rank` with `lora.rank`",
        "a run trains one kind, and saves it",
        ("--reft.rank=4", "--lora.rank=8"),
        _two_kinds,
    ),
    Rule(
        "`reft.rank` with another stage than `sft` and `lora`",
        "interventions edit tokens at both ends of a prompt",
        ("--reft.rank=4",),
        _no_prompts,
    ),
    Rule(
        "`reft.rank` with `to_static` and `program: layers`, `qat`, `mtp_loss_weight` or `expert_bias_rate`",
        "which tokens are edited is no input of compiled layers; the others train what is frozen",
        ("--reft.rank=4", "--engine.mode=to_static"),
        _not_beside,
    ),
    Rule(
        "`reft.layers` or `reft.rank` beyond the layers or the hidden size of the model",
        "there is nothing to edit",
        (),
        _no_such_layer,
    ),
)
"""Rules about the section `reft`."""
