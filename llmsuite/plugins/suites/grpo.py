"""Conversion of GRPO's arguments, whose names TRL and ms-swift share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from llmsuite.contract.schema.degrees import launch_section
from llmsuite.plugins.suites.conversion.kinds import WORDS, is_on, number
from llmsuite.plugins.suites.conversion.refuse import Refusal
from llmsuite.plugins.suites.suite import Run

_LOSSES = ("grpo", "dapo", "dr_grpo", "cispo", "sapo")
_TIME_LIMIT = 60.0
"""Seconds for one accuracy reward, whose own limits, after which it is 0, are below."""
_OTHER_SAMPLING = "rollouts have temperature, top_k and top_p"


@dataclasses.dataclass(frozen=True)
class GrpoDefaults:
    """Defaults of a suite's arguments."""

    beta: float
    temperature: float
    loss: str
    rewards: Mapping[str, str]
    """Names of the suite's reward functions -> names of the rewards here that are the same functions."""
    keeps_groups: bool = False
    """True if a rollout for several steps is split in the order of its completions, so that whole groups may stay
    together."""
    corrects_servers: bool = False
    """True if the loss is weighted by the probabilities with which vLLM sampled, unless an argument turns it off."""


def sections(run: Run, recipe: dict[str, Any], has_adapters: bool, defaults: GrpoDefaults) -> dict[str, Any]:
    """Return sections `rollout`, `reward`, `grpo` and `eval_rollout`; change batch sizes of section `train` from
    completions to prompts. Both suites leave out prompts at the end of an epoch that do not fill a step."""
    size = run.integer("num_generations", 8)
    length = run.integer("max_completion_length", 512)
    temperature = float(run.number("temperature", defaults.temperature))
    updates = _count_prompts(run, recipe, size, defaults)
    recipe["data"]["drop_last"] = True
    if recipe["data"].pop("num_workers", None):
        run.note("data.num_workers: 0, because batches of a rollout cannot be prepared in advance")
    rollout: dict[str, Any] = {
        "num_generations": size,
        "max_completion_length": length,
        "temperature": temperature,
        **_cut_sampling(run, defaults),
    }
    rewards = _rewards(run, defaults)
    own = _own_section(run, has_adapters, defaults)
    if updates > 1:
        own["updates"] = updates
    if set(rewards) == {"trl_accuracy"} and own.get("scale_rewards") == "batch":
        why = "TRL leaves out completions whose solution cannot be parsed, whose reward is 0 here"
        run.refuse("scale_rewards", "batch", why)
    found: dict[str, Any] = {"rollout": rollout, "reward": {"functions": rewards}, "grpo": own}
    if {"trl_accuracy", "swift_accuracy"} & set(rewards):
        found["reward"]["time_limit"] = _TIME_LIMIT
    evaluated = run.integer("num_generations_eval", None)
    if "eval" in recipe["data"]:
        found["eval_rollout"] = {"num_generations": evaluated or size, "temperature": temperature}
    elif evaluated is not None:
        run.left_out("num_generations_eval", evaluated, "there are no rows to evaluate on")
    return found


def _cut_sampling(run: Run, defaults: GrpoDefaults) -> dict[str, Any]:
    """Return `rollout.top_k` and `rollout.top_p`. The loss of both suites has the probabilities of the full
    distribution too."""
    found: dict[str, Any] = {}
    top_k = run.integer("top_k", 0)
    if top_k > 0:  # -1 means all tokens
        found["top_k"] = top_k
    top_p = float(run.number("top_p", 1.0))
    if top_p != 1:
        found["top_p"] = top_p
    key = "vllm_importance_sampling_correction"
    if found and defaults.corrects_servers and is_on(run.given("use_vllm")) and run.given(key) is not False:
        why = f"is part of the weights of the loss with {key}, which is on by default; set that to false"
        name = next(iter(found))
        run.refuse(name, found[name], why)
    return found


