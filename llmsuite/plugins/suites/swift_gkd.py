"""Conversion of `swift rlhf --rlhf_type gkd`: distillation, on the rows or on answers of the student."""

from __future__ import annotations

from typing import Any

from llmsuite.base.safe_files import exists
from llmsuite.plugins.suites.conversion.family import preset_of
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.suite import Run

_END_OF_TURN = "<|im_end|>"
"""Token that ends an answer in the templates that are known."""


def has_rollouts(run: Run) -> bool:
    """Return True if the student samples answers. Does not mark `lmbda` as used."""
    share = run.given("lmbda")
    return run.section == "gkd" and not (isinstance(share, (int, float)) and share <= 0)


def sections(run: Run, recipe: dict[str, Any], hub: str) -> dict[str, Any]:
    """Return section `gkd`, and section `rollout` where the student samples; change keys of `data` that are others
    there. `hub` is the prefix of names on the hub."""
    data = recipe["data"]
    samples = has_rollouts(run)
    share = float(run.number("lmbda", 0.5))
    temperature = float(run.number("temperature", 0.9))
    own: dict[str, Any] = {**_teacher(run, hub), "beta": float(run.number("beta", 0.5)), "temperature": temperature}
    weight = run.number("sft_alpha", 0)
    if weight:
        own["sft_weight"] = float(weight)
    own |= _supervised(run)
    _check(run, recipe)
    data["drop_last"] = True  # its sampler leaves out rows that do not fill a step
    if recipe["train"]["micro_batch_size"] > 1:
        data["group_by_length"] = False
    own["mean"] = "micro_batches"
    run.note("gkd.mean: micro_batches, so train.micro_batch_size changes the loss, as there")
    if not samples:
        return {"gkd": own}
    if data.pop("num_workers", None):
        run.note("data.num_workers: 0, because batches of a rollout cannot be prepared in advance")
    length = run.integer("max_completion_length", 512)
    own["on_policy"] = share
    if share >= 1:
        own["truncate"] = True  # the answers in the data are not used
    if _END_OF_TURN not in data.get("chat_template", ""):
        why = "samples answers, whose last tokens depend on the template; known is that of Qwen2.5 and Qwen2"
        run.refuse("lmbda", share, f"{why}; nearest key: gkd.on_policy")
    if "last_turn" not in own:
        run.refuse(
            "loss_scale", "default", "supervises all answers of a conversation; with sampled ones, only these are"
        )
    own["answer_end"] = f"{_END_OF_TURN}\n"
    rollout: dict[str, Any] = {
        "num_generations": 1,
        "max_completion_length": length,
        "temperature": temperature,
        **_cut_sampling(run),
        "stop": [_END_OF_TURN],
    }
    if share < 1:
        own["row_length"] = data["max_length"]
    data["max_length"] += length + 2  # with the end of a truncated answer
    limit = run.given("vllm_max_model_len")
    if is_on(run.given("use_vllm")) and isinstance(limit, int) and limit < data["max_length"] - 2:
        run.refuse("vllm_max_model_len", limit, "is less than max_length and max_completion_length together")
    run.note("data.max_length: max_length, max_completion_length and the end of an answer; rows that are longer than "
             "max_length alone are dropped and counted: ms-swift replaces them by others in steps on the answers in "
             "the data, and samples answers to their prompts in the other steps")  # fmt: skip
    run.note("evaluations compute the loss on the answers in the data; ms-swift samples answers in those that it draws")
    return {"rollout": rollout, "gkd": own}


def _teacher(run: Run, hub: str) -> dict[str, Any]:
    """Return the keys of the teacher."""
    name = run.take("teacher_model")
    if name is None:
        run.refuse("teacher_model", "not given", "the model is then its own teacher, with its current weights")
        return {}
    name = str(name)
    is_local = name.startswith((".", "/", "~")) or exists(name)
    found = {"teacher": name if is_local else f"{hub}{name}"}
    preset = preset_of(name, run.family)
    if preset is not None:
        found["teacher_preset"] = preset
    return found


def _supervised(run: Run) -> dict[str, Any]:
    """Return `gkd.last_turn`, by `loss_scale`, whose default is last_round; a template may have taken it."""
    scale = run.take("loss_scale") if "loss_scale" in run.left else run.given("loss_scale")
    if scale not in (None, "last_round", "default"):
        run.refuse("loss_scale", scale, "all tokens of assistant turns have the same weight")
    return {} if scale == "default" else {"last_turn": True}


def _check(run: Run, recipe: dict[str, Any]) -> None:
    """Refuse what is another job."""
    if run.flag("seq_kd"):
        run.refuse("seq_kd", True, "ms-swift does not support it")
    top = run.take("gkd_logits_topk")
    if top is not None:
        run.refuse("gkd_logits_topk", top, "compares the most likely tokens only; gkd compares all")
    if is_on(run.given("use_liger_kernel")):
        run.refuse("use_liger_kernel", run.take("use_liger_kernel"), "has another implementation of the loss")
    strategy = run.take("truncation_strategy") or "delete"
    if strategy != "delete":
        run.refuse("truncation_strategy", strategy, "longer rows are dropped")
    if "packing" in recipe["data"]:
        run.refuse("packing", True, "the loss is a mean over each pack, and packs are filled in another way")
    train = recipe["train"]
    steps = train["global_batch_size"] // (train["micro_batch_size"] * run.data_ranks)
    for key, usual in (("steps_per_generation", steps), ("generation_batch_size", train["global_batch_size"])):
        value = run.integer(key, None)
        if value not in (None, usual):
            run.refuse(key, value, "each step samples answers of its own")


def _cut_sampling(run: Run) -> dict[str, Any]:
    """Return `rollout.top_k` and `rollout.top_p`; -1 means all tokens."""
    found: dict[str, Any] = {}
    top_k = run.integer("top_k", -1)
    if top_k > 0:
        found["top_k"] = top_k
    top_p = float(run.number("top_p", 1.0))
    if top_p != 1:
        found["top_p"] = top_p
    return found
