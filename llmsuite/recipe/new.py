"""Generation of a recipe for a stage, a model and a number of devices. Imports no Paddle."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.resources import bundled
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.degrees import DEVICES_PER_MACHINE, launch_section
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.protocols import HasGateBias, shape_fields
from llmsuite.models.shard_plan import UNSHARDED

RULE = """\
Degrees: per parameter, a device holds 6 bytes (bf16 value, float32 gradient) plus its shard of 12 bytes (float32
master, two moments) over the data ranks; with adapters 2 bytes, with 4-bit matrices half a byte. While the total
exceeds 32 GB, half of a 64 GB device, the tensor parallel degree doubles, up to the 8 devices of a machine; then the
pipeline parallel degree doubles. All other ranks are data ranks. They shard the optimizer state, and without a pipeline
also the gradients; expert parallelism uses up to 8 of them. On cpu nothing is sharded. Where a recipe for all
parameters gets adapters, its learning rate is multiplied by ten (Schulman et al. 2025, "LoRA Without Regret"). Where
the rows of --data are on this machine, they determine four numbers: data.max_length is that of the longest row, rounded
up to a multiple of 64; train.num_epochs is 3, or 1 from 50,000 rows; train.global_batch_size is halved, down to 4,
while an epoch has fewer than 10 steps; train.micro_batch_size fills 4096 tokens of the longest rows (1024 on cpu). All
other numbers are those of recipes/FAMILY/STAGE.json, or of llama's recipe."""
Method = Literal["full", "lora", "qlora"]
METHODS: Mapping[str, str] = {
    "full": "all parameters",
    "lora": "low-rank adapters",
    "qlora": "low-rank adapters over matrices quantised to 4 bits",
}
_BASE = "nf4"
"""Quantisation of the frozen matrices with `qlora`."""
_COPIES = ("online_dpo",)
"""Stages whose reference is a copy of the model by default."""
_ADAPTED_RATE = 10
"""Learning rate of adapters as a multiple of that of all parameters."""
_LENGTH_STEP = 64
"""`data.max_length` of a new recipe is a multiple of it."""
_MANY_ROWS = 50_000
"""Rows from which one epoch is enough."""
_EPOCHS = 3
"""Epochs of fewer rows."""
_MIN_STEPS = 10
"""Steps that an epoch has at least, where the batch can be smaller."""
_MIN_BATCH = 4
"""Rows that a smaller batch has at least."""
_TOKENS = {"cpu": 1024}
"""Tokens of a micro-batch of the longest rows, by the device."""
_TOKENS_OF_OTHERS = 4096
_MAX_BYTES = 32e9
"""Bytes of parameters, gradients and optimizer state on one device."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choices of the user for a new recipe."""

    stage: str
    family: ModelFamily
    preset: str | None
    """Name of the model shape; None to take it from the config.json of the weights."""
    num_devices: int
    """Number of devices of all machines."""
    device: str
    weights: str | None = None
    method: Method = "full"
    """Parameters to train; a stage for adapters only trains adapters in any case."""
    data: str | None = None
    """Training data; None for the rows bundled with llmsuite."""
    eval_data: str | None = None
    """Evaluation data, with `data`."""
    found_config: Any = None
    """Config of the weights; None where they are not on this machine."""

    @property
    def config(self) -> Any:
        """The config of the model."""
        if self.preset is None:
            assert self.found_config is not None, "needs a preset, or weights on this machine"
            return self.found_config
        return self.family.config_cls(**self.family.presets[self.preset])

    @property
    def name(self) -> str:
        """Name of the run and of the recipe file."""
        model = self.preset or Path(str(self.weights).partition("@")[0].partition("?")[0]).absolute().name
        return f"{model.lower()}-{self.stage}"


