"""From PaddleNLP's arguments to a recipe, section by section; what is left over is told with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.conversion.arguments import Arguments
from llmsuite.recipe.conversion.conversion import Conversion, Converted, check_stage
from llmsuite.recipe.conversion.family import family_of
from llmsuite.recipe.conversion.kinds import WORDS, is_true
from llmsuite.recipe.conversion.refuse import Reason, find, joined, left_without, refusal, why_refused
from llmsuite.recipe.paddlenlp import content, execution
from llmsuite.recipe.paddlenlp.refused import REFUSED, is_off, refuse_without_training
from llmsuite.recipe.paddlenlp.without import WITHOUT

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
) -> Converted:
    """A recipe of the same run.

    Args:
        arguments: what PaddleNLP would be given.
        name: of the file, for the recipe's `source` and to tell the stage by.
        registry: what stages and families there are.
        stage: of the recipe, where the arguments do not tell.
        family: of the model, where its name does not tell.
        num_devices: of all machines, where the arguments do not tell.
        leave_out: arguments that the recipe may do without, although it is another job then.

    Raises:
        UserError: no recipe can be the same job, stage or family cannot be told, or an argument is not of its type.
    """
    at_once: list[Reason] = []
    try:
        refuse_without_training(name, arguments.values)
        # what says more than that the stage or the family cannot be told
        at_once += [
            (key, value, why)
            for key, value in arguments.values.items()
            if (why := why_refused(REFUSED, key, value)) is not None
        ]
        result = _read(arguments, name, registry, stage, family, num_devices)
    except UserError as stop:
        raise refusal(at_once, arguments.values, name, leave_out, stop=stop) or stop from None
    result.refused = joined(at_once, result.refused)
    if (error := refusal(result.refused, arguments.values, name, leave_out)) is not None:
        raise error
    if without := left_without(result, leave_out):
        result.recipe["source"] += f", without {', '.join(without)}"
    return result


def _read(
    arguments: Arguments,
    name: str,
    registry: Registry,
    stage: str | None,
    family: str | None,
    num_devices: int | None,
) -> Converted:
    """The recipe, and what is left over told."""
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
        if why is None and (known := find(WITHOUT, key)):
            run.left_out(key, value, known)
        elif why is None and is_off(key, value):
            run.left_out(key, value, "it says no")
        else:
            run.refuse(key, value, why or run.unknown(key))
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
    return "lora" if stage == "sft" and any(is_true(values.get(key)) for key in ("lora", "lokr")) else stage


def _recipe(run: Conversion, registry: Registry) -> dict[str, Any]:
    own = content.stage_section(run)
    device = str(run.take("device") or run.arguments.device or "gpu")
    known = registry.devices.get(device)  # one that is not known is refused where the recipe is checked
    interleaves = known is None or known.factory().interleaves
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"PaddleNLP {run.name}",
        "model": content.model(run),
        "data": content.data(run, own),
        "parallel": execution.parallel(run, interleaves),
        "engine": execution.engine(run),
    }
    recipe["launch"] = execution.launch(run, recipe["parallel"])
    recipe["train"] = execution.train(run, recipe["launch"], recipe["parallel"])
    content.evaluation(run, own)
    if own:
        recipe[run.section] = own
    if generation := content.generation(run, recipe["data"]):
        recipe["generation"] = generation
    if lora := content.lora(run):
        recipe["lora"] = lora
    if prefix := content.prefix(run, bool(lora)):
        recipe["prefix"] = prefix
    recipe["checkpoint"] = content.checkpoint(run, recipe["data"], bool(generation))
    recipe["device"] = device
    told = str(run.take("report_to", WORDS) or "")
    if named := [name for name in ("visualdl", "tensorboard", "wandb", "swanlab") if name in told]:
        recipe["loggers"] = named
    recipe["seed"] = run.whole("seed", 42)
    recipe["output_dir"] = str(run.take("output_dir") or f"runs/{Path(run.name).stem}")
    return {key: value for key, value in recipe.items() if value != {}}
