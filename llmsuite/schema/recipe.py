"""The sections every recipe has. A stage adds one more, of its own name; a model family types `model.config`.

Only data lives here: no class paths, no callables, nothing that a recipe could use to run code.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from llmsuite.schema.columns import column_problems
from llmsuite.schema.engine import EngineSection
from llmsuite.schema.generation import GenerationSection
from llmsuite.schema.lora import LoraSection
from llmsuite.schema.numbers import (
    BatchSize,
    Decay,
    Fraction,
    MixWeight,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from llmsuite.schema.parallel import ParallelSection
from llmsuite.schema.prefix import PrefixSection
from llmsuite.schema.reft import ReftSection
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class ModelSection(Section):
    """Which model, and where its weights and tokenizer come from."""

    family: str
    """Name of a registered model family; `llmsuite list models` shows them."""
    weights: str | None = None
    """Directory with safetensors and config.json in the HF or PaddleNLP layout, or a name on a hub such as
    `hf:ORG/NAME`, `ms:ORG/NAME@REVISION` or `ORG/NAME`, which is fetched once. Without it the parameters are
    initialised at random, from `seed`."""
    load: Literal["exact", "known", "any"] = "exact"
    """How closely the weights have to match the model. exact: the same tensors, no more and no fewer. known: tensors
    the model does not have are skipped. any: in addition, missing tensors and tensors of another shape are initialised
    from `seed`. Tensors that are skipped or initialised are listed by name."""
    tokenizer: str | None = None
    """Directory with tokenizer.json and tokenizer_config.json, or a name on a hub. Default: that of the weights."""
    preset: str | None = None
    """A named model shape of the family, such as "llama-3.1-8b". Needed only if there is no config.json to read."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model's config to override, for example to shrink it."""


