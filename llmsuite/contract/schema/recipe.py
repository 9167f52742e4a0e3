"""The sections that every recipe has. A stage adds its own section; a model family defines the keys of `model.config`.

A recipe is plain data. Keys that name Python files are rejected unless the user has allowed them:
`llmsuite.recipe.code`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from llmsuite.contract.schema.chat_templates import OF_TOKENIZER, template_problems
from llmsuite.contract.schema.columns import column_problems, fill_problems, kwargs_problems
from llmsuite.contract.schema.engine import EngineSection
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.generation import GenerationSection
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.contract.schema.numbers import (
    BatchSize,
    Decay,
    Fraction,
    MixWeight,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from llmsuite.contract.schema.parallel import ParallelSection
from llmsuite.contract.schema.prefix import PrefixSection
from llmsuite.contract.schema.reft import ReftSection
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.contract.schema.section import Section, keys_except
from llmsuite.contract.schema.text_template import text_template_problems

HELD_OUT = "holdout"
"""Name of the evaluation set of `data.holdout` next to the named sets of `data.eval`."""


@dataclasses.dataclass(kw_only=True)
class ModelSection(Section):
    """The model, and the sources of its weights and tokenizer."""

    family: str
    """Name of a registered model family; `llmsuite list models` shows them."""
    weights: str | None = None
    """Directory with safetensors and config.json in the HF or PaddleNLP layout, or a name on a hub such as
    `hf:ORG/NAME`, `ms:ORG/NAME@REVISION` or `ORG/NAME`, which is downloaded once. null: random initialisation from
    `seed`."""
    load: Literal["exact", "known", "any"] = "exact"
    """Match between the tensors of the weights and those of the model. exact: they have to be the same. known: tensors
    that the model does not have are skipped. any: in addition, tensors that are missing or have another shape are
    initialised from `seed`. Skipped and initialised tensors are listed by name."""
    tokenizer: str | None = None
    """Directory with tokenizer.json and tokenizer_config.json, or a name on a hub. Default: the tokenizer of the
    weights."""
    new_tokens: list[str] = dataclasses.field(default_factory=list)
    """Texts that are added to the tokenizer, each as one token with the next id, as by `add_tokens` of transformers.
    The tokenizer is saved with them. Their rows of embedding and head have to be trained: next to adapters, by
    `lora.modules_to_save`."""
    new_special_tokens: list[str] = dataclasses.field(default_factory=list)
    """Special tokens, which answers are decoded without, that are added after new_tokens."""
    vocab_size: PositiveInt | None = None
    """Number of rows of embedding and head, of which each token has one: more than those of the weights, for example to
    make room for new_tokens, or to pad them to a multiple. Each added row is the mean of the others. null: as many as
    the weights have."""
    preset: str | None = None
    """Name of a published model shape of the family, such as "llama-3.1-8b". Needed only without a config.json."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model's config to override, for example to make the model smaller."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.weights is None:
            yield "load", "has no effect while weights is null; set that too, or remove it"
            yield "vocab_size", "has no effect while weights is null; set config.vocab_size instead"

    def problems(self) -> Iterator[tuple[str, str]]:
        every: list[str] = []
        for key, texts in (("new_tokens", self.new_tokens), ("new_special_tokens", self.new_special_tokens)):
            for text in texts:
                if not text.strip():
                    yield key, f"has {text!r}; a token has a text"
                elif text in every:
                    yield key, f"has {text!r} twice; name it once"
                every.append(text)


