"""Conversion of ms-swift's arguments: `swift sft`, `swift pt` and `swift rlhf`, in a shell script or a YAML or JSON
file. The `megatron` commands are in `swift_megatron`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists, read_regular
from llmsuite.plugins.suites import grpo, model, swift_arguments, swift_gkd, swift_templates, trainer
from llmsuite.plugins.suites.conversion.arguments import read_command
from llmsuite.plugins.suites.conversion.family import is_quantised
from llmsuite.plugins.suites.conversion.kinds import ONE_OR_MAPPING, WORDS, is_on
from llmsuite.plugins.suites.suite import Run, Suite
from llmsuite.plugins.suites.swift_data_sets import OWN_RULES, own_format

_COMMANDS = ("sft", "pt", "rlhf")
_LISTS = (
    "dataset", "val_dataset", "target_modules", "loss_type", "modules_to_save", "report_to", "reward_funcs",
    "reward_weights",
)  # fmt: skip
"""Arguments with several values, separated by spaces on the command line."""
_ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "USE_HF")
"""Environment variables that set the number of ranks and the hub."""
_STAGES = {
    "dpo": "dpo", "simpo": "dpo", "cpo": "dpo", "orpo": "dpo", "kto": "kto", "rm": "rm", "grpo": "grpo", "gkd": "gkd",
}  # fmt: skip
_GRPO = grpo.GrpoDefaults(
    beta=0.04, temperature=0.9, loss="grpo", rewards={"accuracy": "swift_accuracy", "format": "swift_format"},
    keeps_groups=True,
)  # fmt: skip
_LOSSES = {
    "dpo": {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean"},
    "simpo": {"simpo": "simpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "orpo": {"orpo": "orpo"},
}
"""Values of `loss_type` -> dpo.loss, by `rlhf_type`; the first one is the default. orpo has no `loss_type`."""
_SELF_COGNITION = "self-cognition"
"""Data set with places for the names of a model and its author."""
_TO_16_BITS = {None: "bf16", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp16"}
"""Precision by `torch_dtype`; float32 also trains in mixed precision."""
_MIN_BATCH = 16
"""Minimum number of samples that gradients are accumulated over by default."""


def read_shell(path: Path) -> dict[str, Any]:
    """Return the arguments of the one training command in a script, with the command and its environment variables.

    Raises:
        UserError: the script does not have exactly one training command.
    """
    return read_command(path, _find_command, _ENVIRONMENT)


def _find_command(words: list[str]) -> tuple[int, str] | None:
    """Return the index of the first argument of a training command and its name; None for other words."""
    for at, word in enumerate(words):
        script = re.fullmatch(r".*swift/cli/(_megatron/)?(sft|pt|rlhf)\.py", word)
        if script is not None:
            return at + 1, f"{'megatron' if script[1] else 'swift'} {script[2]}"
        if word in ("swift", "megatron") and words[at + 1 : at + 2] and words[at + 1] in _COMMANDS:
            return at + 2, f"{word} {words[at + 1]}"
    return None


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    for key in _LISTS:
        if isinstance(values.get(key), str):
            values[key] = values[key].split()
    return values


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    command = str(values.get("command") or ("swift rlhf" if "rlhf_type" in values else "swift sft"))
    refused = f"{name}: no recipe is this job of ms-swift"
    kind = "sft"
    if command == "swift rlhf":
        kind = str(values.get("rlhf_type") or "dpo")
    if kind != "sft" and kind not in _STAGES:
        raise UserError(f"{refused}: rlhf_type {kind} {without_stage(kind)}")
    stage = requested or _STAGES.get(kind, kind)
    # train_type in older versions
    kind = str(values.get("tuner_type") or values.get("train_type") or "lora")
    if stage == "sft" and kind == "lora":
        return "lora"
    return stage


def without_stage(kind: str) -> str:
    """Return the reason why a kind of `swift rlhf` cannot be converted, to follow its name."""
    if kind in ("grpo", "ppo"):
        return f"has its own rewards and sampling; llmsuite recipe new --stage {kind}"
    if kind in ("simpo", "cpo", "orpo"):
        return "is not known with Megatron"
    if kind == "rm":
        return "has a head whose initial values are not known; llmsuite recipe new --stage rm"
    if kind == "gkd":
        return "is only converted from swift rlhf; llmsuite recipe new --stage gkd"
    return "has no stage"


def _recipe(run: Run) -> dict[str, Any]:
    name = "tuner_type"
    if run.given("train_type") and not run.given("tuner_type"):
        name = "train_type"
    kind = kind_of_tuner(run, "lora")
    run.take("command"), run.take("rlhf_type")
    is_full = kind == "full"
    hub = hub_of(run)
    dtype = precision(run)
    defaults = trainer.Defaults(
        learning_rate=1e-5 if is_full else 1e-4, micro_batch_size=1, lr_schedule="cosine", weight_decay=0.1,
        adam_beta2=0.95, recompute=True, precision=dtype,
        master_weights=not is_full or dtype == "fp16" or _is_wrapped(run),
    )  # fmt: skip
    parallel = trainer.parallel(run)
    read_devices(run)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"ms-swift {run.name}",
        "model": model.model(run, hub=hub),
        "data": data(run, hub),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults),
        "launch": trainer.launch(run),
    }
    model.revision(run, recipe["model"], hub)
    if run.section != "gkd":  # it adds to data.max_length
        _add_positions(run, recipe)
    _accumulate(run, recipe["launch"])
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    evaluate(run, recipe)
    if run.section == "grpo":
        recipe |= _rollouts(run, recipe, kind == "lora")
    elif run.section == "gkd":
        recipe |= swift_gkd.sections(run, recipe, hub)
        _add_positions(run, recipe)
    elif own := own_section(run):
        recipe[run.section] = own
        average_micro_batches(run, recipe)
    if kind == "lora":
        recipe["lora"] = _lora(run)
    elif not is_full:
        run.refuse(name, kind, "supported are full fine-tuning (full) and adapters (lora)")
    metric = run.given("metric_for_best_model")
    recipe["checkpoint"] = trainer.checkpoint(run, has_evaluation(recipe), defaults)
    _stop_early(run, recipe, metric)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _add_positions(run: Run, recipe: dict[str, Any]) -> None:
    """Raise the number of positions of a model to `data.max_length`: ms-swift trains on longer rows than the model had,
    by the same rotary embedding."""
    length = recipe["data"]["max_length"]
    if run.preset is None or run.section == "grpo":
        return
    config = run.family.config_cls(**run.family.presets[run.preset])
    shape = dataclasses.asdict(config)
    is_plain = shape.get("rope_theta") is not None and not shape.get("rope_scaling")
    if is_plain and length > config.max_position_embeddings:
        recipe["model"]["config"] = {"max_position_embeddings": length}
        run.note(f"model.config.max_position_embeddings: {length}, as data.max_length; the model had "
                 f"{config.max_position_embeddings}")  # fmt: skip


def _is_wrapped(run: Run) -> bool:
    """Return True if DeepSpeed has the parameters, or FSDP, for which accelerate makes them float32."""
    return is_on(run.given("deepspeed")) or is_on(run.given("fsdp"))


def _stop_early(run: Run, recipe: dict[str, Any], metric: Any) -> None:
    """Set early stopping, for which ms-swift counts checkpoints: the same as evaluations at the same steps."""
    key = "early_stop_interval"
    patience = run.integer(key, 0)
    if patience <= 0:
        return
    steps = recipe["train"].get("eval_steps")
    if steps is None or steps != recipe["checkpoint"].get("save_steps"):
        run.refuse(key, patience, "counts checkpoints; train.early_stopping.patience counts evaluations, which are "
                                  "at other steps")  # fmt: skip
    elif metric not in (None, "loss", "eval_loss") or run.section == "grpo":
        run.refuse(key, patience, "is for another metric than the loss; nearest key: train.early_stopping.metric")
    else:
        recipe["train"]["early_stopping"] = {"patience": patience}


def kind_of_tuner(run: Run, default: str) -> str:
    """Return `tuner_type`, which is called `train_type` in older versions."""
    given = run.take("tuner_type")
    older = run.take("train_type")
    if given is not None and older is not None:
        run.left_out("train_type", older, "tuner_type takes precedence")
    return str(given or older or default)


def _rollouts(run: Run, recipe: dict[str, Any], has_adapters: bool) -> dict[str, Any]:
    """Return the sections of GRPO; prompts and completions share `data.max_length`."""
    _take_completion_length(run)
    found = grpo.sections(run, recipe, has_adapters, _GRPO)
    found["rollout"] |= swift_templates.stop_of(run, recipe["data"])
    teacher = run.take("teacher_model")
    if teacher is not None:
        run.refuse("teacher_model", teacher, "there is no teacher")
    if run.given("max_length") is not None:
        _add_completion_length(run, recipe["data"], found["rollout"]["max_completion_length"])
    strategy = run.take("truncation_strategy") or "left"
    if strategy == "left":
        run.note("data.max_length: longer prompts are dropped and counted; ms-swift truncates them on the left")
    elif strategy != "delete":
        run.refuse("truncation_strategy", strategy, "longer prompts are dropped")
    if is_on(run.take("overlong_filter")):
        found["grpo"] |= {"mask_truncated": True, "count_truncated": True}
    for key, usual in (("advantage_estimator", "grpo"), ("loss_scale", "last_round")):
        value = run.take(key)
        if value not in (None, usual):
            run.refuse(key, value, f"supported is {usual}")
    prefix = run.take("response_prefix")
    if is_on(prefix):
        run.refuse("response_prefix", prefix, "begins each completion; nearest key: data.chat_template")
    if is_on(run.take("kl_in_reward")):
        run.refuse("kl_in_reward", True, "the divergence is in the loss; nearest key: grpo.kl_in")
    return found


def _add_completion_length(run: Run, data: dict[str, Any], length: int) -> None:
    """Add the length of completions to `data.max_length`, up to that of vLLM, which may be all positions of the model:
    ms-swift has shorter completions there."""
    data["max_length"] += length
    limit = run.given("vllm_max_model_len")
    if is_on(run.given("use_vllm")) and isinstance(limit, int) and limit < data["max_length"]:
        run.take("vllm_max_model_len")
        data["max_length"] = limit
        run.note(f"data.max_length: {limit}, of vLLM; prompts that leave less than max_completion_length are dropped "
                 "and counted; ms-swift truncates their completions")  # fmt: skip
    else:
        run.note("data.max_length: max_length and max_completion_length, of prompts and completions")


def _take_completion_length(run: Run) -> None:
    """Set `max_completion_length` to the first of its three names that is given."""
    names = ("response_length", "max_new_tokens", "max_completion_length")
    first, *others = [name for name in names if is_on(run.given(name))] or ["max_completion_length"]
    if first == "max_completion_length":
        return
    length = run.integer(first, None)
    for name in others:
        run.left_out(name, run.take(name), f"{first} takes precedence")
    run.left["max_completion_length"] = length


def hub_of(run: Run) -> str:
    """Return the prefix of names on the hub that a file means: ModelScope unless it says Hugging Face."""
    return "" if is_on(run.take("use_hf")) | is_on(run.take("USE_HF")) else "ms:"


def precision(run: Run) -> str:
    """Return the precision of `torch_dtype`."""
    dtype = run.take("torch_dtype")
    if dtype is None and is_quantised(str(run.given(run.suite.model_key))):
        run.refuse("torch_dtype", "not given", "that of quantised models depends on the version; set it to bfloat16")
    if dtype not in _TO_16_BITS:
        run.refuse("torch_dtype", dtype, "engine.precision has fp32, bf16 and fp16")
    return _TO_16_BITS.get(dtype, "bf16")


def read_devices(run: Run) -> None:
    """Set the number of devices that the launcher's variables name."""
    ranks = _environment_number(run, "NPROC_PER_NODE", 0)
    machines = _environment_number(run, "NNODES", 1)
    run.file_devices = ranks * machines or _ray_devices(run) or None


