"""Specs that plugins register: one dataclass for each extension point. The hooks are in `contract/hookspecs.py`."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from llmsuite.contract.schema.section import Section
from llmsuite.devices.base import DeviceBackend
from llmsuite.models.head import NO_KEYS
from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.models.shard_plan import ShardPlan

T = TypeVar("T")

API_VERSION = 1
"""Version of the plugin contract. A spec with a greater `api` is rejected with an error message."""

PrePassKind = Literal["batch", "model", "adapters_off", "reference"]
"""Input of a pre-pass: "batch" only, or also the "model" (with its current weights), the model with "adapters_off", or
the model with the weights of the "reference"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrePass:
    """A forward pass without gradients over a global batch, before the training step on it."""

    kind: PrePassKind
    sums: tuple[str, ...] = ()
    """Names of the sums that `Stage.prepass` returns."""
    rows: int = 1
    """Sequences of one forward pass, as a multiple of those in a micro-batch."""

    @property
    def with_adapters(self) -> bool:
        """True unless the adapters are switched off in this pass."""
        return self.kind != "adapters_off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticProfile:
    """A critic (value model) of the same family and shape as the model, with a score head, trained along with it. Its
    loss is `CriticStage.critic_loss`."""

    key: str
    """Section of the recipe with the keys of the critic, such as "ppo.critic"."""
    weights: str | None = None
    """Model directory or run with its initial weights; None for the initial weights of the trained model."""
    learning_rate: float | None = None
    """Peak learning rate; None for that of section `train`."""
    sums: tuple[str, ...] = ()
    """Names of the metrics in `LossTerms.sums` of its loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherProfile:
    """A frozen second model of any family and size with the vocabulary of the model. The loss compares with its
    distributions, by `model.token_divergence`; `StageContext.teacher` loads it. It is split over tensor parallel ranks
    like the model, and is complete on each data rank."""

    key: str
    """Key of the recipe with its weights, such as "gkd.teacher". KEY_preset, KEY_config and KEY_precision are the keys
    of the other fields."""
    weights: str | None = None
    """Model directory, run or name on a hub; None for random values."""
    preset: str | None = None
    """Published shape; not needed where config.json of the weights is on this machine."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the shape, in addition to those of the preset."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of its parameters and activations; None for that of the run."""
    has_mixture: bool = True
    """False where the divergence is the KL divergence of one model from the other, without a mixture of both."""
    with_nll: bool = False
    """True where the loss also uses the negative log-probabilities of targets
    (`model.token_divergence_and_nll`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Metrics and pre-passes of a stage for one recipe: the stage checks its metrics against it, the engine runs the
    pre-passes, and `llmsuite plan` accounts for both."""

    sums: tuple[str, ...] = ()
    """Names of the metrics in `LossTerms.sums`."""
    prepasses: tuple[PrePass, ...] = ()
    """Pre-passes in the order in which they run: before each step; in a stage with rollouts, once after each
    rollout."""
    updates: int = 0
    """Number of training steps per rollout (`RolloutStage.roll_out`); 0 for a stage without rollouts."""
    on_policy: float = 1.0
    """Share of the rollouts of a stage with rollouts. Which they are is random, by the seed; instead of the others
    the stage trains on the samples of the data as they are."""
    evaluates_rollouts: bool = True
    """False for a stage with rollouts whose evaluations compute its loss on the samples of the data."""
    reference: str | None = None
    """Model directory or run with the weights for pre-passes of kind "reference"; None for the initial weights."""
    completions: int | None = None
    """Number of completions per prompt to train on; None to train on all sampled completions. At least this many are
    sampled."""
    entropy: bool = False
    """True where the loss uses the entropy of tokens (`model.token_nll_and_entropy`); for `llmsuite plan`."""
    max_metrics: tuple[str, ...] = ()
    """Names of the metrics that are reduced by maximum over ranks (`LossTerms.maxima`)."""
    critic: CriticProfile | None = None
    """Critic of a stage with rollouts; None without one."""
    teacher: TeacherProfile | None = None
    """Teacher whose distributions the loss compares with; None without one."""
    rows_per_sample: int = 1
    """Number of sequences per sample in a micro-batch, such as 2 for preference pairs; for `llmsuite plan`."""
    evaluates: Callable[[StageProfile, Any], Sequence[str]] | None = None
    """Returns the names of the evaluation metrics for this profile and a recipe, without "eval/"; "NAME*" stands for
    all names with that prefix. None: names are not checked."""

    @property
    def has_several_losses(self) -> bool:
        """True where the loss uses two numbers of each token that both have gradients."""
        return self.entropy or (self.teacher is not None and self.teacher.with_nll)

    def checked(self, sums: Mapping[str, T]) -> Mapping[str, T]:
        """Return the sums of a loss unchanged. Raises AssertionError unless their names are those of the profile."""
        assert sums.keys() == set(self.sums), f"the loss gives {sorted(sums)}, its profile lists {sorted(self.sums)}"
        return sums


Capability = Literal[
    "adapters_only", "all_logits", "answer_ends", "async_rollout", "fixed_length", "generation", "margins", "mtp",
    "packing", "plain_text", "prefix", "prompt_lengths", "qat", "ranked", "score_head", "step_programs", "thoughts",
]  # fmt: skip
"""A property of a stage that keys of recipes, the engine or `llmsuite plan` depend on, see `CAPABILITIES`."""

CAPABILITIES: Mapping[Capability, str] = {
    "adapters_only": "trains only adapters: a recipe has to set `lora.rank`, `reft.rank` or `prefix.tokens`",
    "all_logits": "computes logits at all positions, and not only at selected ones; with sequence parallelism this "
    "decides how the gradient of the head's input is reduced",
    "answer_ends": "ends answers as the chat template does, by `data.end_of_answer`; recipes of other stages that set "
    "the key are refused",
    "async_rollout": "is an `AsyncRolloutStage`, which `rollout.max_staleness` needs: sampling overlaps with training",
    "fixed_length": "trains on sequences of exactly `data.max_length` tokens, so that compiled training steps have one "
    "shape",
    "generation": "is a `GeneratingStage`, which `generation.max_new_tokens` needs",
    "margins": "reads the column `margin` of rows of pairs (`Preference.margin`); other stages refuse it",
    "mtp": "adds the multi-token prediction term of `train.mtp_loss_weight` (`mtp_hidden_states`) to its loss, and the "
    "metric `mtp_loss`",
    "packing": "packs samples with `data.packing`; recipes of other stages that set the key are refused",
    "plain_text": "trains on rows without a chat template (`data.text_template`, and the format `text`); recipes of "
    "other stages that set the key are refused",
    "prefix": "supports prefix tuning (section `prefix`): its loss uses no other model than the trained one",
    "prompt_lengths": 'has "prompt_lengths" in its batches where the recipe sets `reft.rank`, as '
    "`language_model.collate` does",
    "qat": "supports section `qat`: its loss uses one forward pass of the trained model and no other model",
    "ranked": "makes pairs of rows with ranked answers (`Ranking`), by `data.ranked_pairs`; rows and recipes of other "
    "stages that have them are refused",
    "score_head": "uses a model with one score for each sequence (`model.scores`) in place of logits; a score head "
    "that is missing in the weights is initialised from the seed",
    "step_programs": "has `Stage.batch_layout`, and its loss uses the functions of `llmsuite.engine.batch`, which "
    "`engine.program: step` needs",
    "thoughts": "can leave thoughts out of its loss, by `data.supervise_thoughts`; recipes of other stages that set "
    "the key are refused",
}
"""Meaning of each capability: what a stage that claims it does."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunSpec:
    """A value of the recipe key `stage`: a `StageSpec`, which trains a model, or a `JobSpec`, which does not."""

    trains: ClassVar[bool]
    """True for a `StageSpec`."""

    name: str
    """Value of the recipe key `stage`, and name of its section unless `sections` has another one."""
    help: str
    """One-line description for `llmsuite list stages`."""
    config_cls: type[Section]
    """Dataclass of the section with its keys in a recipe."""
    factory: Callable[[], Any]
    """Imports and returns the subclass of `llmsuite.engine.stage.Stage`; called only where Paddle may be imported. For
    a `JobSpec`, returns the function that each rank calls, `work(plan, registry, resume) -> exit code`."""
    smoke: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Recipe keys that `--smoke` sets, such as the bundled data to use."""
    sections: Mapping[str, type[Section]] = dataclasses.field(default_factory=dict)
    """Additional sections of its recipes by name, such as sections that several stages share. A name for `config_cls`
    itself is the name of its section, by which two stages share one."""
    capabilities: Set[Capability] = frozenset()
    """Names of `CAPABILITIES`; a `JobSpec` has at most "score_head"."""
    api: int = API_VERSION

    @property
    def section_name(self) -> str:
        """Name of the recipe section of `config_cls`."""
        return next((name for name, cls in self.sections.items() if cls is self.config_cls), self.name)

    @property
    def all_sections(self) -> Mapping[str, type[Section]]:
        """Sections of its recipes by name, its own first."""
        return {self.section_name: self.config_cls, **self.sections}

    @property
    def head(self) -> Literal["language_model", "score"]:
        """Output of the model: logits, or one score per sequence."""
        if "score_head" in self.capabilities:
            return "score"
        return "language_model"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageSpec(RunSpec):
    """A stage: training with a loss on some kind of rows."""

    trains = True

    row_kind: str = ""
    """Kind of rows that the stage trains on, equal to `row_kind` of its class; `validate` checks `data.format` against
    it."""
    profile: Callable[[Any], StageProfile] = lambda section: StageProfile()
    """Returns the profile for the stage's section; usually a method of `config_cls`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JobSpec(RunSpec):
    """Work with a model that is no training, such as inference: its recipes have `data.prompts`, no `train` keys, and
    tensor parallelism only."""

    trains = False

    result: str = ""
    """Name of the file in `output_dir` that it writes."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """A model family: models that share an implementation, such as Llama."""

    name: str
    """Value of the recipe key `model.family`."""
    help: str
    config_cls: Any
    """Frozen dataclass of the model shape; every field has a docstring. It has `from_hf(dict)` and `to_hf() -> dict`
    for config.json, and `problems()`, which yields violated rules between its fields. Two fields are not recipe keys:
    `head` is set from `RunSpec.head` (a family without it has no score head, `llmsuite.models.head`), and `kept`
    holds keys of config.json that the family does not use but preserves."""
    presets: Mapping[str, Mapping[str, Any]]
    """Published shapes by name."""
    smoke: Mapping[str, Any]
    """Tiny shape that `--smoke` trains."""
    smoke_keeps: Sequence[str] = ()
    """Fields of the shape that select code paths, such as `model_type`: `--smoke` keeps their values from the recipe.
    Of a field that is a size, only null is kept."""
    factory: Callable[[], type]
    """Imports and returns the `paddle.nn.Layer` subclass, which is constructed as `cls(config, ops)`. The engine uses
    the interface of `llmsuite.models.blocks.CausalLM`; derive from that class."""
    names: Callable[[], Any]
    """Imports and returns the module with the tensor names of the family. Required functions:
    `parameter_names(config)`, the names of our parameters in the order of the model; `is_linear(name)`, True for a
    matrix that HF stores transposed; `hf_tensors(name, config)`, the HF tensors that a parameter consists of
    (`llmsuite.models.hf_tensors`); `from_hf(name, config)`, our name of an HF tensor, or None to ignore it;
    `paddlenlp_prefix(config)`, PaddleNLP's prefix for our `model.`, or None if PaddleNLP has no such layout. Optional,
    declared in `llmsuite.models.protocols`: `from_paddlenlp(name, config)`, our name of a tensor whose name in
    PaddleNLP follows no prefix rule, else None; `is_carried(name, config)`, True for an HF tensor that is not a
    parameter but is copied from the weights to everything written from them (used where `num_nextn_predict_layers` is
    set). With `gguf_architectures`: `from_gguf(name)` and `gguf_to_hf(name, value, config)`, optionally also the two
    inverse functions."""
    shard_plan: ShardPlan | None = None
    """Partition of the parameters for tensor parallelism: None for a family without it, `AUTO_PARALLEL` for an
    auto-parallel family."""
    shape_spec: Callable[[Any], ShapeSpec] | None = None
    """Returns the sizes of the layers of a shape, for `llmsuite plan`; without it the plan has no activations, traffic
    or times. `names` then also needs `parameter_shapes(config)`: `parameter_names` with the shape of each."""
    hf_model_types: Sequence[str] = ()
    """Values of `model_type` in config.json that this family reads."""
    gguf_architectures: Sequence[str] = ()
    """Values of `general.architecture` in a GGUF file that this family reads."""
    api: int = API_VERSION

    def config_keys(self) -> Any:
        """Return the type of `model.config`: a TypedDict with the fields of the shape, all optional."""
        import typing

        from typing_extensions import TypedDict

        hints = typing.get_type_hints(self.config_cls, include_extras=True)
        fields = {f.name: hints[f.name] for f in dataclasses.fields(self.config_cls) if f.name not in NO_KEYS}
        make_typed_dict: Any = TypedDict  # type checkers accept only literal fields
        keys = make_typed_dict("ModelConfig", fields, total=False)
        keys.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
        keys.documented_in = self.config_cls
        return keys


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSpec:
    """A device backend, such as cpu or gpu."""

    name: str
    """Value of the recipe key `device`."""
    help: str
    factory: Callable[[], DeviceBackend]
    """Returns the backend; called wherever a recipe is checked, so it must not import Paddle."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DataFormat:
    """A format of rows in a data file."""

    name: str
    """Value of the recipe key `data.format`."""
    help: str
    kind: str
    """Kind of rows that `convert` returns: "conversation", "preference", "unpaired", "prompt", or the `row_kind` of a
    plugin's stage."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Returns True for a row that looks like this format; used with `data.format: auto`."""
    convert: Callable[[Mapping[str, Any]], Any]
    """Converts a row to the type of `kind`. Raises ValueError that names the wrong key."""
    columns: frozenset[str] | None = None
    """Columns that `convert` reads, besides "system", "tools" and "chat_template_kwargs": a row with another one is
    refused unless `data.ignore_columns` has its name. None: any column may be read, and none is refused."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exporter:
    """A layout of model directories, for `llmsuite import --layout`."""

    name: str
    help: str
    write: Callable[[Any, Path], None]
    """Writes a `llmsuite.checkpoint.model_dir.ModelDirectory` into an empty directory, which the caller then moves into
    place atomically."""
    api: int = API_VERSION


class Logger(Protocol):
    """A sink that receives the metrics of a run on rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; called once for each record of `metrics.jsonl`."""

    def close(self) -> None:
        """Close the sink; called when the run ends, also after an error."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoggerSpec:
    """A logger, selected by the recipe key `loggers`."""

    name: str
    help: str
    factory: Callable[[Path], Logger]
    """Returns the logger for the run's output directory. Raises UserError if a package it needs is missing."""
    api: int = API_VERSION


Score = Callable[[Sequence[Any]], Sequence[float | Mapping[str, float] | Exception | None]]
"""A reward function: completions (`llmsuite.rl.completion.Completion`) -> one reward for each. None, NaN or a number
beyond float32 is a missing reward; an exception as a value is one with its reason. A mapping has the reward as "score"
and the numbers of `RewardSpec.parts`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RewardSpec:
    """A reward of completions, for online RL stages."""

    name: str
    """A key of the recipe's `reward.functions`; its metric is `rewards/NAME`."""
    help: str
    factory: Callable[..., Score]
    """Receives the section of `config_cls` (None without one) and returns the reward function. It is called in the
    reward process and has to be importable there: a function of a module. Raises UserError if a package it needs is
    missing."""
    config_cls: type[Section] | None = None
    """Dataclass of the reward's keys, `reward.NAME` in a recipe. Every key needs a default."""
    level: Literal["completion", "group"] = "completion"
    """Completions per call: one, or the group of all completions of a prompt, to compare them."""
    parts: tuple[str, ...] = ()
    """Names of additional numbers that it returns with the reward, in mappings; each is the metric
    `rewards/NAME/PART`."""
    runs: Literal["pool", "main"] = "pool"
    """pool: in worker processes without Paddle, with a time limit. main: in the training process, with all completions
    of the rank in one call and without a time limit."""
    needs_services: bool = False
    """True if the factory also receives `llmsuite.rl.reward_services.RewardServices`; only with `runs` "main"."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the model."""

    text: str
    """The text, without its stop token."""
    ids: Sequence[int]
    """The sampled token ids, including the stop token."""
    finish_reason: Literal["stop", "length"]
    """length: the turn was truncated, by environment.max_turn_length or because the episode has no room left; in the
    latter case the episode ends regardless of the reply."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of an environment to a turn of the model."""

    messages: Sequence[Mapping[str, str]] = ()
    """Next messages for the model, each with "role" (user, tool or system) and "content"; at least one unless the
    episode is done."""
    done: bool = False
    """True to end the episode; the messages are then ignored."""
    reward: float | Mapping[str, float] | None = 0.0
    """Reward of this turn; the reward `environment` of a completion is the sum over its turns. A mapping has it as
    "score", together with the numbers of `EnvironmentSpec.parts`. None, NaN or a number beyond float32: the episode has
    no reward."""


class Environment(Protocol):
    """One episode. It is pickled between turns, and each turn may run in another process: keep all state in attributes.
    One with tools is a `ToolEnvironment` after `begin`."""

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """Return the prompt as messages with "role" and "content". All completions of a prompt start from this state.

        Args:
            row: columns of the row, with its prompt as "messages".
            seed: random seed of the episode, a function of the recipe's seed, the step and the prompt.
        """

    def step(self, turn: Turn) -> Reply:
        """Return the reply to a turn of the model."""


@runtime_checkable
class ToolEnvironment(Protocol):
    """An `Environment` with tools, once it has begun."""

    tools: Sequence[Mapping[str, Any]]
    """Functions in OpenAI's format; the chat template receives them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentSpec:
    """An environment, which replies to the model between the turns of an episode."""

    name: str
    """Value of the recipe key `environment.name`."""
    help: str
    factory: Callable[[Any], Environment]
    """Receives the section of `config_cls` (None without one) and returns a new environment for each episode. It is
    called in worker processes without Paddle and has to be importable there: a function of a module, or a class. Raises
    UserError if a package it needs is missing."""
    config_cls: type[Section] | None = None
    """Dataclass of the environment's keys, `environment.NAME` in a recipe. Every key needs a default."""
    parts: tuple[str, ...] = ()
    """Names of additional numbers that it returns with its reward, in mappings; each, summed over the turns, is the
    metric `rewards/environment/PART`."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutEngineSpec:
    """A rollout engine, which samples the completions of online RL: a model in the training processes, or a server."""

    name: str
    """Value of the recipe key `rollout.engine`."""
    help: str
    factory: Callable[[Any], Any]
    """Receives a `llmsuite.rl.engine.EngineContext` and returns a `llmsuite.rl.engine.Engine`, which may also be a
    `ReleasableEngine`; called in the training processes. Raises UserError if the engine cannot work."""
    config_cls: type[Section] | None = None
    """Dataclass of the engine's keys, `rollout.NAME` in a recipe. Every key needs a default."""
    remote: bool = False
    """True where completions are sampled outside the training processes. Then only rank 0 makes requests, no rank needs
    memory for a generating model, and sampling may overlap with training (`rollout.max_staleness`)."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of the conversion of a file of another suite."""

    stage: str | None = None
    """Stage of the recipe, if the file does not determine it."""
    family: str | None = None
    """Family of the model, if its name does not determine it."""
    num_devices: int | None = None
    """Number of devices of all machines, if the file does not name it."""
    leave_out: Sequence[str] = ()
    """Arguments to ignore, although the recipe is then another job."""


@dataclasses.dataclass
class ConvertedRecipe:
    """A recipe made from a file of another suite, and the outcome of each argument."""

    recipe: dict[str, Any]
    """The recipe, as JSON data."""
    left_out: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Arguments without a counterpart: (name, value, reason and nearest key)."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Decisions that the arguments do not determine."""
    refused: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Arguments that no recipe can express and that `leave_out` names: (name, value, reason)."""
    same: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    """(name, value) of arguments that are keys with the same name and value."""
    translated: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """(name, value, key) of arguments that became another key."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SuiteSpec:
    """Another suite, whose training arguments `llmsuite recipe from-NAME FILE` turns into a recipe."""

    name: str
    """The word after `from-`, such as "trl"."""
    help: str
    convert: Callable[[Path, Any, ConversionOptions], ConvertedRecipe]
    """Converts a file, with the `llmsuite.contract.registry.Registry` of stages and families. Raises `UserError` if no
    recipe can be the same job, with all arguments for which that is so; or if stage or family are not determined."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """A subcommand of `llmsuite`."""

    name: str
    help: str
    add_arguments: Callable[[Any], None]
    """Adds arguments to a jsonargparse `ArgumentParser`."""
    run: Callable[[Any, Any], int]
    """Receives the parsed namespace and the `llmsuite.contract.registry.Registry`, and returns the exit code: 0
    success, 2 invalid input, 1 any other failure."""
    takes_overrides: bool = False
    """True to collect `--section.key=value` words as attribute `overrides` of the namespace."""
    api: int = API_VERSION

    @classmethod
    def in_module(
        cls,
        module: str,
        *,
        name: str,
        help: str,
        add_arguments: str = "add_arguments",
        run: str = "run",
        takes_overrides: bool = False,
    ) -> Command:
        """Return a command whose functions are in a module that is imported only when the command is called, so that
        other commands start without what it needs.

        Args:
            module: full name of the module.
            name: as in `Command`.
            help: as in `Command`.
            add_arguments: name of the function in the module.
            run: name of the function in the module.
            takes_overrides: as in `Command`.
        """
        return cls(
            name=name,
            help=help,
            add_arguments=lambda parser: pkgutil.resolve_name(f"{module}:{add_arguments}")(parser),
            run=lambda args, registry: pkgutil.resolve_name(f"{module}:{run}")(args, registry),
            takes_overrides=takes_overrides,
        )


@dataclasses.dataclass(frozen=True)
class RunView:
    """A read-only view of a run, for events."""

    output_dir: Path
    recipe: Mapping[str, Any]
    """The resolved recipe as plain data."""
    num_ranks: int
    total_steps: int
    mesh: str = ""
    """The degrees of the mesh as text, for display."""