@dataclasses.dataclass(kw_only=True)
class DataSection(Section):
    """Training and evaluation data, and how rows become token sequences."""

    train: str
    """Training data: a .json, .jsonl, .csv, .tsv (all also .gz or .zst) or .parquet file, or a directory of such files;
    for pretraining also a .txt file or the prefix of an indexed corpus, but no .json file or directory. A relative path
    is looked up in the working directory, then among the files bundled with llmsuite. Also a URL or a data set on a
    hub: `hf:ORG/NAME?split=train`, `hf:ORG/NAME/FILE`, `ms:ORG/NAME`."""
    eval: str | dict[str, str] | None = None
    """Evaluation data, in the same forms as train; its metrics are `eval/loss` and others. Or several named sets, such
    as {"math": FILE, "chat": FILE}, whose metrics are `eval/math/loss`, `eval/chat/loss` and so on. null: no
    evaluation, unless holdout is set."""
    holdout: Annotated[float, Gt(0), Lt(1)] | PositiveInt | None = None
    """Hold rows out of the training data for evaluation, a share of the rows between 0 and 1 or their number: the rows
    of `datasets.Dataset.train_test_split(test_size=HOLDOUT, seed=SEED)` with the recipe's `seed`. With mix, the rows of
    all files are taken one file after the other, as by `datasets.concatenate_datasets`. Next to named sets of eval the
    metrics are `eval/holdout/loss` and so on."""
    sample: PositiveInt | dict[str, PositiveInt] | None = None
    """Use only this many random rows of train: the first of `numpy.random.RandomState(SEED).permutation(ROWS)` with the
    recipe's `seed`. Rows are held out of these. Or the number for several files of train and mix, such as
    {FILE: 500}. Other files, and those of eval, are used in full. null: all rows."""
    choice: Literal["datasets", "ms-swift", "axolotl"] = "datasets"
    """Rule by which sample and holdout choose rows. datasets: as these keys say. ms-swift: as `#COUNT` and
    `split_dataset_ratio` of ms-swift with `data_seed` set to the recipe's `seed`: holdout is a share of each file, and
    a sample of more rows than there are repeats rows. axolotl: as `val_set_size` of Axolotl: the last rows in the order
    of `datasets.Dataset.shuffle(SEED)`, after those that are longer than max_length are dropped."""
    format: str | dict[str, str] = "auto"
    """Name of a registered data format (`llmsuite list formats` shows them), or "auto" to detect it from the first
    row. Or the format of several files of train, mix and eval, such as {FILE: "alpaca"}; that of other files is
    detected."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fields of the data format and their source: the name of a column, or a template with columns in braces, such as
    "{question} {context}". Rows then have exactly these fields. Default: the columns of the data."""
    ignore_columns: list[str] = dataclasses.field(default_factory=list)
    """Columns of rows, and keys of turns, to leave out. Other columns that the format does not read, and other keys of
    turns that are unknown and that the chat template does not read, are refused by name. "*": leave all of these
    out. Pictures, videos and sounds are left out only by their names."""
    text_template: str | None = None
    """With stages sft and lora: text that the fields of a row are put into, in place of a chat template: "alpaca" (its
    own words, with and without an input), "completion" ("{prompt}{completion}"), or a text with fields in braces. From
    the last field on, the text is supervised. null: rows have a data format."""
    answer_tokens: Literal["after_prompt", "apart"] = "after_prompt"
    """With text_template: tokens of the supervised text. after_prompt: those that follow the tokens of the prompt.
    apart: those of this text alone, as Axolotl makes them. Some tokenizers, such as that of Llama 2, then begin it with
    a space. A row whose text is empty stays, without the end-of-sequence token, and trains nothing."""
    end_of_answer: Literal["token", "template", "token_in_text"] = "token"
    """End of an answer in training. token: the end-of-sequence token. What the chat template writes after it, such as a
    line break, is left out; an answer that the template ends with another token gets it too, unless the template marks
    with {% generation %} what is supervised. template: as the chat template ends it. All that it writes up to the next
    turn, or marks, is supervised, and nothing is added. token_in_text, for stages of conversations: the end-of-sequence
    token where the template writes or marks it, and nothing is added. What the template writes after it stays without
    weight, also after the last answer, as in Axolotl: it counts for max_length and for packs."""
    ranked_pairs: Literal["all", "best"] = "all"
    """With stages dpo and rm: pairs that are made of a row with ranked answers. all: each two with different scores;
    best: the best answer with each that has a lower score."""
    mix: dict[str, MixWeight] = dataclasses.field(default_factory=dict)
    """More training data, each with its number of samples per sample of train, or with null to use each of its samples
    once. The stage pretrain uses pretrain.mix instead."""
    max_samples: PositiveInt | None = None
    """Use only the first rows (in pretraining: samples) of each file, up to this number, also for evaluation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Handling of a row that cannot be read (truncated JSON, a missing key, a turn without a role). error: stop before
    the first step. skip: skip the row and count it by reason."""
    fill: dict[str, str] = dataclasses.field(default_factory=dict)
    """Texts that are replaced wherever they occur in the values of a row, such as {"{{NAME}}": "Ada"}, in all files.
    The replacement is literal, and what was filled in is not replaced again."""
    max_length: PositiveInt = 2048
    """Maximum sequence length in tokens. Longer rows are dropped and counted, unless the stage has a key to truncate
    them."""
    chat_template: str = OF_TOKENIZER
    """Chat template. "tokenizer": the template of the tokenizer. Else the name of one that comes along, such as "qwen3"
    (`llmsuite list templates`), or one of your own: the path of a .jinja file, which is looked up in the working
    directory, then next to the recipe, or the text itself. The run records the text, and saves checkpoints with
    it."""
    chat_template_kwargs: dict[str, bool | int | float | str | list[str]] = dataclasses.field(default_factory=dict)
    """Variables of the chat template, such as {"enable_thinking": false}. A row may set them in a column of the same
    name. A variable that the template does not read is refused."""
    system: str | None = None
    """Text of the system turn of rows without one, in training, rollouts and evaluations. Rows with a system turn keep
    theirs. null: no turn is added."""
    supervise_thoughts: bool = True
    """With stage sft: true: train on the thoughts of the supervised turns, where the chat template renders them. false:
    the thoughts are input only; what the template writes around them, such as `</think>`, is supervised."""
    packing: Literal["none", "best_fit", "first_fit"] = "none"
    """Pack rows into samples of up to pack_length tokens, which avoids most padding. Tokens do not attend to other
    rows, and positions restart with each row. Batch sizes and epochs then count packed samples. best_fit: the longest
    row first, each where it leaves the least room. first_fit: rows in an order by `seed`, each into the first pack with
    room, and at most 200 in a pack, as the multipack sampler of Axolotl. For the stages sft, dpo and rm."""
    pack_length: PositiveInt | None = None
    """With packing: tokens of a full pack. Default: max_length, the limit for each row."""
    shuffle: bool = True
    """true: shuffle in every epoch, seeded by `seed`. false: the order of the file; with packing, the order of the
    packed samples."""
    drop_last: bool = False
    """true: drop the samples at the end of each epoch that do not fill a global batch (with shuffle, different samples
    in each epoch). false: fill the batch with samples of the next epoch."""
    group_by_length: bool = True
    """Assign the samples of a global batch to micro-batches by length, to reduce padding. The global batch and the
    result of the step do not change."""
    collator: str | None = None
    """Custom collator, "FILE.py:FUNCTION": it is called with the samples and the stage's `collate` function, and
    returns a batch like that function. It has to be deterministic: the same samples give the same arrays on every
    rank."""
    num_workers: NonNegativeInt = 0
    """Number of threads that prepare batches in advance. 0: prepare each batch when it is needed."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from column_problems(self.columns)
        yield from template_problems(self.chat_template)
        yield from kwargs_problems(self.chat_template_kwargs)
        yield from text_template_problems(self.text_template)
        yield from fill_problems(self.fill)
        yield from self._evaluation_problems()
        yield from self._choice_problems()
        yield from self._format_problems()

    def format_of(self, name: str) -> str:
        """Return the data format of a file of train, mix or eval: a name, or "auto"."""
        if isinstance(self.format, str):
            return self.format
        return self.format.get(name, "auto")

    @property
    def longest_sample(self) -> int:
        """Most tokens of a sample: of a row, or of a pack."""
        return self.max_length if self.pack_length is None else self.pack_length

    def sample_sizes(self) -> list[int | None]:
        """Return the number of rows to sample from train, and from each file of mix; None for all rows."""
        if isinstance(self.sample, dict):
            return [self.sample.get(name) for name in (self.train, *self.mix)]
        return [self.sample, *[None] * len(self.mix)]

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.sample is None and self.holdout is None:
            yield "choice", "has no effect without data.sample and data.holdout, which choose rows; remove it"
        if self.text_template is None:
            yield "answer_tokens", "has no effect without data.text_template; remove it"
        if self.packing == "none":
            yield "pack_length", "has no effect without data.packing; remove it"
        if self.text_template is not None:
            yield "format", "has no effect with data.text_template, which says what a row has; remove it"
        if self.text_template is not None or self.format == "text":
            for key in ("chat_template", "chat_template_kwargs", "end_of_answer", "supervise_thoughts", "system"):
                yield key, "has no effect on rows of text, which have no turns; remove it"

    def _choice_problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.sample, dict):
            files = [self.train, *self.mix]
            if not self.sample:
                yield "sample", "names no file; name one, or set it to null"
            for name in self.sample:
                if name not in files:
                    yield "sample", f"names {name}, which is no file of data.train or data.mix: {', '.join(files)}"
        if self.choice == "ms-swift" and isinstance(self.holdout, int):
            yield "holdout", "is a number of rows; with data.choice ms-swift it is a share of each file, such as 0.01"
        if self.choice == "axolotl" and self.sample is not None:
            yield "sample", "is set, and data.choice axolotl uses all rows; remove one of them"
        if self.pack_length is not None and self.pack_length < self.max_length:
            yield (
                "pack_length",
                f"is {self.pack_length}, and a row may have data.max_length {self.max_length}; raise it",
            )

    def _format_problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.format, str):
            return
        evaluations = self.eval.values() if isinstance(self.eval, dict) else [self.eval]
        files = [self.train, *self.mix, *(name for name in evaluations if name is not None)]
        if not self.format:
            yield "format", 'names no file; name one, or set it to "auto"'
        for name in self.format:
            if name not in files:
                yield "format", f"names {name}, which is no file of data.train, mix or eval: {', '.join(files)}"

    def _evaluation_problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.eval, str) and self.holdout is not None:
            message = "and eval are both given; remove one of them, or name the data of eval"
            yield "holdout", f'{message}: {{"NAME": {json.dumps(self.eval)}}}'
        if not isinstance(self.eval, dict):
            return
        if not self.eval:
            yield "eval", "names no evaluation set; name one, or set it to null"
        for name in self.eval:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                yield "eval", f"has the name {name!r}; names have up to 64 letters, digits, '_', '.' and '-'"
            elif name == HELD_OUT and self.holdout is not None:
                yield "eval", f"has the name {name!r}, which is that of the rows of data.holdout; choose another"


@dataclasses.dataclass(kw_only=True)
class EarlyStoppingSection(Section):
    """Early stopping: end the run when evaluations no longer improve. The best checkpoint is kept."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without an improvement. null: no early stopping."""
    metric: str | None = None
    """Evaluation metric that has to improve. Default: checkpoint.best_metric, or eval/loss where that is null. Losses
    are best where they are lowest; accuracies, margins, rewards and scores of answers where they are highest. With
    checkpoint.best_metric, checkpoint.best_is decides."""
    min_delta: NonNegativeFloat = 0.0
    """An evaluation is an improvement if it is better than that of the last improvement by more than this."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.patience is None:
            for key in keys_except(self, "patience"):
                yield key, "has no effect while patience is null; set that too, or remove it"


@dataclasses.dataclass(kw_only=True)
class LossWatchdogSection(Section):
    """Loss watchdog: end the run when the loss stays too high, as in Axolotl."""

    threshold: PositiveFloat | None = None
    """End the run where the loss of several steps in a row is above this: after the step that follows them. A step
    after which the model is evaluated does not count. null: no watchdog."""
    patience: PositiveInt = 3
    """Number of these steps."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.threshold is None:
            yield "patience", "has no effect while threshold is null; set that too, or remove it"