def _environment_number(run: Run, key: str, default: int) -> int:
    """Return a number of ranks or machines; 0 for a variable that the script does not set."""
    given = run.given(key)
    if not isinstance(given, str) or not given.startswith("$"):
        return int(run.integer(key, default))
    run.left_out(key, run.take(key), "is set outside of the script; --num_devices N gives the number of devices")
    return 0


def _ray_devices(run: Run) -> int:
    """Return the number of devices of `device_groups`, the ranks of a training on Ray; 0 if it is not given."""
    given = run.take("device_groups", ONE_OR_MAPPING)
    if given is None:
        return 0
    groups = dict(given) if isinstance(given, dict) else {}
    groups.pop("nproc_per_node", None)
    group = next(iter(groups.values())) if len(groups) == 1 else None
    count = 0
    if isinstance(group, dict) and group.get("workers") == ["default"]:
        ranks = group.get("ranks")
        found = None
        if isinstance(ranks, str):
            found = re.fullmatch(r"list\(range\((?:0, *)?(\d+)\)\)", ranks)
        if found is not None:
            count = int(found[1])
        elif isinstance(ranks, int) and not isinstance(ranks, bool):
            count = ranks
    if count < 1:
        run.refuse("device_groups", given, "names other ranks on Ray than 0 to N of one group, whose worker is default")
    return count


