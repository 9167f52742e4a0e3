"""The sections every recipe has. A stage adds one more, of its own name; a model family types `model.config`.

Only data lives here: no class paths, no callables, nothing that a recipe could use to run code.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from llmsuite.schema.engine import EngineSection
from llmsuite.schema.numbers import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.schema.parallel import ParallelSection
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class ModelSection(Section):
    """Which model, and where its weights and tokenizer come from."""

    family: str
    """Name of a registered model family; `llmsuite list models` shows them."""
    weights: str | None = None
    """Directory with safetensors and config.json in the HF or PaddleNLP layout. Without it the
    parameters are drawn from `seed`."""
    load: Literal["exact", "known", "any"] = "exact"
    """How far the weights have to fit. exact: they have the model's tensors, no more and no fewer. known: tensors the
    model does not have are left out. any: also, what is missing or of another shape is drawn from `seed`. What is
    left out or drawn is listed by name."""
    tokenizer: str | None = None
    """Directory with tokenizer.json and tokenizer_config.json. Default: the directory of the weights."""
    preset: str | None = None
    """A shape the family knows by name, such as "llama-3.1-8b". Needed only where config.json cannot be read."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Single dimensions of the shape, set on top of the preset, to shrink or grow it."""


@dataclasses.dataclass(kw_only=True)
class DataSection(Section):
    """What is read and how it becomes tokens."""

    train: str
    """.json, .jsonl (also with .gz or .zst behind it) or .parquet, or a directory of such files; for pretraining a
    .txt, .jsonl or .parquet, or the prefix of an indexed corpus. A relative path is looked up in the working directory,
    then among the files that come with llmsuite. Also a URL, or a data set: `hf://OWNER/NAME?split=train`."""
    eval: str | None = None
    """The same for evaluation; without it nothing is evaluated."""
    format: str = "auto"
    """Name of a registered data format, or "auto" to recognise it from the first row."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that cannot be read does (half a line of JSON, a key that is missing, a turn of nobody): stop the run
    before its first step, or be left out and counted by reason."""
    max_length: PositiveInt = 2048
    """Longest sequence in tokens. A row that does not fit is dropped and counted; it is
    cut only where a stage is told to."""
    chat_template: Literal["tokenizer", "chatml", "llama3", "plain"] = "tokenizer"
    """"tokenizer" for the template that comes with the tokenizer, or a built-in one."""
    packing: Literal["none", "best_fit"] = "none"
    """With "best_fit" rows are put together to samples of up to max_length tokens, in which no token sees another row
    and positions restart: little is padded. Batch sizes and epochs then count these samples. For the stages sft, dpo
    and rm."""
    group_by_length: bool = True
    """Deal the samples of a global batch out to micro-batches by their lengths, so that less is padded. What a step
    learns stays the same."""
    num_workers: NonNegativeInt = 0
    """Threads that make batches ahead of their use; 0 to make each when it is needed."""


@dataclasses.dataclass(kw_only=True)
class TrainSection(Section):
    """The optimizer and how long it runs."""

    max_steps: PositiveInt | None = None
    """Optimizer steps. Give this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Passes over the training rows. Give this or max_steps."""
    global_batch_size: PositiveInt
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: PositiveInt
    """Samples of one forward pass on one rank; gradient accumulation makes up the rest."""
    micro_batch_tokens: PositiveInt | None = None
    """Fill the forward passes of training up to so many tokens, padding included, rather than with a fixed number of
    samples; micro_batch_size is then that of evaluation."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd is there to compare runs: it shows errors of scale that adamw hides."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_ratio: Fraction = 0.0
    """Part of all steps in which the learning rate rises from 0 to its peak."""
    min_lr_ratio: Fraction = 0.0
    """What the learning rate has come down to when the last step is done, as a part of the peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay; norms and biases are left out."""
    adam_beta1: Decay = 0.9
    """Decay of the first moment."""
    adam_beta2: Decay = 0.999
    """Decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Term in the denominator of the Adam update."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null switches clipping off."""
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    """When loss or gradient are infinite or not a number (with fp16, at the lowest loss scale): stop the run, leave the
    batch out, or go back to the last checkpoint and on with the samples behind this batch."""
    spike_factor: Annotated[float, Gt(1)] | None = None
    """A step whose gradient norm, before clipping, is above this times the median of the last 32 is a spike. null: none
    is."""
    on_spike: Literal["stop", "skip", "roll_back"] = "skip"
    """The same for a spike."""
    max_bad_steps: PositiveInt = 10
    """So many steps may be left out or rolled back before one further than ever is learnt from; then the run stops."""
    expert_balance_loss: NonNegativeFloat = 0.0
    """Factor of the sequence-wise loss of dealing tokens unevenly over experts (`aux_loss_alpha` of DeepSeek-V2, 0.001;
    of V3, 0.0001); 0 for none."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """By how much the bias of each expert is moved after a step, towards even loads (DeepSeek-V3: 0.001)."""
    eval_steps: PositiveInt | None = None
    """Evaluate every so many steps, and after the last. Default: only after the last."""
    log_steps: PositiveInt = 1
    """Print and record metrics every so many steps."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.max_steps is None) == (self.num_epochs is None):
            state = "neither is given" if self.max_steps is None else "both are given"
            yield "max_steps", f"give max_steps or num_epochs, exactly one; {state}"
        if self.lr_schedule == "constant" and self.min_lr_ratio > 0:
            yield "min_lr_ratio", "has no effect with lr_schedule constant; remove it or choose linear or cosine"
        if self.on_spike != "skip" and self.spike_factor is None:
            yield "on_spike", "has no effect while spike_factor is null; set that too, or remove it"

    @property
    def may_roll_back(self) -> bool:
        """Whether a step may send the run back to a checkpoint."""
        return self.on_nonfinite == "roll_back" or (self.spike_factor is not None and self.on_spike == "roll_back")