@dataclasses.dataclass(kw_only=True)
class ProfileSection(Section):
    """Profile of some steps: each rank writes a trace of them, `profile/steps-A-B.rank-N.json.gz`, for Perfetto."""

    steps: list[PositiveInt] | None = None
    """The first and the last step of the trace, such as [10, 12]. null: no profile."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.steps is None:
            return
        if len(self.steps) != 2:
            yield "steps", f"has {len(self.steps)} numbers; give the first and the last step, such as [10, 12]"
        elif self.steps[0] > self.steps[1]:
            first, last = self.steps
            yield "steps", f"begins at step {first} and ends at step {last}, before it; write [{last}, {first}]"


@dataclasses.dataclass(kw_only=True)
class TrainSection(Section):
    """Batch sizes, optimizer, learning-rate schedule and length of training."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps. Set either this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Number of passes over the training data. Set either this or max_steps."""
    global_batch_size: BatchSize
    """Number of samples in one optimizer step, over all ranks."""
    micro_batch_size: BatchSize
    """Number of samples in one forward pass on one rank; the number of gradient accumulation steps follows from it."""
    micro_batch_tokens: PositiveInt | None = None
    """Fill each training micro-batch with samples up to this many tokens, padding included, instead of a fixed number
    of samples; micro_batch_size then applies to evaluation only."""
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """Optimizer. adamw_8bit: AdamW whose moments are stored in 8 bits, in blocks of 256 (Dettmers et al. 2022, arXiv
    2110.02861), as bitsandbytes does; those of embeddings, and of parameters with fewer than 4,096 elements, in
    float32. sgd is for comparing runs: it shows errors in the scale of gradients, which adamw hides."""
    master_weights: bool = True
    """true: with 16-bit precision, the optimizer updates float32 copies of the parameters, and gradients are
    accumulated in float32. false, with bf16: there are no such copies; gradients, and the moments of adamw, are
    bfloat16 too, and an update is rounded once, as by the fused AdamW of PyTorch on bfloat16 parameters. That takes 8
    bytes for a parameter instead of 18, and loses updates that are smaller than the rounding of a parameter."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning-rate schedule after the warm-up. wsd: warm-up, stable, decay: constant until it decays in the last steps
    (Hu et al. 2024, arXiv 2404.06395)."""
    decay_ratio: Fraction | None = None
    """With wsd: fraction of all steps, at the end, in which the learning rate decays. Default: 0.1."""
    decay_type: Literal["linear", "cosine", "sqrt"] | None = None
    """With wsd: shape of the decay. sqrt: 1 - sqrt(t), with t from 0 to 1 over the decay steps (Haegele et al. 2024,
    arXiv 2405.18392). Default: linear."""
    warmup_ratio: Fraction = 0.0
    """Length of the warm-up, in which the learning rate rises to its peak, as a fraction of all steps."""
    warmup_steps: PositiveInt | None = None
    """Length of the warm-up in steps. Set either this or warmup_ratio."""
    warmup_rounding: Literal["up", "axolotl"] = "up"
    """With warmup_ratio: number of steps of the warm-up. up: the fraction of all steps, rounded up. axolotl: rounded
    down, and 2 in place of 1, as in Axolotl."""
    warmup_from_zero: bool = False
    """true: step n of W warm-up steps has (n - 1) / W of the peak learning rate, as in transformers and PaddleNLP; the
    first step then has learning rate 0. false: n / W."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW); norms and biases are excluded."""
    adam_beta1: Decay = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Decay = 0.999
    """Decay rate of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Epsilon in the denominator of the Adam update."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global norm. null: no clipping."""
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    """Handling of a step whose loss or gradient is infinite or NaN (with fp16, at the lowest loss scale). stop: end the
    run. skip: skip the batch. roll_back: return to the last checkpoint and continue with the samples after this
    batch."""
    spike_factor: Annotated[float, Gt(1)] | None = None
    """A step is a spike if its gradient norm before clipping exceeds this factor times the median of the last 32 steps.
    null: no detection of spikes."""
    on_spike: Literal["stop", "skip", "roll_back"] = "skip"
    """Handling of a spike; the choices are those of on_nonfinite."""
    max_bad_steps: PositiveInt = 10
    """Stop the run after this many skipped or rolled-back steps without progress beyond the highest step reached."""
    expert_balance_loss: NonNegativeFloat = 0.0
    """Weight of the sequence-wise load-balancing loss of routed experts (`aux_loss_alpha`: 0.001 in DeepSeek-V2, 0.0001
    in V3). 0: no such loss."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """Update rate of the router bias of each expert for auxiliary-loss-free load balancing: after each step the bias
    moves by this much towards an even load (0.001 in DeepSeek-V3). 0: the bias is fixed."""
    mtp_loss_weight: NonNegativeFloat = 0.0
    """Weight of the multi-token prediction (MTP) loss: an additional layer predicts the token after the next one and is
    trained with the model (DeepSeek-V3, arXiv 2412.19437, section 2.2: 0.3, towards the end 0.1). 0: the MTP layer of
    the weights is not trained. For the stages pretrain, sft and lora, and models with num_nextn_predict_layers = 1."""
    eval_steps: PositiveInt | Annotated[float, Gt(0), Lt(1)] | Literal["epoch"] | None = None
    """Interval of evaluations in steps; below 1, as a fraction of all steps, rounded up as in transformers; or "epoch"
    for the end of each epoch; the last step is always evaluated. Default: the last step only."""
    early_stopping: EarlyStoppingSection = dataclasses.field(default_factory=EarlyStoppingSection)
    loss_watchdog: LossWatchdogSection = dataclasses.field(default_factory=LossWatchdogSection)
    log_steps: PositiveInt = 1
    """Interval in steps at which metrics are printed and recorded."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s in the precision of the run, by which metrics have `mfu`, the model FLOPs
    utilization. Default: that of the device's data sheet, for devices that llmsuite knows by name, in bf16 and fp16;
    for others there is no `mfu`."""
    profile: ProfileSection = dataclasses.field(default_factory=ProfileSection)

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.max_steps is None) == (self.num_epochs is None):
            state = "both are given"
            if self.max_steps is None:
                state = "neither is given"
            yield "max_steps", f"give max_steps or num_epochs, exactly one; {state}"
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            yield "warmup_steps", "and warmup_ratio are both given; remove one of them"
        if self.lr_schedule == "wsd" and self.warmup_ratio + (self.decay_ratio or 0.0) > 1:
            yield "decay_ratio", "and warmup_ratio together are above 1; lower one of them"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.optimizer == "sgd":
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
                yield key, f"is not used by the optimizer sgd; set it to its default {defaults[key]}, or choose adamw"
        if self.lr_schedule == "constant":
            yield "min_lr_ratio", "has no effect with lr_schedule constant; remove it or choose linear, cosine or wsd"
        if self.lr_schedule != "wsd":
            for key in ("decay_ratio", "decay_type"):
                yield key, f"has no effect with lr_schedule {self.lr_schedule}; remove it or choose wsd"
        if self.warmup_steps is None and self.warmup_ratio == 0:
            yield "warmup_from_zero", "has no effect without a warm-up; set warmup_steps or warmup_ratio, or remove it"
        if self.warmup_ratio == 0:
            yield "warmup_rounding", "has no effect without warmup_ratio; set that too, or remove it"
        if self.spike_factor is None:
            yield "on_spike", "has no effect while spike_factor is null; set that too, or remove it"
        if self.on_nonfinite == "stop" and (self.spike_factor is None or self.on_spike == "stop"):
            yield "max_bad_steps", "has no effect while a bad step stops the run; set on_nonfinite too, or remove it"

    @property
    def may_roll_back(self) -> bool:
        """True where a bad step may roll the run back to a checkpoint."""
        return self.on_nonfinite == "roll_back" or (self.spike_factor is not None and self.on_spike == "roll_back")


@dataclasses.dataclass(kw_only=True)
class QatSection(Section):
    """Quantisation-aware training (Jacob et al. 2018, arXiv 1712.05877): linear layers compute with weights, and
    optionally activations, rounded to int8."""

    weight_bits: Literal[8] | None = None
    """8: round weights to int8, with one scale per output channel. null: no quantisation-aware training."""
    activation_bits: Literal[8] | None = None
    """8: also round the inputs of these layers, with one scale per layer: a moving average of their absolute maximum.
    null: inputs are not rounded."""
    moving_rate: Decay = 0.9
    """Decay rate of that moving average, per step."""
    target_modules: list[str] | None = None
    """Layers to quantise: patterns as in lora.target_modules. Default: every matrix of attention and MLP, except the
    routed experts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target_modules == []:
            yield "target_modules", "is empty, so nothing would be quantised; name modules, or remove it"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.weight_bits is None:
            for key in keys_except(self, "weight_bits"):
                yield key, "has no effect while weight_bits is null; set that to 8, or remove it"
        elif self.activation_bits is None:
            yield "moving_rate", "has no effect while activation_bits is null; set that to 8, or remove it"


