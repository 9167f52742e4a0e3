"""Rules about stages with rollouts, which train on completions sampled from the model."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.schema.stage_keys import CorrectsRollouts, HasAdvantage
from llmsuite.recipe.rules.context import RuleContext


def _no_room(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    longest = context.recipe.data.max_length
    if rollout is not None and rollout.max_completion_length >= longest:
        message = f"is {rollout.max_completion_length}, which leaves no room for a prompt in data.max_length"
        yield "rollout.max_completion_length", f"{message} {longest}; lower it, or raise that"


def _one_completion(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    compared = isinstance(context.section, HasAdvantage) and context.section.advantage != "reinforce"
    if rollout is not None and rollout.num_generations == 1 and compared:
        name = context.stage.section_name
        message = f"is 1, but {name}.advantage compares the completions of a prompt; set it to 2 or more"
        yield "rollout.num_generations", message
    least = None
    if rollout is not None:
        least = context.profile.completions
    if rollout is not None and least is not None and rollout.num_generations < least:
        message = f"is {rollout.num_generations}, but {context.recipe.stage} compares {least} completions of a prompt"
        yield "rollout.num_generations", f"{message}; set it to {least} or more"


def _split_rollout(context: RuleContext) -> Iterator[Violation]:
    updates = context.profile.updates
    train = context.recipe.train
    name = context.stage.section_name
    if updates <= 1:
        return
    if train.max_steps is None:
        yield (
            "train.num_epochs",
            f"may end between the {updates} steps of a rollout ({name}.updates); set max_steps instead",
        )
    keys = {
        "train.max_steps": train.max_steps,
        "train.eval_steps": train.eval_steps,
        "checkpoint.save_steps": context.recipe.checkpoint.save_steps,
    }
    for key, value in keys.items():
        if value == "epoch" or (isinstance(value, (int, float)) and value % updates):
            yield key, f"is {value}; it has to be a multiple of {name}.updates = {updates}, the steps of a rollout"


def _uneven_epochs(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    recipe = context.recipe
    if rollout is None or not rollout.dynamic_sampling:
        return
    why = "with rollout.dynamic_sampling the number of prompts of a step is not known in advance"
    if recipe.train.max_steps is None:
        yield "train.num_epochs", f"{why}, nor is the number of steps of an epoch; set max_steps instead"
    keys = {"train.eval_steps": recipe.train.eval_steps, "checkpoint.save_steps": recipe.checkpoint.save_steps}
    for key, value in keys.items():
        if value == "epoch" or isinstance(value, float):
            yield key, f"is {value}, but {why}; set a number of steps"


def _rolled_back(context: RuleContext) -> Iterator[Violation]:
    if context.profile.updates and context.recipe.train.may_roll_back:
        key = "on_spike"
        if context.recipe.train.on_nonfinite == "roll_back":
            key = "on_nonfinite"
        yield f"train.{key}", f"is roll_back, which stage {context.recipe.stage} does not support; choose skip"


def _sampled_by_another_model(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    if not context.profile.updates or lora.rank is None:
        return
    if lora.base_dtype is not None:
        message = f"is {lora.base_dtype}, but rollouts do not support quantised matrices"
        yield "lora.base_dtype", f"{message}; set it to null"
    if lora.dropout:
        yield "lora.dropout", f"is {lora.dropout}, but completions are sampled without dropout; set it to 0"
    if any(prepass.kind == "reference" for prepass in context.profile.prepasses):
        name = f"{context.stage.section_name}.reference"
        yield name, "is a copy; with adapters the frozen model is the reference: set it to adapter_off"


def _read_ahead(context: RuleContext) -> Iterator[Violation]:
    if context.profile.updates and context.recipe.data.num_workers:
        message = f"is {context.recipe.data.num_workers}, but batches of a rollout cannot be prepared in advance"
        yield "data.num_workers", f"{message}; set it to 0"


def _packed_prompts(context: RuleContext) -> Iterator[Violation]:
    packing = context.recipe.data.packing
    if context.profile.updates and packing != "none" and "packing" in context.stage.capabilities:
        message = f"is {packing}, but answers are sampled to the prompt of each conversation"
        yield "data.packing", f"{message}; set it to none, or {context.stage.section_name}.on_policy to 0"


def _stale(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    key = "rollout.max_staleness"
    if rollout is None or "async_rollout" not in context.stage.capabilities:  # the second case is reported elsewhere
        return
    lag = rollout.max_staleness
    if not lag:
        return
    name = context.stage.section_name
    if not isinstance(context.section, CorrectsRollouts) or context.section.rollout_correction == "none":
        message = f"is {lag}, but stale completions are off-policy"
        yield key, f"{message}; set {name}.rollout_correction to tis or mis, or set it to 0"
    if context.profile.updates > 1:
        yield (
            key,
            f"is {lag}, and {name}.updates {context.profile.updates}: choose one of them, and set the other to 0 or 1",
        )
    if rollout.dynamic_sampling:
        yield (
            key,
            f"is {lag}, but rollout.dynamic_sampling samples again with newer weights; set it to 0, or that to false",
        )


def _cut_sampling(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    if rollout is None:
        return
    for key, is_cut in (("top_k", rollout.top_k > 0), ("top_p", rollout.top_p < 1)):
        value = value_at(rollout, key)
        if is_cut and rollout.engine != "local":
            message = f"is {value}, but engine {rollout.engine} samples from the full distribution"
            yield f"rollout.{key}", f"{message}; remove it, or set rollout.engine to local"
        corrects = isinstance(context.section, CorrectsRollouts) and context.section.rollout_correction != "none"
        if is_cut and corrects:
            name = context.stage.section_name
            message = f"is {value}, but {name}.rollout_correction needs the probabilities of the full distribution"
            yield f"rollout.{key}", f"{message}; remove it, or set that to none"


def _no_server(context: RuleContext) -> Iterator[Violation]:
    rollout = context.rollout
    if rollout is not None and rollout.engine == "openai" and not value_at(rollout, "openai").urls:
        message = "is empty; start `llmsuite serve MODEL --rl` and set its address"
        yield "rollout.openai.urls", f'{message}, such as ["http://127.0.0.1:8000"]'


def _late_server(context: RuleContext) -> Iterator[Violation]:
    rewards = context.reward
    if rewards is None or "http" not in rewards.functions:
        return
    timeout = value_at(rewards, "http").timeout
    if timeout > rewards.time_limit:
        message = f"is {timeout:g}, longer than reward.time_limit {rewards.time_limit:g}"
        yield "reward.http.timeout", f"{message}, which ends the call including its retries; lower it, or raise that"


def _no_environment(context: RuleContext) -> Iterator[Violation]:
    if context.reward is None or "environment" not in context.reward.functions:
        return
    if context.environment is None or context.environment.name is None:
        message = "has environment, the reward of an environment, but environment.name is null"
        yield "reward.functions", f"{message}; set environment.name, or remove the reward"


ROLLOUT_RULES = (
    Rule("a completion as long as `data.max_length`", "there is no room for a prompt", (), _no_room),
    Rule(
        "`rollout.num_generations` 1 where completions of a prompt are compared",
        "there is nothing to compare with",
        (),
        _one_completion,
    ),
    Rule(
        "steps, evaluations or checkpoints at intervals that are not multiples of `updates`",
        "checkpoints do not contain rollouts, so a run can only be interrupted between rollouts",
        (),
        _split_rollout,
    ),
    Rule(
        "epochs with `rollout.dynamic_sampling`",
        "the number of prompts of a step depends on the sampled completions",
        (),
        _uneven_epochs,
    ),
    Rule("`roll_back` with rollouts", "it would skip prompts of a rollout in progress", (), _rolled_back),
    Rule(
        "rollouts with `lora.base_dtype`, with `lora.dropout`, or with adapters and a copy as reference",
        "the model that samples has to be the model that is trained",
        (),
        _sampled_by_another_model,
    ),
    Rule(
        "`rollout.max_staleness` without a correction, or with `updates` or `dynamic_sampling`",
        "stale completions are off-policy, and the other two assume fresh ones",
        (),
        _stale,
    ),
    Rule(
        "`rollout.top_k` or `rollout.top_p` with another engine than local, or with a `rollout_correction`",
        "tokens are sampled from a part of the distribution, and their log-probabilities are of all of it",
        (),
        _cut_sampling,
    ),
    Rule("`rollout.engine` openai without `urls`", "there is no server to sample from", (), _no_server),
    Rule(
        "`reward.http.timeout` above `reward.time_limit`",
        "the call ends before its timeout",
        (),
        _late_server,
    ),
    Rule("the reward `environment` without an environment", "nothing would compute it", (), _no_environment),
    Rule("`data.packing` with rollouts", "a sample has one prompt", (), _packed_prompts),
    Rule("`data.num_workers` with rollouts", "batches of a rollout cannot be prepared in advance", (), _read_ahead),
)
"""Rules between sections, for stages with rollouts."""