def choose_degrees(
    num_parameters: int, num_devices: int, adapters: bool, can_shard: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Return the tensor and pipeline parallel degrees by `RULE`.

    Args:
        num_parameters: number of parameters of the model.
        num_devices: number of devices of all machines.
        adapters: True if only adapters are trained.
        can_shard: returns True if the model can be split by degrees (tp, pp).
    """
    tp = pp = 1

    def held() -> float:
        ranks = num_devices // (tp * pp)
        return num_parameters / (tp * pp) * (2 if adapters else 6 + 12 / ranks)

    while held() > _MAX_BYTES:
        if (
            2 * tp <= min(DEVICES_PER_MACHINE, num_devices)
            and _divides(2 * tp * pp, num_devices)
            and can_shard(2 * tp, pp)
        ):
            tp *= 2
        elif _divides(2 * tp * pp, num_devices) and can_shard(tp, 2 * pp):
            pp *= 2
        else:
            break
    return tp, pp


def _divides(degrees: int, num_devices: int) -> bool:
    return num_devices % degrees == 0


def new_recipe(choice: Choice, num_parameters: int, adapters: bool) -> dict[str, Any]:
    """Return a new recipe as plain data.

    Args:
        choice: choices of the user.
        num_parameters: number of parameters of the model.
        adapters: True for a stage that trains only adapters.

    Raises:
        UserError: llmsuite has no recipe for the stage to start from.
    """
    recipe = _template(choice)
    config = choice.config
    adapters = adapters or choice.method != "full"
    plan = choice.family.shard_plan or UNSHARDED

    def can_shard(tp: int, pp: int) -> bool:
        return pp <= config.num_hidden_layers and (tp == 1 or not list(plan.problems(config, tp)))

    tp = 1
    pp = 1
    if choice.device != "cpu" and plan.layers:
        held = num_parameters
        if choice.method == "qlora":
            held = num_parameters // 4
        tp, pp = choose_degrees(held, choice.num_devices, adapters, can_shard)
    ranks = choice.num_devices // (tp * pp)
    place = choice.weights or f"models/{choice.preset}"
    is_fresh = choice.stage == "pretrain" and choice.weights is None
    recipe["model"] = {"family": choice.family.name, "tokenizer" if is_fresh else "weights": place}
    if choice.preset is not None:
        recipe["model"]["preset"] = choice.preset
    parallel: dict[str, Any] = {}
    if tp > 1:
        parallel |= {"tensor_parallel_degree": tp, "sequence_parallel": True}
    if pp > 1:
        parallel |= {"pipeline_parallel_degree": pp, "pipeline_schedule": "1F1B"}
    if ranks > 1 and not adapters and choice.device != "cpu":
        parallel["sharding"] = "stage2" if pp == 1 else "stage1"
    experts = math.gcd(ranks, DEVICES_PER_MACHINE, shape_fields(config).get(plan.num_experts or "", tp) // tp)
    if experts > 1:
        parallel["expert_parallel_degree"] = experts
    recipe["parallel"] = parallel
    longest = recipe["data"]["max_length"] = min(recipe["data"]["max_length"], config.max_position_embeddings)
    if "rollout" in recipe:  # leaves room for a prompt
        completion = recipe["rollout"]["max_completion_length"]
        recipe["rollout"]["max_completion_length"] = min(completion, max(1, longest // 2))
    train = recipe["train"]
    train["micro_batch_size"] = 1
    if not (
        isinstance(config, HasGateBias) and config.has_gate_bias
    ):  # the template may be for a shape that has the bias
        train.pop("expert_bias_rate", None)
    train["global_batch_size"] = math.ceil(train["global_batch_size"] / ranks) * ranks
    recipe["engine"] = {"mode": "dynamic", "precision": "fp32", "recompute": "none"}
    if choice.device != "cpu":
        recipe["engine"]["precision"] = "bf16"
        if plan.layers:
            recipe["engine"]["recompute"] = "full"
    recipe["launch"] = launch_section(choice.num_devices)
    recipe["device"] = choice.device
    recipe["output_dir"] = f"runs/{choice.name}"
    _set_data(recipe, choice)
    _set_method(recipe, choice)
    return {key: value for key, value in recipe.items() if value != {}}


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """The training samples of a data file."""

    num_samples: int
    longest: int
    """Tokens of the longest sequence."""
    sequences: int
    """Sequences of a sample: 2 for a pair of answers."""


def fit_to_rows(recipe: dict[str, Any], rows: RowLengths) -> None:
    """Set the numbers of a new recipe that depend on the training data, by `RULE`."""
    data = recipe["data"]
    train = recipe["train"]
    ranks = data_ranks(recipe)
    rounded = math.ceil(rows.longest / _LENGTH_STEP) * _LENGTH_STEP
    data["max_length"] = min(data["max_length"], rounded)
    train.pop("max_steps", None)
    epochs = 1 if rows.num_samples >= _MANY_ROWS else _EPOCHS
    recipe["train"] = train = {"num_epochs": epochs, **train}
    batch = train["global_batch_size"]
    while batch * _MIN_STEPS > rows.num_samples and batch % (2 * ranks) == 0 and batch // 2 >= _MIN_BATCH:
        batch //= 2
    if batch > rows.num_samples:
        batch = max(ranks, rows.num_samples // ranks * ranks)
    train["global_batch_size"] = batch
    tokens = _TOKENS.get(recipe["device"], _TOKENS_OF_OTHERS)
    fitting = max(1, tokens // (data["max_length"] * rows.sequences))
    of_rank = batch // ranks
    train["micro_batch_size"] = max(size for size in range(1, of_rank + 1) if of_rank % size == 0 and size <= fitting)
    if "save_steps" in recipe.get("checkpoint", {}):
        recipe["checkpoint"]["save_steps"] = "epoch"
    if "eval_steps" in train:
        train["eval_steps"] = "epoch"


def data_ranks(recipe: Mapping[str, Any]) -> int:
    """Number of data ranks of a new recipe."""
    parallel = recipe.get("parallel", {})
    devices = recipe["launch"]["num_devices"] * recipe["launch"].get("nnodes", 1)
    split = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
    return int(devices // split)


def _set_data(recipe: dict[str, Any], choice: Choice) -> None:
    """Replace the bundled rows by the data of the user."""
    if choice.data is None:
        return
    data = recipe["data"]
    data["train"] = choice.data
    data.pop("eval", None)
    data.pop("ignore_columns", None)  # those of the bundled rows
    if choice.eval_data is not None:
        data["eval"] = choice.eval_data
    elif "split" not in recipe.get(choice.stage, {}):  # no rows are held out
        recipe["train"].pop("eval_steps", None)
        recipe["checkpoint"].pop("best_metric", None)


def _set_method(recipe: dict[str, Any], choice: Choice) -> None:
    """Add adapters if the user has chosen them."""
    if choice.method == "full":
        return
    if "lora" not in recipe:
        section = recipe.get(choice.stage, {})
        train = recipe["train"]
        train["learning_rate"] = float(f"{train['learning_rate'] * _ADAPTED_RATE:.6g}")
        if section.get("reference") == "copy" or choice.stage in _COPIES:  # the frozen model is the reference
            section["reference"] = "adapter_off"
        recipe["lora"] = dict(stage_recipe("lora", choice.family.name)["lora"])
    if choice.method == "qlora":
        recipe["lora"]["base_dtype"] = _BASE


def stage_recipe(stage: str, family: str) -> dict[str, Any]:
    """Return the bundled recipe of a stage: that of the family, else that of llama.

    Raises:
        UserError: there is none.
    """
    for name in (family, "llama"):
        path = bundled("recipes") / name / f"{stage}.json"
        if is_file(path):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    raise UserError(
        f"--stage {stage}: llmsuite has no recipe to start from; use one of the package that provides the stage"
    )


def _template(choice: Choice) -> dict[str, Any]:
    """Return the bundled recipe that all other numbers come from, with its sections in the usual order."""
    found = stage_recipe(choice.stage, choice.family.name)
    recipe: dict[str, Any] = {"stage": choice.stage, "model": {}, "data": {}, "parallel": {}}
    return recipe | {key: copy.deepcopy(value) for key, value in found.items() if key != "source"}