@dataclasses.dataclass(kw_only=True)
class DataSection(Section):
    """The data to read and how it becomes tokens."""

    train: str
    """Training data: a .json, .jsonl, .csv, .tsv (all also .gz or .zst) or .parquet file, or a directory of such files;
    for pretraining also a .txt file or the prefix of an indexed corpus, and no .json file or directory. A relative path
    is looked up in the working directory, then among the files that come with llmsuite. A URL or a data set works too:
    `hf:ORG/NAME?split=train`, `hf:ORG/NAME/FILE`, `ms:ORG/NAME`."""
    eval: str | None = None
    """Evaluation data, given like train; without it there is no evaluation."""
    format: str = "auto"
    """Name of a registered data format, or "auto" to recognise it from the first row."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """What each field of the data format is made of: the name of a column, or a template with columns in braces such as
    "{question} {context}". Rows get exactly these fields. Default: rows are taken as they are."""
    mix: dict[str, MixWeight] = dataclasses.field(default_factory=dict)
    """More files to train on, each with the number of its samples for one of train, or with null for each of its
    samples once. Not for pretrain: pretrain.mix."""
    max_samples: PositiveInt | None = None
    """Read only the first so many rows (in pretraining: samples) of each file, for training and evaluation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """How to handle a row that cannot be read (truncated JSON, a missing key, a turn without a role). error: stop the
    run before its first step. skip: leave the row out and count it by reason."""
    max_length: PositiveInt = 2048
    """Longest sequence in tokens. A longer row is dropped and counted, unless the stage has a key to truncate it."""
    chat_template: Literal["tokenizer", "chatml", "llama3", "plain"] = "tokenizer"
    """"tokenizer": the template that comes with the tokenizer. The others are built in."""
    packing: Literal["none", "best_fit"] = "none"
    """best_fit: pack rows into samples of up to max_length tokens, which leaves little padding. No token attends to
    another row, and positions restart with each row. Batch sizes and epochs then count packed samples. For the stages
    sft, dpo and rm."""
    shuffle: bool = True
    """true: every epoch has an order of its own, a function of `seed`. false: the order of the file; with packing, of
    the packs."""
    drop_last: bool = False
    """false: a batch takes its last samples from the next epoch where one ends. true: leave out the samples at the end
    of each epoch that do not fill a global batch; with shuffle they are others each time."""
    group_by_length: bool = True
    """Assign the samples of a global batch to micro-batches by length, which leaves less padding. The result of a step
    stays the same."""
    collator: str | None = None
    """A function that makes the arrays of a batch, "FILE.py:FUNCTION": it is called with the samples and the stage's
    own `collate`, and returns a batch as that does. The same samples have to give the same arrays on every rank."""
    num_workers: NonNegativeInt = 0
    """Threads that prepare batches in advance; 0 to prepare each when it is needed."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from column_problems(self.columns)


@dataclasses.dataclass(kw_only=True)
class TrainSection(Section):
    """Batch sizes, optimizer and length of the training."""

    max_steps: PositiveInt | None = None
    """Optimizer steps. Give this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Passes over the training rows. Give this or max_steps."""
    global_batch_size: BatchSize
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: BatchSize
    """Samples of one forward pass on one rank; gradient accumulation makes up the rest."""
    micro_batch_tokens: PositiveInt | None = None
    """Fill each forward pass of training with samples up to this many tokens, padding included, instead of a fixed
    number of samples; micro_batch_size then applies to evaluation only."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd serves to compare runs: it shows errors in the scale of gradients, which adamw hides."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate decays after the warm-up. wsd: constant, until it falls in the last steps (warm-up, stable,
    decay: Hu et al. 2024, arXiv 2404.06395)."""
    decay_ratio: Fraction | None = None
    """With wsd: fraction of all steps, the last ones, in which the learning rate falls. Default: 0.1."""
    decay_type: Literal["linear", "cosine", "sqrt"] | None = None
    """With wsd: how it falls in them. sqrt: by 1 - sqrt(done) (Haegele et al. 2024, arXiv 2405.18392). Default:
    linear."""
    warmup_ratio: Fraction = 0.0
    """Fraction of all steps in which the learning rate rises to its peak."""
    warmup_steps: PositiveInt | None = None
    """The same as a number of steps. Give this or warmup_ratio."""
    warmup_from_zero: bool = False
    """true: step n of W warm-up steps has (n - 1) / W of the peak, as with transformers and PaddleNLP, so that the
    first step changes nothing. false: n / W."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of training, as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    adam_beta1: Decay = 0.9
    """Decay of the first moment."""
    adam_beta2: Decay = 0.999
    """Decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Term in the denominator of the Adam update."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global norm; null switches clipping off."""
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    """How to handle a step whose loss or gradient is infinite or not a number (with fp16, at the lowest loss scale).
    stop: end the run. skip: leave the batch out. roll_back: return to the last checkpoint and continue with the samples
    after this batch."""
    spike_factor: Annotated[float, Gt(1)] | None = None
    """A step is a spike if its gradient norm, before clipping, exceeds this factor times the median of the last 32
    steps. null: no step is."""
    on_spike: Literal["stop", "skip", "roll_back"] = "skip"
    """How to handle a spike; the choices of on_nonfinite."""
    max_bad_steps: PositiveInt = 10
    """Stop the run after this many skipped or rolled-back steps without progress beyond the furthest step so far."""
    expert_balance_loss: NonNegativeFloat = 0.0
    """Factor of the sequence-wise load-balancing loss of experts (`aux_loss_alpha`: 0.001 in DeepSeek-V2, 0.0001 in
    V3); 0 for none."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """Step size by which the gate's bias of each expert moves towards an even load after a step (DeepSeek-V3:
    0.001)."""
    mtp_loss_weight: NonNegativeFloat = 0.0
    """Weight of multi-token prediction: of the loss of the layer that predicts the token after the next one, which is
    trained with the model then (DeepSeek-V3, arXiv 2412.19437, section 2.2: 0.3, at the end 0.1). 0: the layer is kept
    as the weights have it. In the stages pretrain, sft and lora, for shapes with num_nextn_predict_layers = 1."""
    eval_steps: PositiveInt | Literal["epoch"] | None = None
    """Evaluate every this many steps, or "epoch" for the step that ends an epoch; and after the last one. Default: only
    after the last."""
    log_steps: PositiveInt = 1
    """Print and record metrics every this many steps."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.max_steps is None) == (self.num_epochs is None):
            state = "neither is given" if self.max_steps is None else "both are given"
            yield "max_steps", f"give max_steps or num_epochs, exactly one; {state}"
        for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon") if self.optimizer == "sgd" else ():
            default = getattr(type(self), key)
            if getattr(self, key) != default:
                yield key, f"is not read by the optimizer sgd; set it to {default}, its default, or choose adamw"
        if self.lr_schedule == "constant" and self.min_lr_ratio > 0:
            yield "min_lr_ratio", "has no effect with lr_schedule constant; remove it or choose linear, cosine or wsd"
        for key in ("decay_ratio", "decay_type") if self.lr_schedule != "wsd" else ():
            if getattr(self, key) is not None:
                yield key, f"has no effect with lr_schedule {self.lr_schedule}; remove it or choose wsd"
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            yield "warmup_steps", "and warmup_ratio are both given; remove one of them"
        if self.lr_schedule == "wsd" and self.warmup_ratio + (self.decay_ratio or 0.0) > 1:
            yield "decay_ratio", "and warmup_ratio together are above 1; lower one of them"
        if self.warmup_from_zero and self.warmup_steps is None and self.warmup_ratio == 0:
            yield "warmup_from_zero", "has no effect without a warm-up; set warmup_steps or warmup_ratio, or remove it"
        if self.on_spike != "skip" and self.spike_factor is None:
            yield "on_spike", "has no effect while spike_factor is null; set that too, or remove it"

    @property
    def may_roll_back(self) -> bool:
        """Whether a step may send the run back to a checkpoint."""
        return self.on_nonfinite == "roll_back" or (self.spike_factor is not None and self.on_spike == "roll_back")


