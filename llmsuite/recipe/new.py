"""A new recipe for a stage, a model and a number of devices. Imports no Paddle."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite.errors import UserError
from llmsuite.models.shard_plan import WHOLE
from llmsuite.regular import is_file
from llmsuite.resources import bundled
from llmsuite.schema.degrees import PER_MACHINE, launch_of
from llmsuite.specs import ModelFamily

RULE = """\
Degrees: for each parameter a device holds 6 bytes (value, float32 gradient) and its share of 12 bytes (master, moments)
over the data ranks; with adapters 2 bytes, over matrices of 4 bits half a byte. While that exceeds 32 GB, half of a
64 GB device, the tensor parallel degree doubles, up to a machine of 8; then the pipeline parallel degree. All other
ranks are data ranks. They shard the optimizer state, and gradients if there is no pipeline; up to 8 of them share
experts. On cpu nothing is sharded. Where a recipe for all parameters gets adapters, its learning rate is multiplied by
ten (Schulman et al. 2025, "LoRA Without Regret"). All other numbers come from recipes/FAMILY/STAGE.json, or from
llama's."""
Method = Literal["full", "lora", "qlora"]
METHODS: Mapping[str, str] = {
    "full": "all parameters",
    "lora": "adapters of low rank",
    "qlora": "adapters over matrices of 4 bits",
}
_BASE = "nf4"
"""What the matrices of the model are stored in with `qlora`."""
_COPIES = ("online_dpo",)
"""Stages whose reference is a copy unless they are told otherwise."""
_ADAPTED_RATE = 10
"""Learning rate of adapters, in those of all parameters."""
_HALF = 32e9


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choices a new recipe is made from."""

    stage: str
    family: ModelFamily
    preset: str | None
    """None where the config.json of the weights has the shape."""
    num_devices: int
    """Devices of all machines."""
    device: str
    weights: str | None = None
    method: Method = "full"
    """What is trained; a stage that is for adapters only has them in any case."""
    data: str | None = None
    """What to train on; None for the rows that come with llmsuite."""
    eval_data: str | None = None
    """What to evaluate on, with `data`."""
    found_config: Any = None
    """The shape of the weights, where they are here."""

    @property
    def config(self) -> Any:
        """The shape of the model."""
        if self.preset is None:
            assert self.found_config is not None, "there is a preset, or weights that are here"
            return self.found_config
        return self.family.config_cls(**self.family.presets[self.preset])

    @property
    def name(self) -> str:
        """The name of the run, and of the file."""
        model = self.preset or Path(str(self.weights).partition("@")[0].partition("?")[0]).absolute().name
        return f"{model.lower()}-{self.stage}"


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
    """The recipe as plain data.

    Args:
        choice: what it is for.
        num_parameters: of the model.
        adapters: whether the stage is for adapters only.

    Raises:
        UserError: no recipe of the stage comes with llmsuite.
    """
    recipe, config = _template(choice), choice.config
    adapters = adapters or choice.method != "full"
    plan = choice.family.shard_plan or WHOLE

    def can_cut(tp: int, pp: int) -> bool:
        return pp <= config.num_hidden_layers and (tp == 1 or not list(plan.problems(config, tp)))

    tp, pp = (1, 1)
    if choice.device != "cpu" and plan.layers:
        held = num_parameters // 4 if choice.method == "qlora" else num_parameters
        tp, pp = choose_degrees(held, choice.num_devices, adapters, can_cut)
    ranks = choice.num_devices // (tp * pp)
    place = choice.weights or f"models/{choice.preset}"
    recipe["model"] = {
        "family": choice.family.name,
        ("tokenizer" if choice.stage == "pretrain" and choice.weights is None else "weights"): place,
        **({} if choice.preset is None else {"preset": choice.preset}),
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
    longest = recipe["data"]["max_length"] = min(recipe["data"]["max_length"], config.max_position_embeddings)
    if "rollout" in recipe:  # there has to be room for a prompt
        completion = recipe["rollout"]["max_completion_length"]
        recipe["rollout"]["max_completion_length"] = min(completion, max(1, longest // 2))
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
    recipe["launch"] = launch_of(choice.num_devices)
    recipe["device"] = choice.device
    recipe["output_dir"] = f"runs/{choice.name}"
    _take_data(recipe, choice)
    _take_method(recipe, choice)
    return {key: value for key, value in recipe.items() if value != {}}


def _take_data(recipe: dict[str, Any], choice: Choice) -> None:
    """The data that somebody names, in place of the rows that come with llmsuite."""
    if choice.data is None:
        return
    data = recipe["data"]
    data["train"] = choice.data
    data.pop("eval", None)
    if choice.eval_data is not None:
        data["eval"] = choice.eval_data
    elif "split" not in recipe.get(choice.stage, {}):  # nothing is held out
        recipe["train"].pop("eval_steps", None)
        recipe["checkpoint"].pop("best_metric", None)


def _take_method(recipe: dict[str, Any], choice: Choice) -> None:
    """Adapters, where they are wanted."""
    if choice.method == "full":
        return
    if "lora" not in recipe:
        section, train = recipe.get(choice.stage, {}), recipe["train"]
        train["learning_rate"] = float(f"{train['learning_rate'] * _ADAPTED_RATE:.6g}")
        if section.get("reference") == "copy" or choice.stage in _COPIES:  # the model without its adapters is one
            section["reference"] = "adapter_off"
        recipe["lora"] = dict(stage_recipe("lora", choice.family.name)["lora"])
    if choice.method == "qlora":
        recipe["lora"]["base_dtype"] = _BASE


def stage_recipe(stage: str, family: str) -> dict[str, Any]:
    """The recipe of a stage that comes with llmsuite: that of the family, else that of llama.

    Raises:
        UserError: there is none.
    """
    for name in (family, "llama"):
        path = bundled("recipes") / name / f"{stage}.json"
        if is_file(path):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    raise UserError(f"--stage {stage}: llmsuite comes with no recipe for it; start from one of its own package")


def _template(choice: Choice) -> dict[str, Any]:
    """The recipe that all other numbers come from, with its sections in the usual order."""
    found = stage_recipe(choice.stage, choice.family.name)
    recipe: dict[str, Any] = {"stage": choice.stage, "model": {}, "data": {}, "parallel": {}}
    return recipe | {key: copy.deepcopy(value) for key, value in found.items() if key != "source"}
