"""From PaddleNLP's arguments to a recipe, section by section; what is left over is told with its reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.paddlenlp import execution
from llmsuite.recipe.paddlenlp.arguments import Arguments
from llmsuite.recipe.paddlenlp.conversion import Conversion, Converted, is_true
from llmsuite.recipe.paddlenlp.without import reason
from llmsuite.specs import ModelFamily

_SCRIPTS = {"pretrain": "pretrain", "finetune": "sft", "sft": "sft", "lora": "lora", "dpo": "dpo", "simpo": "dpo"}
_SCRIPTS |= {"kto": "kto", "reward": "rm", "rm": "rm"}
_FAMILIES = {"llama|vicuna|alpaca": "llama", "qwen": "qwen", "deepseek": "deepseek", "gpt": "gpt"}
_SUFFIXES = re.compile(r"^meta-|-(instruct|chat|hf|base|en|bf16)\b", re.IGNORECASE)


def convert(
    arguments: Arguments,
    name: str,
    registry: Registry,
    stage: str | None = None,
    family: str | None = None,
    num_devices: int | None = None,
) -> Converted:
    """A recipe of the same run.

    Args:
        arguments: what PaddleNLP would be given.
        name: of the file, for the recipe's `source` and to tell the stage by.
        registry: what stages and families there are.
        stage: of the recipe, where the arguments do not tell.
        family: of the model, where its name does not tell.
        num_devices: of all machines, where the arguments do not tell.

    Raises:
        UserError: stage or family cannot be told, or an argument is not of its type.
    """
    stage = stage or _stage(arguments, name, registry)
    if stage not in registry.stages:
        raise UserError(registry.unknown("stage", stage))
    model = str(arguments.values.get("model_name_or_path", ""))
    family = family or next((f for words, f in _FAMILIES.items() if re.search(words, model, re.IGNORECASE)), None)
    if family is None:
        raise UserError(f"model_name_or_path is {model!r}, which tells no family; add --family llama, for example")
    if family not in registry.models:
        raise UserError(registry.unknown("model", family))
    run = Conversion(arguments, name, registry, stage, registry.models[family], num_devices)
    run.result.recipe = _recipe(run)
    for key, value in run.left.items():
        run.left_out(key, value, reason(key) or run.unknown(key))
    return run.result


def _stage(arguments: Arguments, name: str, registry: Registry) -> str:
    """By the script, the name of the file, then by arguments that one stage has only."""
    values = arguments.values
    stem = next((word for word in re.split(r"[^a-z]+", (arguments.script or name).lower()) if word in _SCRIPTS), None)
    stage = _SCRIPTS.get(stem or "")
    if stage is None:
        if "input_dir" in values:
            stage = "pretrain"
        elif "loss_type" in values and "train_dataset_path" in values:
            stage = "dpo"
        elif "dataset_name_or_path" in values:
            stage = "sft"
        else:
            raise UserError(f"{name}: tells no stage; add --stage, one of {', '.join(registry.stages)}")
    return "lora" if stage == "sft" and is_true(values.get("lora")) else stage


def _recipe(run: Conversion) -> dict[str, Any]:
    own = _stage_section(run)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"PaddleNLP {run.name}",
        "model": _model(run),
        "data": _data(run, own),
        "parallel": execution.parallel(run),
        "engine": execution.engine(run),
    }
    recipe["launch"] = execution.launch(run, recipe["parallel"])
    recipe["train"] = execution.train(run, recipe["launch"], recipe["parallel"])
    if own:
        recipe[run.section] = own
    if lora := _lora(run):
        recipe["lora"] = lora
    recipe["checkpoint"] = _checkpoint(run, recipe["data"], own)
    recipe["device"] = run.take("device") or run.arguments.device or "gpu"
    told = str(run.take("report_to") or "")
    if named := [name for name in ("visualdl", "tensorboard", "wandb", "swanlab") if name in told]:
        recipe["loggers"] = named
    recipe["seed"] = run.number("seed", 42)
    recipe["output_dir"] = str(run.take("output_dir") or f"runs/{Path(run.name).stem}")
    return {key: value for key, value in recipe.items() if value != {}}


def _model(run: Conversion) -> dict[str, Any]:
    name, tokenizer = run.take("model_name_or_path"), run.take("tokenizer_name_or_path")
    if name is None:
        raise UserError(f"{run.name}: has no model_name_or_path")
    fresh = run.stage == "pretrain" and not run.flag("continue_training")
    run.left.pop("continue_training", None)
    model: dict[str, Any] = {"family": run.family.name}
    if fresh:
        model["tokenizer"] = tokenizer or name
    else:
        model["weights"] = name
        if tokenizer not in (None, name):
            model["tokenizer"] = tokenizer
    preset = _preset(str(name), run.family)
    if preset is not None:
        model["preset"] = preset
    else:
        run.note(f"model.preset: none is known of {name}; checks need its config.json, in model.weights")
        model.setdefault("weights", name)
    shape = {f.name for f in dataclasses.fields(run.family.config_cls)} - {"model_type"}
    config = {key: run.take(key) for key in list(run.left) if key in shape}
    if config:
        model["config"] = config
    return model


def _data(run: Conversion, own: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    strategy = str(run.take("evaluation_strategy") or "")
    evaluates = run.flag("do_eval") and strategy != "no"
    if run.stage == "pretrain":
        data["train"] = _corpora(run, own)
        if split := run.take("split"):
            own["split"] = str(split)
    elif (rows := run.take("dataset_name_or_path")) is not None:
        data["train"] = f"{rows}/train.json"
        data |= {"eval": f"{rows}/dev.json"} if evaluates else {}
    else:
        train = run.take("train_dataset_path") or run.take("train_datasets")
        held_out = run.take("dev_dataset_path") or run.take("eval_datasets")
        if train is None:
            raise UserError(f"{run.name}: has no dataset_name_or_path and no train_dataset_path")
        data["train"] = str(train)
        data |= {"eval": str(held_out)} if evaluates and held_out else {}
    lengths = [run.number(key, None) for key in ("max_seq_length", "max_seq_len", "max_length")]
    if length := next((value for value in lengths if value is not None), None):
        data["max_length"] = length
    if run.flag("zero_padding"):
        if "data.packing" in run.keys and run.section in ("sft", "dpo", "rm"):
            data["packing"] = "best_fit"
        else:
            run.left_out("zero_padding", True, f"rows are not packed in stage {run.stage}")
    if workers := run.number("dataloader_num_workers", 0):
        data["num_workers"] = workers
    if strategy == "epoch":
        run.left_out("evaluation_strategy", strategy, "evaluation is after train.eval_steps, and the last step")
    run.evaluates = evaluates
    return data


def _corpora(run: Conversion, own: dict[str, Any]) -> str:
    """`input_dir`: a directory or prefix, or weights and prefixes in turn."""
    given = str(run.take("input_dir") or "")
    words = given.split()
    if not words:
        raise UserError(f"{run.name}: has no input_dir")
    if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        first = float(words[0])
        own["mix"] = {path: float(weight) / first for weight, path in zip(words[2::2], words[3::2])}
        words = words[1:2]
    path = Path(words[0])
    prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx")) if path.is_dir() else []
    if len(prefixes) == 1:
        return str(prefixes[0])
    if path.suffix != "" or len(prefixes) != 0 or not path.with_suffix(".idx").is_file():
        run.note(f"data.train: is {path}; it has to be the prefix of one corpus, {path}/NAME for NAME.bin and .idx")
    return str(path)


def _stage_section(run: Conversion) -> dict[str, Any]:
    names = {"loss_type": "loss", "simpo_gamma": "gamma", "sft_loss_ratio": "sft_weight"}
    hints = get_type_hints(run.section_cls)
    own: dict[str, Any] = {}
    for theirs in ("loss_type", "beta", "label_smoothing", "simpo_gamma", "sft_loss_ratio", "desirable_weight",
                   "undesirable_weight"):  # fmt: skip
        ours = names.get(theirs, theirs)
        if theirs not in run.left or f"{run.section}.{ours}" not in run.keys:
            continue
        value = run.take(theirs)
        if ours == "loss" and value not in get_args(hints["loss"]):
            run.left_out(theirs, value, f"{run.section}.loss has {', '.join(get_args(hints['loss']))}")
        elif value is not None and (ours == "loss" or value):  # zeros are what is so anyway
            own[ours] = value
    return own


def _lora(run: Conversion) -> dict[str, Any]:
    wanted, rank = run.flag("lora"), run.number("lora_rank", 8)
    rslora = run.flag("rslora") or run.flag("rslora_plus")
    ratio = run.number("lora_plus_scale", 1.0)
    alpha = run.number("lora_alpha", 0)
    if not wanted and run.stage != "lora":
        return {}
    # run_finetune.py: 4 with rsLoRA, else twice the rank
    lora = {"rank": rank, "alpha": float(alpha if alpha > 0 else 4 if rslora else 2 * rank)}
    lora |= {"rslora": True} if rslora else {}
    return lora | ({"lora_plus_ratio": float(ratio)} if ratio != 1 else {})


def _checkpoint(run: Conversion, data: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    strategy, every = str(run.take("save_strategy") or "steps"), run.number("save_steps", None)
    checkpoint: dict[str, Any] = {}
    if strategy == "steps" and every:
        checkpoint["save_steps"] = every
    elif strategy == "epoch":
        run.left_out("save_strategy", strategy, "nearest key: checkpoint.save_steps; the last step is always saved")
    keep = run.number("save_total_limit", None)
    if keep is not None:
        checkpoint["keep_last"] = max(2, keep)
        if keep < 2:
            run.note("checkpoint.keep_last: 2, the least, because the newest may be the one a crash interrupts")
    best, metric = run.flag("load_best_model_at_end"), run.take("metric_for_best_model")
    if best and metric in (None, "loss", "eval_loss") and ("eval" in data or "split" in own):
        checkpoint["best_metric"] = "eval/loss"
    elif best:
        run.left_out("load_best_model_at_end", metric or True, "nearest key: checkpoint.best_metric, eval/loss")
    if run.take("use_async_save") in (False, 0):
        checkpoint["async_save"] = False
    return checkpoint


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9.]+([eE][-+]?[0-9]+)?", text) is not None


def _preset(name: str, family: ModelFamily) -> str | None:
    """The shape the family has under a model's name, without what says how it was tuned."""
    plain = _SUFFIXES.sub("", name.rstrip("/").rpartition("/")[2]).lower()
    return plain if plain in family.presets else None
