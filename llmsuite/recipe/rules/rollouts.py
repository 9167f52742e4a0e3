"""Rules about stages that learn from completions which the model draws itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _updates(context: RuleContext) -> int:
    """Steps that learn from a rollout; 0 for other stages."""
    if not context.stage.trains:
        return 0
    return context.stage.profile(getattr(context.recipe, context.stage.section_name)).updates


def _rollout(context: RuleContext) -> Any:
    """The section `rollout`; None for other stages."""
    return getattr(context.recipe, "rollout", None) if _updates(context) else None


def _no_room(context: RuleContext) -> Iterator[Violation]:
    rollout, longest = _rollout(context), context.recipe.data
    if rollout is not None and rollout.max_completion_length >= longest.max_length:
        message = f"is {rollout.max_completion_length}, which leaves no room for a prompt in data.max_length"
        yield "rollout.max_completion_length", f"{message} {longest.max_length}; lower it, or raise that"


def _one_completion(context: RuleContext) -> Iterator[Violation]:
    rollout, section = _rollout(context), getattr(context.recipe, context.stage.section_name, None)
    compared = getattr(section, "advantage", "reinforce") != "reinforce"
    if rollout is not None and rollout.num_generations == 1 and compared:
        name = context.stage.section_name
        message = f"is 1, and {name}.advantage compares the completions of a prompt; set it to 2 or more"
        yield "rollout.num_generations", message
    least = None if rollout is None else context.stage.profile(section).completions
    if rollout is not None and least is not None and rollout.num_generations < least:
        message = f"is {rollout.num_generations}, and {context.recipe.stage} compares {least} completions of a prompt"
        yield "rollout.num_generations", f"{message}; set it to {least} or more"


def _split_rollout(context: RuleContext) -> Iterator[Violation]:
    updates, train, name = _updates(context), context.recipe.train, context.stage.section_name
    if updates <= 1:
        return
    if train.max_steps is None:
        yield "train.num_epochs", f"ends anywhere in the {updates} steps of a rollout ({name}.updates); set max_steps"
    keys = {
        "train.max_steps": train.max_steps,
        "train.eval_steps": train.eval_steps,
        "checkpoint.save_steps": context.recipe.checkpoint.save_steps,
    }
    for key, value in keys.items():
        if value == "epoch" or (isinstance(value, int) and value % updates):
            yield key, f"is {value}; it has to be a multiple of {name}.updates = {updates}, the steps of a rollout"


def _uneven_epochs(context: RuleContext) -> Iterator[Violation]:
    rollout, recipe = _rollout(context), context.recipe
    if rollout is None or not getattr(rollout, "dynamic_sampling", False):
        return
    why = "with rollout.dynamic_sampling nobody knows beforehand how many prompts a step takes"
    if recipe.train.max_steps is None:
        yield "train.num_epochs", f"{why}, so not how many steps an epoch has; set max_steps"
    for key, value in {
        "train.eval_steps": recipe.train.eval_steps,
        "checkpoint.save_steps": recipe.checkpoint.save_steps,
    }.items():
        if value == "epoch":
            yield key, f"is epoch: {why}; give a number of steps"


def _rolled_back(context: RuleContext) -> Iterator[Violation]:
    if _updates(context) and context.recipe.train.may_roll_back:
        key = "on_nonfinite" if context.recipe.train.on_nonfinite == "roll_back" else "on_spike"
        yield f"train.{key}", f"is roll_back, which stage {context.recipe.stage} does not support; choose skip"


def _drawn_by_another(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    if not _updates(context) or lora.rank is None:
        return
    if lora.base_dtype is not None:
        message = f"is {lora.base_dtype}, and completions are drawn from whole matrices"
        yield "lora.base_dtype", f"{message}; set it to null"
    if lora.dropout:
        yield "lora.dropout", f"is {lora.dropout}: completions are drawn without; set it to 0"
    section = getattr(context.recipe, context.stage.section_name)
    if any(prepass.kind == "reference" for prepass in context.stage.profile(section).prepasses):
        name = f"{context.stage.section_name}.reference"
        yield name, "is a copy; adapters need none, set it to adapter_off"


def _read_ahead(context: RuleContext) -> Iterator[Violation]:
    if _updates(context) and context.recipe.data.num_workers:
        message = f"is {context.recipe.data.num_workers}; there is nothing to prepare in advance of a rollout"
        yield "data.num_workers", f"{message}; set it to 0"


def _stale(context: RuleContext) -> Iterator[Violation]:
    rollout, key = _rollout(context), "rollout.max_staleness"
    lag = getattr(rollout, "max_staleness", 0)
    if not lag or not context.stage.draws_ahead:  # that is refused elsewhere
        return
    name, section = context.stage.section_name, getattr(context.recipe, context.stage.section_name)
    if getattr(section, "rollout_correction", "none") == "none":
        message = f"is {lag}, and completions of older weights would count as if these had drawn them"
        yield key, f"{message}; set {name}.rollout_correction to tis or mis, or it to 0"
    if _updates(context) > 1:
        yield key, f"is {lag}, and {name}.updates {_updates(context)}: choose one of them, and set the other to 0 or 1"
    if getattr(rollout, "dynamic_sampling", False):
        yield (
            key,
            f"is {lag}, and rollout.dynamic_sampling draws again with newer weights; set it to 0, or that to false",
        )


def _no_server(context: RuleContext) -> Iterator[Violation]:
    rollout = _rollout(context)
    if rollout is not None and rollout.engine == "openai" and not rollout.openai.urls:
        message = "is empty; start `llmsuite serve MODEL --rl` and name where it listens"
        yield "rollout.openai.urls", f'{message}, such as ["http://127.0.0.1:8000"]'


def _late_server(context: RuleContext) -> Iterator[Violation]:
    rewards: Any = getattr(context.recipe, "reward", None)
    if "http" in getattr(rewards, "functions", ()) and rewards.http.timeout > rewards.time_limit:
        message = f"is {rewards.http.timeout:g}, longer than reward.time_limit {rewards.time_limit:g}"
        yield "reward.http.timeout", f"{message}, which ends the call with all its tries; lower it, or raise that"


def _no_environment(context: RuleContext) -> Iterator[Violation]:
    rewards, environment = getattr(context.recipe, "reward", None), getattr(context.recipe, "environment", None)
    if "environment" in getattr(rewards, "functions", ()) and getattr(environment, "name", None) is None:
        message = "has environment, the reward that an environment gives, and environment.name is null"
        yield "reward.functions", f"{message}; name one, or remove the reward"


ROLLOUT_RULES = (
    Rule("a completion as long as `data.max_length`", "there is no room for a prompt", (), _no_room),
    Rule(
        "`rollout.num_generations` 1 where completions of a prompt are compared",
        "there is nothing to compare with",
        (),
        _one_completion,
    ),
    Rule(
        "steps, evaluations or checkpoints that are no multiple of `updates`",
        "checkpoints have no rollouts, so that its steps are not separated",
        (),
        _split_rollout,
    ),
    Rule(
        "epochs with `rollout.dynamic_sampling`",
        "how many prompts a step takes depends on what is drawn",
        (),
        _uneven_epochs,
    ),
    Rule("`roll_back` with rollouts", "it would skip prompts of a rollout that is under way", (), _rolled_back),
    Rule(
        "rollouts with `lora.base_dtype`, with dropout of adapters, or with a copy as reference beside adapters",
        "what is drawn has to be what is trained",
        (),
        _drawn_by_another,
    ),
    Rule(
        "`rollout.max_staleness` without a correction, or with `updates` or `dynamic_sampling`",
        "what is learnt would not belong to what was drawn",
        (),
        _stale,
    ),
    Rule("`rollout.engine` openai without `urls`", "nobody would draw", (), _no_server),
    Rule(
        "`reward.http.timeout` above `reward.time_limit`",
        "the call ends before the server is given up",
        (),
        _late_server,
    ),
    Rule("the reward `environment` without an environment", "nothing would give it", (), _no_environment),
    Rule("`data.num_workers` with rollouts", "there is nothing to prepare", (), _read_ahead),
)
"""Rules between sections, for stages with rollouts."""