def _accumulate(run: Run, launch: Mapping[str, Any]) -> None:
    """Set the default of gradient accumulation: at least 16 samples, or for grpo one batch. Ranks that share sequences
    in ms-swift have sequences of their own here, in fewer forward passes."""
    total = launch["num_devices"] * launch.get("nnodes", 1)
    sharing = run.integer("sequence_parallel_size", 1)
    if sharing > 1 and run.section == "grpo" and total % sharing == 0:
        # its trainer accumulates over as many more passes, so that a step has the same completions
        run.note("launch: sequences are not split over ranks, which needs more memory; a step has the same completions")
    elif sharing > 1:
        passes = run.given("gradient_accumulation_steps")
        if run.section != "sft" or total % sharing or not isinstance(passes, int) or passes % sharing:
            why = (
                "sequences are split over these ranks; in sft and grpo they are data ranks here, if it divides their "
                "number and, in sft, gradient_accumulation_steps"
            )
            run.refuse("sequence_parallel_size", sharing, why)
            return
        run.left["gradient_accumulation_steps"] = passes // sharing
        run.note("launch: sequences are not split over ranks, which needs more memory; the global batch is the same")
    if run.given("gradient_accumulation_steps") is None and run.section != "grpo":
        size = run.given("per_device_train_batch_size") or 1
        if isinstance(size, int) and size > 0:
            run.left["gradient_accumulation_steps"] = max(1, math.ceil(_MIN_BATCH / size / total))


