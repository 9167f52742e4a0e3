"""A new recipe for a stage, a model and a number of devices. Imports no Paddle."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from llmsuite.errors import UserError
from llmsuite.models.shard_plan import WHOLE
from llmsuite.resources import bundled
from llmsuite.specs import ModelFamily

RULE = """\
Degrees: for each parameter a device holds 6 bytes (value, float32 gradient) and its share of 12 bytes (master, moments)
over the data ranks; with adapters 2 bytes. While that exceeds 32 GB, half of a 64 GB device, the tensor parallel degree
doubles, up to a machine of 8; then the pipeline parallel degree. All other ranks are data ranks. They shard the
optimizer state, and gradients if there is no pipeline; up to 8 of them share experts. On cpu nothing is sharded. All
other numbers come from recipes/FAMILY/STAGE.json, or from llama's."""
PER_MACHINE = 8
_HALF = 32e9


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choices a new recipe is made from."""

    stage: str
    family: ModelFamily
    preset: str
    num_devices: int
    """Devices of all machines."""
    device: str
    weights: str | None = None


def choose_degrees(
    num_parameters: int, num_devices: int, adapters: bool, can_cut: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Tensor and pipeline parallel degree by `RULE`.

    Args:
        num_parameters: parameters of the model.
        num_devices: devices of all machines.
        adapters: whether only adapters are trained.
        can_cut: whether the model can be split by a (tp, pp).
    """
    tp = pp = 1

    def held() -> float:
        ranks = num_devices // (tp * pp)
        return num_parameters / (tp * pp) * (2 if adapters else 6 + 12 / ranks)

    while held() > _HALF:
        if 2 * tp <= min(PER_MACHINE, num_devices) and _divides(2 * tp * pp, num_devices) and can_cut(2 * tp, pp):
            tp *= 2
        elif _divides(2 * tp * pp, num_devices) and can_cut(tp, 2 * pp):
            pp *= 2
        else:
            break
    return tp, pp


def _divides(degrees: int, num_devices: int) -> bool:
    return num_devices % degrees == 0


def new_recipe(choice: Choice, num_parameters: int, adapters: bool) -> dict[str, Any]:
    """The recipe as plain data; `num_parameters` is that of the preset.

    Raises:
        UserError: no recipe of the stage comes with llmsuite.
    """
    recipe = _template(choice)
    config = choice.family.config_cls(**choice.family.presets[choice.preset])
    plan = choice.family.shard_plan or WHOLE

    def can_cut(tp: int, pp: int) -> bool:
        return pp <= config.num_hidden_layers and (tp == 1 or not list(plan.problems(config, tp)))

    tp, pp = (1, 1)
    if choice.device != "cpu" and plan.layers:
        tp, pp = choose_degrees(num_parameters, choice.num_devices, adapters, can_cut)
    ranks = choice.num_devices // (tp * pp)
    place = choice.weights or f"models/{choice.preset}"
    recipe["model"] = {
        "family": choice.family.name,
        ("tokenizer" if choice.stage == "pretrain" and choice.weights is None else "weights"): place,
        "preset": choice.preset,
    }
    parallel: dict[str, Any] = {}
    if tp > 1:
        parallel |= {"tensor_parallel_degree": tp, "sequence_parallel": True}
    if pp > 1:
        parallel |= {"pipeline_parallel_degree": pp, "pipeline_schedule": "1F1B"}
    if ranks > 1 and not adapters and choice.device != "cpu":
        parallel["sharding"] = "stage2" if pp == 1 else "stage1"
    experts = math.gcd(ranks, PER_MACHINE, getattr(config, plan.num_experts or "none", tp) // tp)
    if experts > 1:
        parallel["expert_parallel_degree"] = experts
    recipe["parallel"] = parallel
    recipe["data"]["max_length"] = min(recipe["data"]["max_length"], config.max_position_embeddings)
    train = recipe["train"]
    train["micro_batch_size"] = 1
    if not getattr(config, "has_gate_bias", False):  # it belongs to another shape of the family
        train.pop("expert_bias_rate", None)
    train["global_batch_size"] = math.ceil(train["global_batch_size"] / ranks) * ranks
    recipe["engine"] = {
        "mode": "dynamic",
        "precision": "fp32" if choice.device == "cpu" else "bf16",
        "recompute": "full" if choice.device != "cpu" and plan.layers else "none",
    }
    machines = choice.num_devices // PER_MACHINE if choice.num_devices % PER_MACHINE == 0 else 1
    recipe["launch"] = {"num_devices": choice.num_devices // machines} | ({"nnodes": machines} if machines > 1 else {})
    recipe["device"] = choice.device
    recipe["output_dir"] = f"runs/{choice.preset}-{choice.stage}"
    return {key: value for key, value in recipe.items() if value != {}}


def _template(choice: Choice) -> dict[str, Any]:
    """The recipe that all other numbers come from, with its sections in the usual order."""
    for family in (choice.family.name, "llama"):
        path = bundled("recipes") / family / f"{choice.stage}.json"
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            recipe: dict[str, Any] = {"stage": choice.stage, "model": {}, "data": {}, "parallel": {}}
            return recipe | {key: copy.deepcopy(value) for key, value in found.items() if key != "source"}
    raise UserError(f"--stage {choice.stage}: llmsuite comes with no recipe for it; start from one of its own package")