@dataclasses.dataclass(kw_only=True)
class QatSection(Section):
    """Quantisation-aware training (Jacob et al. 2018, arXiv 1712.05877): linear layers compute with operands rounded
    to int8."""

    weight_bits: Literal[8] | None = None
    """8: round weights to int8, with one scale for each output. null: no quantisation-aware training."""
    activation_bits: Literal[8] | None = None
    """8: round the inputs of these layers too, with one scale a layer: a moving average of their largest magnitude."""
    moving_rate: Decay = 0.9
    """Decay of that moving average in each step."""
    target_modules: list[str] | None = None
    """Layers to quantise: patterns like those of lora.target_modules. Default: every matrix of attention and MLP,
    except the routed experts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target_modules == []:
            yield "target_modules", "is empty, so nothing would be rounded; name some, or leave it out"
        for field in dataclasses.fields(self) if self.weight_bits is None else ():
            if getattr(self, field.name) != field.default:
                yield field.name, "has no effect while weight_bits is null; set that to 8, or remove it"
        if self.weight_bits is not None and self.activation_bits is None and self.moving_rate != 0.9:
            yield "moving_rate", "has no effect while activation_bits is null; set that to 8, or remove it"


@dataclasses.dataclass(kw_only=True)
class CheckpointSection(Section):
    """When to save checkpoints: always after the last step and when a file `save-now` appears in output_dir, otherwise
    as these keys say."""

    save_steps: PositiveInt | Literal["epoch"] | None = None
    """Save every this many steps, or "epoch" for the step that ends an epoch."""
    keep_last: Annotated[int, Ge(2)] = 2
    """Number of newest checkpoints to keep. At least 2, because a crash may interrupt the newest."""
    async_save: bool = True
    """Write in the background, from a copy in host memory, while the next steps run. If the copy does not fit in
    memory, training waits."""
    best_metric: str | None = None
    """A metric of the evaluation, such as "eval/loss". The checkpoint with its best value is saved and kept besides the
    keep_last newest."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Whether the lowest or the highest value of best_metric is best."""