def _count_prompts(run: Run, recipe: dict[str, Any], size: int, defaults: GrpoDefaults) -> int:
    """Set the batch sizes of prompts, of which each has `size` completions. Return the number of steps of a rollout."""
    train = recipe["train"]
    completions = train["global_batch_size"]
    micro = train["micro_batch_size"]
    per_step = completions // (micro * run.data_ranks)
    steps = run.integer("steps_per_generation", None)
    generated = run.integer("generation_batch_size", None)
    updates = 1
    if steps not in (None, per_step) or generated not in (None, completions):
        is_whole = steps is not None and steps % per_step == 0 and micro * per_step % size == 0
        if defaults.keeps_groups and is_whole and generated in (None, completions * steps // per_step):
            updates = steps // per_step
        else:
            key = "steps_per_generation" if steps not in (None, per_step) else "generation_batch_size"
            why = "a rollout is for one step, or for several with whole groups each: grpo.updates"
            run.refuse(key, run.given(key), why)
    again = run.integer("num_iterations", 1)
    if again != 1:
        run.refuse("num_iterations", again, "each completion is trained on once")
    if size < 1 or completions % size:
        run.refuse("num_generations", size, f"a step has {completions} completions; expected a multiple of it")
        return 1
    prompts = completions // size
    if prompts % run.data_ranks:
        _use_fewer_ranks(run, recipe, prompts)
    train["global_batch_size"] = prompts
    train["micro_batch_size"] = math.gcd(max(1, micro // size), prompts // run.data_ranks)
    if updates > 1:
        _count_steps(run, recipe, prompts * updates, updates)
    return updates


def _count_steps(run: Run, recipe: dict[str, Any], prompts: int, updates: int) -> None:
    """Set `train.max_steps` where a rollout of `prompts` is for several steps: a run then ends with a rollout."""
    train = recipe["train"]
    rows = recipe["data"].get("sample")
    if "max_steps" not in train and isinstance(rows, int) and "holdout" not in recipe["data"]:
        train["max_steps"] = train.pop("num_epochs") * (rows // prompts) * updates
        if "warmup_ratio" in train:
            train["warmup_steps"] = math.ceil(train.pop("warmup_ratio") * train["max_steps"])
        run.note(f"train.max_steps: {train['max_steps']}, {updates} for each {prompts} of {rows} rows")
    elif "max_steps" not in train or train["max_steps"] % updates:
        key = "num_train_epochs" if "max_steps" not in train else "max_steps"
        run.refuse(
            key, run.given(key), f"may end between the {updates} steps of a rollout; set max_steps to a multiple"
        )


def _use_fewer_ranks(run: Run, recipe: dict[str, Any], prompts: int) -> None:
    """Set the number of data ranks to a divisor of the prompts of a step, because the completions of a prompt stay on
    one of them, and divide matrices over the other devices where the model allows it. No number of the training depends
    on either."""
    total = run.data_ranks
    problems = _tensor_problems(run)
    degrees = [
        (ranks, tensor)
        for ranks in range(1, min(prompts, total) + 1)
        for tensor in range(1, total // ranks + 1)
        if prompts % ranks == 0 and (tensor == 1 or not problems(tensor))
    ]
    ranks, tensor = max(degrees, key=lambda degree: (degree[0] * degree[1], degree[0]))
    run.data_ranks = ranks
    if tensor > 1:
        recipe["parallel"]["tensor_parallel_degree"] = tensor
    if ranks * tensor < total:
        recipe["launch"] = launch_section(ranks * tensor)
    if ranks == 1:
        recipe["parallel"].pop("sharding", None)
    run.note(
        f"launch: the {prompts} prompts of a step are on {ranks} data ranks, as the completions of a prompt stay on "
        f"one; {ranks * tensor} of {total} devices are used, with tensor_parallel_degree {tensor}"
    )


def _tensor_problems(run: Run) -> Callable[[int], list[str]]:
    """Return the function from a tensor-parallel degree to the reasons why the model cannot have it; of a model whose
    sizes are not known it cannot."""
    plan = run.family.shard_plan
    preset = run.family.presets.get(run.preset or "")
    if plan is None or preset is None:
        return lambda degree: ["the sizes of the model are not known"]
    config = run.family.config_cls(**preset)
    return lambda degree: list(plan.problems(config, degree))


def _rewards(run: Run, defaults: GrpoDefaults) -> dict[str, float]:
    names = [str(name) for name in run.words("reward_funcs")]
    weights = run.take("reward_weights", WORDS)
    if isinstance(weights, str):
        weights = weights.split()
    elif weights is not None and not isinstance(weights, list):
        weights = [weights]
    if not names:
        run.refuse("reward_funcs", "not given", "name a reward")
    for name in names:
        if name not in defaults.rewards:
            known = ", ".join(defaults.rewards)
            why = f"of its rewards, these are the same functions here: {known}; nearest key: reward.functions"
            run.refuse("reward_funcs", name, why)
    if weights is not None and len(weights) != len(names):
        run.refuse("reward_weights", weights, f"has {len(weights)} numbers for {len(names)} rewards")
        weights = None
    numbers = [1.0] * len(names)
    if weights is not None:
        numbers = [_weight(weight, run.location("reward_weights")) for weight in weights]
    found: dict[str, float] = {}
    for name, weight in zip(names, numbers):  # a reward may be named twice
        reward = defaults.rewards.get(name, name)
        found[reward] = found.get(reward, 0.0) + weight
    return found


def _weight(value: Any, where: str) -> float:
    """Return a weight, which is a text on a command line. Raises UserError for another value."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return float(number(value, where))


def _own_section(run: Run, has_adapters: bool, defaults: GrpoDefaults) -> dict[str, Any]:
    given = run.take("loss_type", WORDS) or defaults.loss
    loss = ", ".join(map(str, given)) if isinstance(given, list) else str(given)
    if loss not in _LOSSES:
        run.refuse("loss_type", loss, f"grpo.loss has {', '.join(_LOSSES)}")
    own: dict[str, Any] = {"loss": loss if loss in _LOSSES else defaults.loss, "patience": None}
    low = float(run.number("epsilon", 0.2))
    high = run.number("epsilon_high", None)
    if loss == "cispo":  # which bounds the ratio by this number itself
        bound = low if high is None else high
        if bound < 1:
            why = "is the bound of the ratio of cispo; grpo.epsilon_high is what it exceeds 1 by"
            run.refuse("epsilon_high", bound, why)
        own["epsilon_high"] = float(max(0.0, bound - 1))
    elif loss != "sapo":
        own["epsilon"] = low
        if high is not None:
            own["epsilon_high"] = float(high)
    delta = run.number("delta", None)
    if delta is not None and loss in ("cispo", "sapo"):
        run.left_out("delta", delta, f"belongs to the other losses than {loss}")
    elif delta is not None and delta <= 1 + (low if high is None else high):
        run.refuse("delta", delta, "has to be above 1 + epsilon_high: grpo.dual_clip bounds ratios beyond the clip")
    elif delta is not None:
        own["dual_clip"] = float(delta)
    level = run.take("importance_sampling_level") or "token"
    if level not in ("token", "sequence"):
        run.refuse("importance_sampling_level", level, "grpo.importance_sampling_level has token and sequence")
    elif level != "token":
        own["importance_sampling_level"] = level
    run.take("scale_rewards")  # checks its kind; its "none" is a value
    given_scale = run.given("scale_rewards")
    scale = {True: "group", False: "none"}.get(given_scale, given_scale or "group")
    if scale not in ("group", "batch", "none"):
        run.refuse("scale_rewards", scale, "grpo.scale_rewards has group, batch and none")
    elif scale != "group":
        own["scale_rewards"] = scale
    beta = float(run.number("beta", defaults.beta))
    if beta:
        own |= {"beta": beta, "reference": "adapter_off" if has_adapters else "copy"}
    return own


def _is_other_than(*values: Any) -> Any:
    return lambda value: value is not None and value not in values


REFUSED: Mapping[str, Refusal] = {
    "min_p": Refusal(_OTHER_SAMPLING, _is_other_than(0)),
    "repetition_penalty": Refusal(_OTHER_SAMPLING, _is_other_than(1)),
    "generation_kwargs": Refusal(_OTHER_SAMPLING),
    "top_entropy_quantile": Refusal("all tokens of completions count", _is_other_than(1)),
    "entropy_coef": Refusal("nearest key: grpo.entropy_coef"),
    "use_adaptive_entropy": Refusal("nearest key: grpo.entropy_coef"),
    "sync_ref_model": Refusal("the reference is the initial model"),
    "reward_model*": Refusal("nearest key: reward.model.weights"),
    "async_generate": Refusal("each step trains on completions of its own weights; nearest key: rollout.max_staleness"),
}
IGNORED: Mapping[str, str] = {
    "use_vllm": "rollout.engine is local; for servers: rollout.engine openai",
    "vllm_*": "rollout.engine is local; for servers: rollout.engine openai",
    "sleep_level": "rollout.engine is local; for servers: rollout.engine openai",
    "log_completions": "metrics go to the terminal and to metrics.jsonl",
    "log_entropy": "metrics go to the terminal and to metrics.jsonl",
    "wandb_log_unique_prompts": "metrics go to the terminal and to metrics.jsonl",
    "num_completions_to_print": "metrics go to the terminal and to metrics.jsonl",
    "ref_model_*": "belongs to sync_ref_model",
    **dict.fromkeys(("top_k", "top_p", "min_p"), "generation is a command of its own: llmsuite generate"),
    **dict.fromkeys(("repetition_penalty", "top_entropy_quantile"), "has its default value"),
}
TRANSLATIONS: Mapping[str, str] = {
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "num_generations": "rollout.num_generations",
    "max_completion_length": "rollout.max_completion_length",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "num_generations_eval": "eval_rollout.num_generations",
    "steps_per_generation": "grpo.updates, which is 1",
    "generation_batch_size": "grpo.updates, which is 1",
    "num_iterations": "grpo.updates, which is 1",
    "epsilon*": "grpo.epsilon, grpo.epsilon_high",
    "delta": "grpo.dual_clip",
    "importance_sampling_level": "grpo.importance_sampling_level",
    "scale_rewards": "grpo.scale_rewards",
    "beta": "grpo.beta",
    "loss_type": "grpo.loss",
}