def has_evaluation(recipe: Mapping[str, Any]) -> bool:
    """Return True if there are rows to evaluate on."""
    return "eval" in recipe["data"] or "holdout" in recipe["data"]


def evaluate(run: Run, recipe: dict[str, Any]) -> None:
    """Set the evaluation keys, by default those of checkpoints, and the formats of the data that is used."""
    _evaluate(run, recipe)
    formats = recipe["data"].get("format", {})
    if isinstance(formats, str):
        return
    recipe["data"].pop("format", None)
    used = {name: found for name, found in formats.items() if name in _sources(recipe["data"])}
    if used:
        recipe["data"]["format"] = used if len(_sources(recipe["data"])) > 1 else next(iter(used.values()))


def _sources(data: Mapping[str, Any]) -> list[str]:
    """Return the files and data sets of section data."""
    return [data["train"], *data.get("mix", ()), *([data["eval"]] if "eval" in data else [])]


def _evaluate(run: Run, recipe: dict[str, Any]) -> None:
    if not has_evaluation(recipe):
        for key in ("eval_strategy", "eval_steps"):
            value = run.take(key)
            if value is not None:
                run.left_out(key, value, "there are no rows to evaluate on")
        return
    strategy = run.given("eval_strategy") or run.given("save_strategy") or "steps"
    run.left["eval_strategy"] = strategy
    if strategy == "steps":
        run.left.setdefault("eval_steps", run.given("save_steps") or 500)
    if not trainer.evaluates(run, recipe["train"]):
        recipe["data"].pop("eval", None)