@dataclasses.dataclass(kw_only=True)
class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): trained instead of the model, with any stage."""

    rank: PositiveInt | None = None
    """Inner size of the adapters; null for none: the model itself is trained."""
    alpha: PositiveFloat = 16.0
    """Their outputs are multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732)."""
    target_modules: list[str] | None = None
    """Matrices that get one: patterns over the names of modules, whole or from a dot on, such as "q_proj" or
    "layers.0.mlp.*". Default: every matrix of attention and MLP; not the routed experts."""
    lora_plus_ratio: PositiveFloat = 1.0
    """Learning rate of the second factor over that of the first (LoRA+, Hayou et al. 2024, arXiv 2402.12354)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target_modules == []:
            yield "target_modules", "is empty, so nothing would be trained; name some, or leave it out"
        for field in dataclasses.fields(self) if self.rank is None else ():
            if getattr(self, field.name) != field.default:
                yield field.name, "has no effect while rank is null; set that too, or remove it"

    @property
    def scale(self) -> float:
        """What the outputs of the adapters are multiplied by."""
        assert self.rank is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(kw_only=True)
class QatSection(Section):
    """Quantisation-aware training (Jacob et al. 2018, arXiv 1712.05877): linear layers compute with what int8 leaves
    of their operands."""

    weight_bits: Literal[8] | None = None
    """8: weights are rounded to int8, with a scale for each output; null for none of all this."""
    activation_bits: Literal[8] | None = None
    """8: the inputs of those layers too, with one scale a layer: a moving average of their largest magnitude."""
    moving_rate: Decay = 0.9
    """What remains of that average in each step."""
    target_modules: list[str] | None = None
    """Which layers: patterns as those of lora.target_modules. Default: every matrix of attention and MLP; not the
    routed experts."""

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
    """When the run is saved: after the last step, as the keys say, and when a file `save-now` appears in output_dir."""

    save_steps: PositiveInt | None = None
    """Save every so many steps."""
    keep_last: Annotated[int, Ge(2)] = 2
    """Older checkpoints are removed. At least 2, because the newest may be the one a crash interrupts."""
    async_save: bool = True
    """Write while the next steps are computed, from a copy on the host. Where the copy does not fit, training waits."""
    best_metric: str | None = None
    """A metric of the evaluation, such as "eval/loss": the checkpoint with its best value stays, besides keep_last,
    and is saved if it is not due anyway."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Which value of best_metric is best."""


@dataclasses.dataclass(kw_only=True)
class LaunchSection(Section):
    """Which devices take part."""

    num_devices: PositiveInt = 1
    """Devices (on cpu: processes) per machine."""
    nnodes: PositiveInt = 1
    """Machines, with num_devices each and one output_dir that all of them see."""
    master: str | None = None
    """host:port of machine 0, where the launchers of several machines meet."""
    node_rank: NonNegativeInt | None = None
    """Which machine this is, from 0: given on the command line of each."""
    stall_seconds: PositiveFloat | None = 600.0
    """When nothing has happened on any rank for so long, who waits for whom is told and the run ends (exit code 3);
    until each is in its second step, three times as long. null: never."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.master is not None and not re.fullmatch(r"[^:\s]+:[0-9]{1,5}", self.master):
            yield "master", f"is {self.master!r}; it has to be host:port"
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            yield "node_rank", f"is {self.node_rank}; with nnodes {self.nnodes} it is at most {self.nnodes - 1}"


@dataclasses.dataclass(kw_only=True)
class Recipe(Section):
    """A whole run as data."""

    stage: str
    """Name of a registered stage; `llmsuite list stages` shows them."""
    source: str | None = None
    """Where the numbers of this recipe are from, in a line; `llmsuite list recipes` shows it."""
    model: ModelSection
    data: DataSection
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    engine: EngineSection = dataclasses.field(default_factory=EngineSection)
    train: TrainSection
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    qat: QatSection = dataclasses.field(default_factory=QatSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    launch: LaunchSection = dataclasses.field(default_factory=LaunchSection)
    device: str = "cpu"
    """Name of a registered device backend; `llmsuite list devices` shows them."""
    loggers: list[str] = dataclasses.field(default_factory=list)
    """Registered loggers that receive the metrics, besides metrics.jsonl, which is always written."""
    seed: NonNegativeInt = 42
    """Initial parameters and the order of the data are functions of it."""
    output_dir: str
    """Everything the run writes lies under this directory."""