@dataclasses.dataclass(kw_only=True)
class CheckpointSection(Section):
    """Checkpoints: when to save them and which to keep. The last step is always saved, and so is the current step when
    a file `save-now` appears in output_dir. A file `stop-now` stops the run after the current step, with a
    checkpoint."""

    save_steps: PositiveInt | Literal["epoch"] | None = None
    """Interval of checkpoints in steps, or "epoch" for the end of each epoch."""
    keep_last: Annotated[int, Ge(2)] = 2
    """Number of newest checkpoints to keep; at least 2, because a crash may interrupt the newest one."""
    async_save: bool = True
    """Write checkpoints in the background from a copy in host memory, while training continues. If the copy does not
    fit into memory, training waits for the write."""
    best_metric: str | None = None
    """Evaluation metric that selects the best checkpoint, such as "eval/loss". The best checkpoint is kept in addition
    to the keep_last newest."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Direction of best_metric: the lowest or the highest value is best."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.best_metric is None:
            yield "best_is", "has no effect while best_metric is null; set that too, or remove it"


@dataclasses.dataclass(kw_only=True)
class LaunchSection(Section):
    """Machines and devices of a run, and recovery from their loss."""

    num_devices: PositiveInt = 1
    """Number of devices per machine; on cpu, of processes."""
    devices: str | list[NonNegativeInt] | None = None
    """Indices of the devices to use on each machine, such as "4,5,6,7"; sets num_devices. Default: the first
    num_devices devices. Not for cpu."""
    nnodes: PositiveInt = 1
    """Number of machines with num_devices each. On machines that do not share output_dir, each stores its part of a
    checkpoint."""
    master: str | None = None
    """host:port of machine 0, to which the launchers of the other machines connect."""
    node_rank: NonNegativeInt | None = None
    """Rank of this machine, from 0; set it on the command line of each machine."""
    stall_seconds: PositiveFloat | None = 600.0
    """Watchdog: end the run with exit code 3, and report which ranks wait for which, if no rank makes progress for this
    many seconds (three times as many until every rank has reached its second step). null: no watchdog."""
    max_restarts: NonNegativeInt = 0
    """Maximum number of restarts of all ranks from the newest checkpoint after the loss of a rank or a machine (killed,
    crashed or hanging). No restart after a user error, Ctrl-C, or a second loss at the same step."""
    spares: NonNegativeInt = 0
    """Number of spare machines in addition to nnodes, with the highest node ranks; at a restart a spare replaces a lost
    machine."""
    min_nnodes: PositiveInt | None = None
    """Minimum number of machines: after a restart the run continues on fewer machines than nnodes, but at least this
    many, if lost machines do not come back and no spare is left. null: never on fewer than nnodes."""
    rejoin_seconds: PositiveFloat = 60.0
    """With min_nnodes: seconds to wait for a lost machine before continuing on fewer."""
    log_dir: str | None = None
    """Directory for the output of each rank, `workerlog.N`, in runs of several ranks. Default: `logs` in output_dir."""

    @property
    def device_numbers(self) -> list[int] | None:
        """The parsed key `devices`. Raises ValueError if it is not a list of device indices."""
        return device_numbers(self.devices)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.master is not None and not re.fullmatch(r"[^:\s]+:[0-9]{1,5}", self.master):
            yield "master", f"is {self.master!r}; it has to be host:port"
        elif self.master is not None and not 0 < int(self.master.rpartition(":")[2]) < 65536:
            yield "master", f"is {self.master!r}; a port is 1 to 65535"
        most = self.nnodes + self.spares
        if self.node_rank is not None and self.node_rank >= most:
            spares = ""
            if self.spares:
                spares = f" and {self.spares} spares"
            yield "node_rank", f"is {self.node_rank}; with nnodes {self.nnodes}{spares} it is at most {most - 1}"
        if self.spares and self.nnodes == 1:
            yield (
                "spares",
                "a spare can replace any machine but the first; set nnodes to at least 2, or this to 0",
            )
        elif self.spares and not self.max_restarts:
            yield "spares", "a spare replaces a machine at a restart; set max_restarts, or this to 0"
        if self.min_nnodes is not None and self.min_nnodes > self.nnodes:
            yield "min_nnodes", f"is {self.min_nnodes}, more than nnodes, which is {self.nnodes}"
        elif self.min_nnodes is not None and not self.max_restarts:
            yield "min_nnodes", "the number of machines changes only at a restart; set max_restarts, or this to null"
        try:
            numbers = self.device_numbers
        except ValueError:
            yield "devices", f"is {self.devices!r}; it has to be distinct device numbers, such as 4,5,6,7"
            return
        if numbers is not None and len(numbers) != self.num_devices:
            message = f"names {len(numbers)} devices, but num_devices is {self.num_devices}; remove num_devices"
            yield "devices", message

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.min_nnodes is None:
            yield "rejoin_seconds", "has no effect while min_nnodes is null; set that too, or remove it"


def device_numbers(devices: Any) -> list[int] | None:
    """Return the device indices in a text such as "4,5,6,7" or in a list; None for None.

    Raises:
        ValueError: something is not an index, an index repeats, or there is none.
    """
    if devices is None:
        return None
    numbers = [int(part) for part in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not numbers or len(set(numbers)) < len(numbers) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(devices)
    return numbers


class RlSections:
    """Sections of some stages: the class of a recipe of such a stage has a field of that name. They are not fields
    here, so that they follow the keys of all recipes."""

    rollout: Section | None = None
    """A `RolloutSection`, see `rollout_of`."""
    reward: Section | None = None
    """A `RewardSection`, see `reward_of`."""
    environment: Section | None = None
    """An `EnvironmentSection`, see `environment_of`."""


@dataclasses.dataclass(kw_only=True)
class Recipe(RlSections, Section):
    """A complete run as data."""

    stage: str
    """Name of a registered stage; `llmsuite list stages` shows them."""
    source: str | None = None
    """Source of the numbers in this recipe, in one line; `llmsuite list recipes` shows it."""
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
    """Names of registered loggers that receive the metrics in addition to metrics.jsonl."""
    seed: NonNegativeInt = 42
    """Random seed of the initial parameters and of the data order."""
    output_dir: str
    """Directory for everything that the run writes."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for key, path in (("output_dir", self.output_dir), ("launch.log_dir", self.launch.log_dir or ".")):
            if not path or "\0" in path:
                yield key, f"is {path!r}; it has to be the path of a directory"
            elif len(os.fsencode(path)) > 1000 or any(len(os.fsencode(part)) > 200 for part in path.split("/")):
                yield key, "is too long for the files below it: at most 1,000 bytes, and 200 between two slashes"

    @property
    def freezes_model(self) -> bool:
        """True where adapters, interventions or a prefix are trained and the model is frozen."""
        return freezes_model(self.lora, self.reft, self.prefix)


def rollout_of(recipe: Recipe) -> RolloutSection | None:
    """Return section `rollout`; None for a stage without rollouts, or with another section of that name."""
    if isinstance(recipe.rollout, RolloutSection):
        return recipe.rollout
    return None


def reward_of(recipe: Recipe) -> RewardSection | None:
    """Return section `reward`; None for a stage without rewards, or with another section of that name."""
    if isinstance(recipe.reward, RewardSection):
        return recipe.reward
    return None


def environment_of(recipe: Recipe) -> EnvironmentSection | None:
    """Return section `environment`; None for a stage without it, or with another section of that name."""
    if isinstance(recipe.environment, EnvironmentSection):
        return recipe.environment
    return None


def freezes_model(lora: LoraSection, reft: ReftSection, prefix: PrefixSection) -> bool:
    """Return True where adapters, interventions or a prefix are trained and the model is frozen."""
    return any(size is not None for size in [lora.rank, reft.rank, prefix.tokens])