def data(run: Run, hub: str) -> dict[str, Any]:
    """Return section data."""
    words = run.words("dataset")
    formats: dict[str, str] = {}
    sources = [_source(run, "dataset", word, hub, formats) for word in words]
    held_out = [_source(run, "val_dataset", word, hub, formats) for word in run.words("val_dataset")]
    if not sources:
        raise UserError(f"{run.name}: has no dataset")
    if len(set(sources)) < len(sources):
        run.refuse("dataset", ", ".join(words), "names a data set twice; data.mix has each file once")
    found: dict[str, Any] = {"train": sources[0]}
    if len(sources) > 1:
        found["mix"] = dict.fromkeys(sources[1:])
    found |= _chosen(run, words, sources)
    if held_out:
        found["eval"] = held_out[0]
        if len(held_out) > 1:
            run.refuse(
                "val_dataset",
                ", ".join(held_out),
                "sets of data.eval have metrics of their own; join their rows in a file",
            )
    if formats:
        found["format"] = formats
    cognitions = [_is_cognition(source.partition("?")[0]) for source in (*sources, *held_out)]
    if any(cognitions):
        if names := _names(run):
            found["fill"] = names
        run.take("model_name", WORDS), run.take("model_author", WORDS)
        if not all(cognitions) and "fill" in found:
            run.note("data.fill: replaces these texts in the rows of all files; ms-swift, in those of self-cognition")
    columns = run.take("columns", ONE_OR_MAPPING)
    if columns:
        run.refuse("columns", columns, "renames columns of each data set before detecting its format; nearest key: "
                                       "data.columns")  # fmt: skip
    found["max_length"] = _length(run)
    if run.flag("packing"):
        found["packing"] = "best_fit"
        if run.section not in ("sft", "gkd"):
            run.refuse("packing", True, "a pack is one row there; a pack of pairs is two rows here")
        run.note("data.packing: packs are filled best-fit, so there may be fewer packs than with ms-swift")
    # the sampler of prompts does not read train_dataloader_shuffle
    if _is_off(run, "dataset_shuffle") and (run.section == "grpo" or _is_off(run, "train_dataloader_shuffle")):
        found["shuffle"] = False
    found |= _plain_texts(run, formats) if has_plain_texts(run) else _system(run) | swift_templates.template(run)
    return found | trainer.loading(run)


def has_plain_texts(run: Run) -> bool:
    """Return True for `swift pt` and `megatron pt`, which train on each text by itself, without a chat template."""
    return str(run.given("command") or "").endswith(" pt")


