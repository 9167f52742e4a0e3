"""Conversion of PaddleNLP's arguments to a recipe, section by section; unused arguments are reported with reasons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ConvertedRecipe
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.conversion.conversion import Conversion, check_stage
from llmsuite.plugins.suites.conversion.family import family_of
from llmsuite.plugins.suites.conversion.kinds import WORDS, is_true
from llmsuite.plugins.suites.conversion.refuse import Reason, find, honoured_leave_out, joined, refusal, why_refused
from llmsuite.plugins.suites.paddlenlp import content, execution
from llmsuite.plugins.suites.paddlenlp.ignored import IGNORED
from llmsuite.plugins.suites.paddlenlp.refused import REFUSED, is_off, refuse_without_training

_SCRIPTS = {"pretrain": "pretrain", "finetune": "sft", "sft": "sft", "lora": "lora", "dpo": "dpo", "simpo": "dpo"}
_SCRIPTS |= {"kto": "kto", "reward": "rm", "rm": "rm"}


def convert(
    arguments: Arguments,
    name: str,
    registry: Registry,
    stage: str | None = None,
    family: str | None = None,
    num_devices: int | None = None,
    leave_out: Sequence[str] = (),
) -> ConvertedRecipe:
    """Return a recipe of the same run.

    Args:
        arguments: PaddleNLP's arguments.
        name: name of the file, for the recipe's `source` and to determine the stage.
        registry: registered stages and families.
        stage: stage of the recipe, if the arguments do not determine it.
        family: family of the model, if its name does not determine it.
        num_devices: number of devices of all machines, if the arguments do not name it.
        leave_out: arguments to ignore, although the recipe is then another job.

    Raises:
        UserError: no recipe can be the same job, stage or family are not determined, or an argument has a wrong type.
    """
    reasons: list[Reason] = []
    try:
        refuse_without_training(name, arguments.values)
        # collected first: these reasons are more useful than an undetermined stage or family
        for key, value in arguments.values.items():
            why = why_refused(REFUSED, key, value)
            if why is not None:
                reasons.append((key, value, why))
        result = _read(arguments, name, registry, stage, family, num_devices)
    except UserError as stop:
        raise refusal(reasons, arguments.values, name, leave_out, stop=stop) or stop from None
    result.refused = joined(reasons, result.refused)
    error = refusal(result.refused, arguments.values, name, leave_out)
    if error is not None:
        raise error
    dropped = honoured_leave_out(result, leave_out)
    if dropped:
        result.recipe["source"] += f", without {', '.join(dropped)}"
    return result


def _read(
    arguments: Arguments,
    name: str,
    registry: Registry,
    stage: str | None,
    family: str | None,
    num_devices: int | None,
) -> ConvertedRecipe:
    """Return the recipe with a report of unused arguments."""
    stage = stage or _stage(arguments, name, registry)
    check_stage(stage, registry)
    model = str(arguments.values.get("model_name_or_path", ""))
    if family is not None and family not in registry.models:
        raise UserError(registry.unknown("model", family))
    spec = registry.models[family] if family is not None else family_of(model, registry)
    run = Conversion(arguments, name, registry, stage, spec, num_devices)
    run.result.recipe = _recipe(run, registry)
    for key, value in run.left.items():
        why = why_refused(REFUSED, key, value)
        ignored = find(IGNORED, key)
        if why is None and ignored:
            run.left_out(key, value, ignored)
        elif why is None and is_off(key, value):
            run.left_out(key, value, "is off")
        else:
            run.refuse(key, value, why or run.unknown(key))
    return run.result


def _stage(arguments: Arguments, name: str, registry: Registry) -> str:
    """Return the stage: from the script or the name of the file, else from arguments that only one stage has."""
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
            raise UserError(f"{name}: does not determine the stage; add --stage, one of {', '.join(registry.stages)}")
    has_adapters = any(is_true(values.get(key)) for key in ("lora", "lokr"))
    if stage == "sft" and has_adapters:
        return "lora"
    return stage


def _recipe(run: Conversion, registry: Registry) -> dict[str, Any]:
    own = content.stage_section(run)
    device = str(run.take("device") or run.arguments.device or "gpu")
    # an unknown device is reported when the recipe is checked
    known = registry.find_device(device)
    supports_interleaving = known is None or known.factory().supports_interleaving
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"PaddleNLP {run.name}",
        "model": content.model(run),
        "data": content.data(run, own),
        "parallel": execution.parallel(run, supports_interleaving),
        "engine": execution.engine(run),
    }
    recipe["launch"] = execution.launch(run, recipe["parallel"])
    recipe["train"] = execution.train(run, recipe["launch"], recipe["parallel"])
    content.evaluation(run, own)
    if own:
        recipe[run.section] = own
    generation = content.generation(run, recipe["data"])
    lora = content.lora(run)
    prefix = content.prefix(run, bool(lora))
    recipe |= {"generation": generation, "lora": lora, "prefix": prefix}  # empty sections are removed at the end
    recipe["checkpoint"] = content.checkpoint(run, recipe["data"], bool(generation))
    recipe["device"] = device
    report_to = str(run.take("report_to", WORDS) or "")
    loggers = [name for name in ("visualdl", "tensorboard", "wandb", "swanlab") if name in report_to]
    if loggers:
        recipe["loggers"] = loggers
    recipe["seed"] = run.integer("seed", 42)
    recipe["output_dir"] = str(run.take("output_dir") or f"runs/{Path(run.name).stem}")
    return {key: value for key, value in recipe.items() if value != {}}