@dataclasses.dataclass(kw_only=True)
class LaunchSection(Section):
    """The devices and machines of a run."""

    num_devices: PositiveInt = 1
    """Devices per machine; on cpu, processes."""
    devices: str | list[NonNegativeInt] | None = None
    """Numbers of the devices to use on each machine, such as "4,5,6,7"; num_devices follows from it. Default: the first
    num_devices. Not for cpu."""
    nnodes: PositiveInt = 1
    """Machines, with num_devices each. Where they share no output_dir, each keeps its part of a checkpoint."""
    master: str | None = None
    """host:port of machine 0, which the launchers of the other machines connect to."""
    node_rank: NonNegativeInt | None = None
    """Number of this machine, from 0; give it on the command line of each machine."""
    stall_seconds: PositiveFloat | None = 600.0
    """End the run (exit code 3) and report which ranks wait for which, once nothing has happened on any rank for this
    long; three times as long until each rank is in its second step. null: never."""
    max_restarts: NonNegativeInt = 0
    """How often all ranks are started again, from the newest checkpoint, when a rank or a machine is lost: killed,
    crashed, or hanging. Not after an error of yours, Ctrl-C, or a second loss at the same place."""
    spares: NonNegativeInt = 0
    """Machines beyond nnodes that wait, numbered after the others: at a restart one takes the place of a machine that
    was lost."""
    min_nnodes: PositiveInt | None = None
    """Go on with fewer machines than nnodes after a restart, but no fewer than this, when lost ones do not come back
    and no spare is left. null: never."""
    rejoin_seconds: PositiveFloat = 60.0
    """How long the others wait for a lost machine before they go on with fewer (min_nnodes)."""
    log_dir: str | None = None
    """Directory for what each rank prints, `workerlog.N`, when there are several. Default: `logs` in output_dir."""

    @property
    def device_numbers(self) -> list[int] | None:
        """`devices` as numbers. Raises ValueError when it is not a list of them."""
        return device_numbers(self.devices)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.master is not None and not re.fullmatch(r"[^:\s]+:[0-9]{1,5}", self.master):
            yield "master", f"is {self.master!r}; it has to be host:port"
        elif self.master is not None and not 0 < int(self.master.rpartition(":")[2]) < 65536:
            yield "master", f"is {self.master!r}; a port is 1 to 65535"
        most = self.nnodes + self.spares
        if self.node_rank is not None and self.node_rank >= most:
            spares = f" and {self.spares} spares" if self.spares else ""
            yield "node_rank", f"is {self.node_rank}; with nnodes {self.nnodes}{spares} it is at most {most - 1}"
        if self.spares and self.nnodes == 1:
            yield (
                "spares",
                "a spare takes the place of any machine but the first; set nnodes to 2 at least, or this to 0",
            )
        elif self.spares and not self.max_restarts:
            yield "spares", "a spare takes its place at a restart; set max_restarts, or this to 0"
        if self.min_nnodes is not None and self.min_nnodes > self.nnodes:
            yield "min_nnodes", f"is {self.min_nnodes}, more than nnodes, which is {self.nnodes}"
        elif self.min_nnodes is not None and not self.max_restarts:
            yield "min_nnodes", "machines are fewer after a restart; set max_restarts, or this to null"
        try:
            numbers = self.device_numbers
        except ValueError:
            yield "devices", f"is {self.devices!r}; it has to be different numbers, such as 4,5,6,7"
            return
        if numbers is not None and len(numbers) != self.num_devices:
            message = f"names {len(numbers)} devices, but num_devices is {self.num_devices}; leave that out"
            yield "devices", message


def device_numbers(devices: Any) -> list[int] | None:
    """Device numbers of a text such as "4,5,6,7" or of a list; None of None.

    Raises:
        ValueError: they are none, or one is named twice.
    """
    if devices is None:
        return None
    numbers = [int(part) for part in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not numbers or len(set(numbers)) < len(numbers) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(devices)
    return numbers


@dataclasses.dataclass(kw_only=True)
class Recipe(Section):
    """A whole run as data."""

    stage: str
    """Name of a registered stage; `llmsuite list stages` shows them."""
    source: str | None = None
    """Where the numbers of this recipe come from, in one line; `llmsuite list recipes` shows it."""
    model: ModelSection
    data: DataSection
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    engine: EngineSection = dataclasses.field(default_factory=EngineSection)
    train: TrainSection
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    reft: ReftSection = dataclasses.field(default_factory=ReftSection)
    prefix: PrefixSection = dataclasses.field(default_factory=PrefixSection)
    generation: GenerationSection = dataclasses.field(default_factory=GenerationSection)
    qat: QatSection = dataclasses.field(default_factory=QatSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    launch: LaunchSection = dataclasses.field(default_factory=LaunchSection)
    device: str = "cpu"
    """Name of a registered device backend; `llmsuite list devices` shows them."""
    loggers: list[str] = dataclasses.field(default_factory=list)
    """Names of registered loggers that receive the metrics, in addition to metrics.jsonl."""
    seed: NonNegativeInt = 42
    """Seed of the initial parameters and of the order of the data."""
    output_dir: str
    """Directory for everything the run writes."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for key, path in (("output_dir", self.output_dir), ("launch.log_dir", self.launch.log_dir or ".")):
            if not path or "\0" in path:
                yield key, f"is {path!r}; it has to be the path of a directory"
            elif len(os.fsencode(path)) > 1000 or any(len(os.fsencode(part)) > 200 for part in path.split("/")):
                yield key, "is too long for the files below it: at most 1,000 bytes, and 200 between two slashes"

    @property
    def freezes_model(self) -> bool:
        """Whether something beside the model is trained, and the model itself is not."""
        return any(size is not None for size in [self.lora.rank, self.reft.rank, self.prefix.tokens])