def _plain_texts(run: Run, formats: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys for rows of text, each with the end-of-sequence token."""
    for source, name in formats.items():
        run.refuse("dataset", source, f"has rows of format {name}, not of text; write their texts into a file")
    uses = run.take("use_chat_template")
    if is_on(uses):
        run.refuse("use_chat_template", uses, "texts have no turns; for conversations use swift sft")
    for key in ("template", "system"):
        value = run.take(key)
        if value is not None:
            run.left_out(key, value, "texts have no turns")
    run.note("data.format: text, so rows have a column text; ms-swift also joins the texts of other rows")
    return {"format": "text"}


def _system(run: Run) -> dict[str, Any]:
    """Return `data.system`, where the two characters \\n are a line break."""
    given = run.given("system")
    if isinstance(given, str) and given.endswith(".txt"):
        return _system_file(run, given)
    found = model.system(run, "system", swift_templates.may_add_system(run))
    return {key: text.replace("\\n", "\n") for key, text in found.items()}


def _system_file(run: Run, name: str) -> dict[str, str]:
    """Return `data.system` with the text of a file, which is relative to the directory of the command."""
    run.take("system")
    try:
        text = read_regular(Path(name)).decode("utf-8")
    except (UserError, OSError, UnicodeDecodeError) as error:
        run.refuse("system", name, f"is a file that cannot be read here; write its text into data.system ({error})")
        return {}
    run.note(f"data.system: the text of {name}")
    return {"system": text}


def _names(run: Run) -> dict[str, str]:
    """Return `data.fill` for `model_name` and `model_author`; without one that may have several values, by language:
    the words of a command line are one text here."""
    found = {}
    for key, place in (("model_name", "{{NAME}}"), ("model_author", "{{AUTHOR}}")):
        value = run.given(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, str) and value and not re.search(r"\s", value):
            found[place] = value
    return found


def _chosen(run: Run, words: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """Return the keys that choose rows, for COUNT of data sets, NAME#COUNT, and for `split_dataset_ratio`."""
    found: dict[str, Any] = {}
    counts = {}
    streams = is_on(run.given("streaming"))
    for word, source in zip(words, sources):
        _, mark, count = word.partition("#")
        why = _other_choice(run)
        if streams and len(words) == 1 and not run.given("val_dataset") and count.isdecimal() and int(count):
            run.note("data.max_samples: the first rows, as ms-swift has them with streaming")
            _held_out_ratio(run)  # which reports that it has no effect
            return {"max_samples": int(count)}
        if not mark:
            continue
        if not count.isdecimal() or not int(count):
            run.refuse("dataset", word, "is not followed by a number of rows: NAME#COUNT")
        elif why:
            run.refuse("dataset", word, f"{why}; write the rows into a file, or leave out #{count}")
        else:
            counts[source] = int(count)
    if counts:
        found["sample"] = counts[sources[0]] if list(counts) == [sources[0]] else counts
    ratio = _held_out_ratio(run)
    if ratio is not None:
        found["holdout"] = ratio
    if found:
        found["choice"] = "ms-swift"
        run.note("data.choice: the same rows as ms-swift, which leaves out faulty ones, and pairs of equal answers, "
                 "before it chooses")  # fmt: skip
    return found


def _held_out_ratio(run: Run) -> float | None:
    """Return `split_dataset_ratio`; None where ms-swift has no such rows, or they cannot be had here."""
    key = "split_dataset_ratio"
    ratio = float(run.number(key, 0.0))
    if not ratio:
        return None
    strategy = run.given("eval_strategy")
    if strategy is None:
        strategy = run.given("save_strategy")
    if run.given("val_dataset"):
        run.left_out(key, ratio, "ms-swift sets it to 0 because there is a val_dataset")
    elif is_on(run.given("streaming")):
        run.left_out(key, ratio, "ms-swift sets it to 0 because of streaming")
    elif strategy in ("no", False):
        run.left_out(key, ratio, "ms-swift sets it to 0 because there are no evaluations")
    elif not 0 < ratio < 1:
        run.refuse(key, ratio, "leaves no row for training; data.holdout is a share between 0 and 1")
    elif why := _other_choice(run):
        run.refuse(key, ratio, f"{why}; nearest key: data.holdout")
    else:
        return ratio
    return None


def _other_choice(run: Run) -> str | None:
    """Return the reason why data.choice "ms-swift" chooses other rows; None where it chooses the same."""
    seed, data_seed = [42 if run.given(key) is None else run.given(key) for key in ("seed", "data_seed")]
    if seed != data_seed:
        return "chooses rows by data_seed, and data.choice by the one seed of the recipe, which is another"
    if run.given("dataset_shuffle") is not None and not is_on(run.given("dataset_shuffle")):
        return "chooses the first or last rows without dataset_shuffle, and data.choice random ones"
    if is_on(run.given("streaming")):
        return "chooses the first rows with streaming, and data.choice random ones"
    return None


def _is_cognition(name: str) -> bool:
    """Return True for a name of the data set with places for names, which ms-swift knows without its organisation."""
    return name.rpartition("/")[2] == _SELF_COGNITION


def _is_off(run: Run, key: str) -> bool:
    return key in run.left and not is_on(run.take(key))


def _source(run: Run, key: str, word: str, hub: str, formats: dict[str, str]) -> str:
    """Return a data set, NAME:SUBSET#COUNT or a file, as a value of `data.train`; add it to `formats` if a data format
    has ms-swift's rules for it."""
    name, _, count = word.partition("#")
    if count and key == "val_dataset":
        run.refuse(key, word, f"takes the first rows; write them into a file, or leave out #{count}")
    prefix = next((given for given in ("HF::", "MS::") if name.startswith(given)), "")
    name = name.removeprefix(prefix)
    hub = {"HF::": "hf:", "MS::": "ms:"}.get(prefix, hub or "hf:")
    if name.startswith((".", "/", "~")) or Path(name).suffix in (".jsonl", ".json", ".csv") or exists(name):
        return name
    name, _, subset = name.partition(":")
    if name == _SELF_COGNITION:
        name = "modelscope/self-cognition" if hub == "hf:" else "swift/self-cognition"
    own = own_format(name, subset, run.section)
    if own is None and name.rpartition("/")[2] in OWN_RULES:
        run.refuse(key, word, f"ms-swift reads {name} by rules of its own; write its rows into a file")
    if "/" in subset or subset == "all":
        run.refuse(key, word, "is of several subsets; name each: NAME:SUBSET")
    if _is_cognition(name):
        if subset and own is None:
            run.refuse(key, word, "adds texts to questions and answers; write its rows into a file")
        has_none = run.given("model_name") is None and run.given("model_author") is None
        if has_none:
            run.note(f"{key}: {{{{NAME}}}} and {{{{AUTHOR}}}} stay in rows, as ms-swift leaves them without model_name "
                     "and model_author")  # fmt: skip
        elif not {"{{NAME}}", "{{AUTHOR}}"} <= set(_names(run)):
            why = "needs one model_name and one model_author, of one word; otherwise write its rows into a file"
            run.refuse(key, word, why)
    options = f"&config={subset}" if subset else ""
    if own is None:
        run.note(f"data.train: {name} is read by its columns; if ms-swift has special rules for it, rows may differ")
    elif _is_cognition(name):
        options = ""  # ms-swift names its rules like subsets
    source = f"{hub}{name}?split=train{options}"
    if own is not None:
        formats[source] = own
    return source


def _length(run: Run) -> int:
    given = run.integer("max_length", None)
    if given is not None:
        return int(given)
    if run.preset is None:
        run.refuse(
            "max_length",
            "not given",
            "the default is the maximum of the model; set it, because data.max_length is a number",
        )
        return 2048
    run.note("data.max_length: the number of positions of the model, because max_length is not given")
    return int(run.family.config_cls(**run.family.presets[run.preset]).max_position_embeddings)


def own_section(run: Run) -> dict[str, Any]:
    """Return the section of the stage."""
    strategy = run.take("truncation_strategy") or "delete"
    if strategy not in ("delete", "right") or (strategy == "right" and run.section != "sft"):
        run.refuse("truncation_strategy", strategy, "longer rows are dropped, or in stage sft truncated at the end")
    scale = run.take("loss_scale")
    usual = "default" if run.section == "sft" else "last_round"
    if has_plain_texts(run):
        usual = "all"
    if scale not in (None, usual):
        run.refuse("loss_scale", scale, "all tokens of assistant turns have the same weight")
    is_dft = run.flag("enable_dft_loss")
    if run.section == "sft":
        loss = run.words("loss_type")
        if loss:
            run.refuse("loss_type", ", ".join(loss), "all supervised tokens have the same weight")
        found: dict[str, Any] = {"loss": "dft"} if is_dft else {}
        return found | ({"truncate": True} if strategy == "right" else {})
    if is_dft:
        run.refuse("enable_dft_loss", True, "is a loss of sft")
    if run.section == "rm":
        weight = run.number("center_rewards_coefficient", 0)
        return {"center_rewards": float(weight)} if weight else {}
    kind = str(run.given("rlhf_type") or "dpo")
    own: dict[str, Any] = {"beta": float(run.number("beta", 2.0 if kind == "simpo" else 0.1))}
    if run.section == "kto":
        run.note("kto: the KL divergence is estimated over the global batch; there, over the current micro-batches")
        for key in ("desirable_weight", "undesirable_weight"):
            weight = run.number(key, 1.0)
            if weight != 1:
                own[key] = float(weight)
        return own
    losses = _LOSSES.get(kind, {"sigmoid": "sigmoid"})
    kinds = run.words("loss_type") or [next(iter(losses))]
    if len(kinds) != 1 or kinds[0] not in losses:
        run.refuse("loss_type", ",".join(kinds), f"of ms-swift's losses, dpo.loss has {', '.join(losses)}")
    own["loss"] = losses.get(kinds[0], next(iter(losses.values())))
    smoothing = run.number("label_smoothing", 0)
    if smoothing and own["loss"] in ("sigmoid", "simpo", "cpo"):
        own["label_smoothing"] = float(smoothing)
    if own["loss"] == "simpo":
        own["gamma"] = float(run.number("simpo_gamma", 1.0))
    return own | _sft_term(run, kind)


def average_micro_batches(run: Run, recipe: dict[str, Any]) -> None:
    """Leave micro-batches as the rows come, where the SFT term of DPO is a mean over each of them."""
    if recipe[run.section].get("sft_mean") == "micro_batches":
        recipe["data"]["group_by_length"] = False
        run.note("dpo.sft_mean: micro_batches, so train.micro_batch_size changes the loss, as there")


def _sft_term(run: Run, kind: str) -> dict[str, Any]:
    """Return the keys of the loss term on the chosen answers. In ms-swift it is a mean over the tokens of a
    micro-batch: over those of each answer, where a micro-batch has one."""
    key = {"dpo": "rpo_alpha", "orpo": "rlhf_type"}.get(kind, "cpo_alpha")
    weight: Any = 1.0
    if kind != "orpo":
        weight = run.number(key, 0.0 if kind == "dpo" else 1.0)
    if not weight:
        return {}
    micro = run.given("per_device_train_batch_size")
    mean = "answers" if micro in (None, 1) else "micro_batches"
    return {"sft_mean": mean, **({} if kind == "orpo" else {"sft_weight": float(weight)})}


def _lora(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": run.integer("lora_rank", 8), "alpha": float(run.number("lora_alpha", 32))}
    found |= model.dropout(run, 0.05)
    if run.flag("use_rslora"):
        found["rslora"] = True
    if run.flag("use_dora"):
        found["method"] = "dora"
    ratio = run.number("lorap_lr_ratio", None)
    if ratio:
        found["lora_plus_ratio"] = float(ratio)
    init = str(run.take("init_weights")).lower()
    if init in ("pissa", "olora"):
        found["init"] = init
    elif init not in ("none", "true"):
        run.refuse("init_weights", init, "lora.init has default, pissa and olora")
    found |= model.target_modules(run, "target_modules", ("all-linear",), "all-linear")
    number = run.number("quant_bits", None)
    method = run.take("quant_method")
    if number is not None and method is None:
        run.left_out("quant_bits", number, "ms-swift quantises only with a quant_method")
        number = None
    kind = str(run.take("bnb_4bit_quant_type") or "nf4")
    doubled = run.take("bnb_4bit_use_double_quant")
    if number is not None and (method != "bnb" or number not in (4, 8)):
        run.refuse("quant_method", method, f"with {number} bits: lora.base_dtype has nf4, fp4 and int8")
    eight = ("quant_bits", number if number == 8 else None)
    kinds = ("bnb_4bit_quant_type", kind)
    return found | model.bits(run, number == 4, eight, kinds, doubled is not False)


SWIFT = Suite(
    name="ms-swift",
    model_key="model",
    stage=_stage,
    recipe=_recipe,
    refused=swift_arguments.REFUSED,
    ignored=swift_arguments.IGNORED,
    translations=swift_arguments.TRANSLATIONS,
    reads_codes=True,
    flatten=_flatten,
    read_shell=read_shell,
    rollout_stages=("grpo", "gkd"),
)
