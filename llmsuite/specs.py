"""Specs that plugins register, one dataclass for each seam of the suite. The hooks are in `plugins/hookspecs.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from llmsuite.devices.base import DeviceBackend
from llmsuite.models.anatomy import Anatomy
from llmsuite.models.head import NO_KEYS
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.schema.section import Section

T = TypeVar("T")

API_VERSION = 1
"""Major version of this contract. A spec with a greater `api` is refused with a plain message."""

PrePassKind = Literal["batch", "model", "adapters_off", "reference"]
"""What a pre-pass gets: the batch, or the model too: as it is, without its adapters, or with those of the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrePass:
    """A pass over a global batch before the model is trained on it, without gradients."""

    kind: PrePassKind
    sums: tuple[str, ...] = ()
    """Names of the sums that `Stage.prepass` returns for it."""
    rows: int = 1
    """Sequences that a forward pass gets, as a multiple of those in a micro-batch."""

    @property
    def with_adapters(self) -> bool:
        return self.kind != "adapters_off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticProfile:
    """A second model of the first one's family and shape, with a score head, trained beside it: `Stage.values`."""

    key: str
    """The section of the recipe that says so, such as "ppo.critic"."""
    weights: str | None = None
    """A model directory or a run that it begins with; None for the weights of the model that is trained."""
    learning_rate: float | None = None
    """None: that of the section train."""
    sums: tuple[str, ...] = ()
    """Names of the metrics in the `LossTerms.sums` of its loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Metrics and pre-passes of a stage with the settings of one recipe: the stage checks its metrics against it, the
    engine runs the pre-passes, and `llmsuite plan` counts both."""

    sums: tuple[str, ...] = ()
    """Names of the metrics in `LossTerms.sums`."""
    prepasses: tuple[PrePass, ...] = ()
    """In the order in which they run before each step; where there are rollouts, once after each."""
    updates: int = 0
    """Steps that learn from one rollout, see `Stage.roll_out`; 0 for a stage that learns from its samples as they
    are."""
    reference: str | None = None
    """A model directory or a run with the weights for pre-passes of kind "reference"; None for the initial ones."""
    completions: int | None = None
    """Completions of a prompt that are learnt from, where these are not all; as many at least are drawn."""
    entropy: bool = False
    """Whether its loss takes the entropy of tokens, `model.token_nll_and_entropy`; for `llmsuite plan`."""
    maxima: tuple[str, ...] = ()
    """Metrics of a step that are the largest number of all ranks, see `Stage.maxima`."""
    critic: CriticProfile | None = None
    """The critic of a stage with rollouts; None without one."""

    def checked(self, sums: Mapping[str, T]) -> Mapping[str, T]:
        """The sums of a loss as they are. Raises AssertionError unless they are those of the profile."""
        assert sums.keys() == set(self.sums), f"the loss gives {sorted(sums)}, its profile lists {sorted(self.sums)}"
        return sums


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageSpec:
    """A stage: a loss on some type of rows, or other work with a model."""

    name: str
    """Value of the recipe key `stage`, and name of the stage's own section."""
    help: str
    """One line for `llmsuite list stages`."""
    config_cls: type[Section]
    """Dataclass of the stage's section of the recipe."""
    factory: Callable[[], Any]
    """Imports and returns the `Stage` subclass; called where Paddle may be imported. For a stage that does not train,
    it returns the function that each rank calls: `work(plan, registry, resume)`, which returns the exit code."""
    smoke: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Recipe keys that `--smoke` sets for this stage, such as the embedded data it trains on."""
    head: Literal["language_model", "score"] = "language_model"
    """Output of the model: logits, or one score, `model.scores`. A head that weights lack begins from the seed."""
    sections: Mapping[str, type[Section]] = dataclasses.field(default_factory=dict)
    """Further sections of its recipes by name, such as those that several stages have in common."""
    section: str = ""
    """Name of its section where that is not `name`: the section of another stage, whose keys it shares."""
    adapters: bool = False
    """Whether it is for adapters only: a recipe has to set `lora.rank`, `reft.rank` or `prefix.tokens` then."""
    quantises: bool = False
    """Whether it works with the section `qat`: its loss needs the model being trained only, in one forward pass."""
    row_kind: str = ""
    """The `row_kind` of its class: `validate` checks `data.format` by it, and messages about rows name the stage."""
    rows_per_sample: int = 1
    """Sequences that a sample has in a micro-batch, such as both answers of a pair; for `llmsuite plan`."""
    profile: Callable[[Any], StageProfile] = lambda section: StageProfile()
    """The metrics of its loss and its pre-passes, by its section: best a method of that class."""
    evaluates: Callable[[StageProfile, Any], Sequence[str]] | None = None
    """Names of a recipe's metrics of evaluations, without "eval/"; "NAME*" for all that begin so. None: any name."""
    predicts_further: bool = False
    """Whether its loss has the term of `train.mtp_loss_weight`, by `mtp_hidden_states`, and the metric `mtp_loss`."""
    tells_prompts: bool = False
    """Whether its batches have "prompt_lengths" where the recipe sets `reft.rank`; see `language_model.collate`."""
    takes_prefix: bool = False
    """Whether it works with prefix tuning (the section `prefix`): its loss needs the model being trained only."""
    compares_answers: bool = False
    """Whether it has `Stage.questions`, which `generation.max_new_tokens` needs."""
    fills_rows: bool = False
    """Whether all its rows have `data.max_length` tokens, so that whole-step programs have one length."""
    packs: bool | None = None
    """False if it never reads `data.packing`, which is refused then."""
    takes_all: bool = False
    """Whether logits are computed at all positions, not at selected ones; decides how the head's gradient travels."""
    draws_ahead: bool = False
    """Whether it has `Stage.begin_rollout`, for `rollout.max_staleness`."""
    in_programs: bool = False
    """Whether it has `Stage.program_inputs` and `Stage.program_loss`, which `engine.program: step` needs."""
    trains: bool = True
    """False for a stage that answers prompts or the like: recipes have `data.prompts`, no training, and tp only."""
    result: str = ""
    """The file in `output_dir` that a stage without training writes."""
    api: int = API_VERSION

    @property
    def section_name(self) -> str:
        return self.section or self.name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """A family of models that share code, such as Llama."""

    name: str
    """Value of the recipe key `model.family`."""
    help: str
    config_cls: Any
    """Frozen dataclass of the shape; every field has a docstring. It has `from_hf(dict)` and `to_hf() -> dict`
    for config.json, and `problems()` for rules between its fields. A field `head` is no key of recipes but
    what `StageSpec.head` says; without one the family has no score head (`llmsuite.models.head`). Nor is a field
    `kept`: keys of config.json that are for others."""
    presets: Mapping[str, Mapping[str, Any]]
    """Published shapes by name."""
    smoke: Mapping[str, Any]
    """The tiny shape that `--smoke` trains."""
    smoke_keeps: Sequence[str] = ()
    """Fields of the shape that decide which code runs, such as `model_type`: `--smoke` leaves them as a recipe has
    them. Of a field that is a size it keeps null only."""
    factory: Callable[[], type]
    """Imports and returns the `paddle.nn.Layer` subclass, built as `cls(config, ops)`; what the engine calls of it is
    `llmsuite.models.blocks.CausalLM`, which it best derives from."""
    names: Callable[[], Any]
    """Imports and returns the module that says what parameters are called. It has `parameter_names(config)`, ours, in
    the order the model has them; `is_linear(name)`, whether HF stores it transposed; `hf_tensors(name, config)`, where
    it lies among HF's tensors (`llmsuite.models.hf_tensors`); `from_hf(name, config)`, the full name of a tensor in
    an HF file, None to ignore it; `paddlenlp_prefix(config)`, what PaddleNLP writes for `model.`, None without such a
    layout. It may have `from_paddlenlp(name, config)`, our name of a tensor in files of PaddleNLP that have names of
    their own, None for others; and `is_carried(name, config)`: whether a tensor of an HF file, which is no parameter,
    goes along from the weights to all that is made of them; `num_nextn_predict_layers` says that there are some.
    With `gguf_architectures` also `from_gguf(name)` and `gguf_to_hf(name, value, config)`, perhaps the inverse two."""
    shard_plan: ShardPlan | None = None
    """How its parameters are cut for tensor parallelism; None for a family that cannot be; or `ANNOTATED`."""
    anatomy: Callable[[Any], Anatomy] | None = None
    """What a shape is made of, for `llmsuite plan`; without it the plan has no activations, traffic or times. The names
    then have `parameter_shapes(config)` as well: `parameter_names` with the shape of each."""
    hf_model_types: Sequence[str] = ()
    """Values of `model_type` in config.json that this family reads."""
    gguf_architectures: Sequence[str] = ()
    """Values of `general.architecture` in a GGUF file that this family reads."""
    api: int = API_VERSION

    def config_keys(self) -> Any:
        """A TypedDict with the fields of the shape, all optional: the type of `model.config`."""
        import typing

        from typing_extensions import TypedDict

        from llmsuite.schema.keys import field_docs

        hints = typing.get_type_hints(self.config_cls, include_extras=True)
        fields = {f.name: hints[f.name] for f in dataclasses.fields(self.config_cls) if f.name not in NO_KEYS}
        make_typed_dict: Any = TypedDict  # a type checker knows it with literal fields only
        keys = make_typed_dict("ModelConfig", fields, total=False)
        keys.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
        keys.docs = field_docs(self.config_cls)
        return keys


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSpec:
    """A kind of device."""

    name: str
    """Value of the recipe key `device`."""
    help: str
    factory: Callable[[], DeviceBackend]
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DataFormat:
    """A shape of rows in a data file."""

    name: str
    """Value of the recipe key `data.format`."""
    help: str
    kind: str
    """What `convert` gives: "conversation", "preference", "unpaired", "prompt" or what else a plugin's stage reads."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Whether a row looks like this format; used for `data.format: auto`."""
    convert: Callable[[Mapping[str, Any]], Any]
    """Converts a row to the type of `kind`. Raises ValueError with the key that is wrong."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exporter:
    """A layout in which a model directory can be written, for `llmsuite import --layout`."""

    name: str
    help: str
    write: Callable[[Any, Path], None]
    """Writes a `llmsuite.checkpoint.model_dir.ModelDirectory` into an empty directory; the caller commits it."""
    api: int = API_VERSION


class Logger(Protocol):
    """Receives the metrics of a run, on rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record of `metrics.jsonl`."""

    def close(self) -> None:
        """The run has ended, well or not."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoggerSpec:
    """A sink for metrics, chosen by the recipe key `loggers`."""

    name: str
    help: str
    factory: Callable[[Path], Logger]
    """Called with the run's directory. Raises UserError when a package it needs is missing."""
    api: int = API_VERSION


Score = Callable[[Sequence[Any]], Sequence[float | Mapping[str, float] | Exception | None]]
"""Completions (`llmsuite.rl.completion.Completion`) to their rewards; None, NaN or beyond float32 is none at all. A
mapping has the reward as "score" and the numbers of `RewardSpec.parts`. An exception says why a reward is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RewardSpec:
    """A reward of completions, for the stages of online RL."""

    name: str
    """A key of the recipe's `reward.functions`; its metric is `rewards/NAME`."""
    help: str
    factory: Callable[..., Score]
    """Gets the section of `config_cls`, None without one, and returns the function that scores. It is called in the
    process that scores, so it is a function of a module, which that process imports. Raises UserError when a package
    it needs is missing."""
    config_cls: type[Section] | None = None
    """Dataclass of its own keys, `reward.NAME` in a recipe. Every key has a default."""
    level: Literal["completion", "group"] = "completion"
    """What a call scores: one completion, or all completions of a prompt, to compare them."""
    parts: tuple[str, ...] = ()
    """Names of further numbers that it gives beside the reward, in mappings; the metric of each is
    `rewards/NAME/PART`."""
    runs: Literal["pool", "main"] = "pool"
    """pool: in processes without Paddle, with a time limit. main: in the process that trains, all completions of the
    rank in one call and without a time limit."""
    needs_services: bool = False
    """Whether the factory gets `llmsuite.rl.reward_services.RewardServices` too; with `runs` "main" only."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model has written in one turn."""

    text: str
    """Without its stop token."""
    ids: Sequence[int]
    """The tokens drawn, with the stop token that ended them."""
    finish_reason: Literal["stop", "length"]
    """length: it is truncated, by environment.max_turn_length, or because the episode has no more room and ends here
    whatever the environment says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment says to a turn of the model."""

    messages: Sequence[Mapping[str, str]] = ()
    """Turns that the model is shown next, each with "role" (user, tool or system) and "content"; at least one unless
    the episode is done."""
    done: bool = False
    """Whether the episode ends here; the messages are not shown then."""
    reward: float | Mapping[str, float] | None = 0.0
    """What this turn earns: those of an episode are added up, and the reward `environment` is their sum. A mapping has
    it as "score", beside numbers of `EnvironmentSpec.parts`. None, NaN or beyond float32: the episode has no reward."""


class Environment(Protocol):
    """One episode. It is pickled between its turns, which any process may answer: what it knows is in its attributes.
    If it has an attribute `tools` once it has begun, functions as OpenAI describes them, chat templates get these."""

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """The prompt, as messages with "role" and "content". All completions of a prompt go on from this one state.

        Args:
            row: the columns of the row, and "messages": its prompt.
            seed: of whatever is random in the episode: a function of the recipe's seed, the step and the prompt.
        """

    def step(self, turn: Turn) -> Reply:
        """The answer to what the model has written."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentSpec:
    """An environment: what answers the model between the turns of an episode."""

    name: str
    """Value of the recipe key `environment.name`."""
    help: str
    factory: Callable[[Any], Environment]
    """Gets the section of `config_cls`, None without one, and returns a new environment for each episode. It is called
    in processes without Paddle, so it is a function of a module, or a class. Raises UserError when a package it needs
    is missing."""
    config_cls: type[Section] | None = None
    """Dataclass of its own keys, `environment.NAME` in a recipe. Every key has a default."""
    parts: tuple[str, ...] = ()
    """Names of further numbers that it gives beside its reward, in mappings; the metric of each, added up over the
    turns, is `rewards/environment/PART`."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutEngineSpec:
    """What draws the completions of online RL: a model beside the one that is trained, or a server."""

    name: str
    """Value of the recipe key `rollout.engine`."""
    help: str
    factory: Callable[[Any], Any]
    """Gets a `llmsuite.rl.engine.EngineContext`, and returns a `llmsuite.rl.engine.Engine`; called in the processes
    that train; maybe one that is `Releasing` too. Raises UserError when it cannot work."""
    config_cls: type[Section] | None = None
    """Dataclass of its own keys, `rollout.NAME` in a recipe. Every key has a default."""
    remote: bool = False
    """Whether completions are drawn elsewhere. Then the first rank alone makes requests, no rank has memory for a model
    that generates, and completions may be drawn while the model is trained (`rollout.max_staleness`)."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """A subcommand of `llmsuite`."""

    name: str
    help: str
    add_arguments: Callable[[Any], None]
    """Adds arguments to a jsonargparse `ArgumentParser`."""
    run: Callable[[Any, Any], int]
    """Gets the parsed namespace and the `llmsuite.plugins.manager.Registry`, returns the exit code: 0 done, 2 the input
    is wrong, 1 other."""
    takes_overrides: bool = False
    """Whether `--section.key=value` words are collected for it, as the attribute `overrides` of the namespace."""
    api: int = API_VERSION


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run as events see it. Read only."""

    output_dir: Path
    recipe: Mapping[str, Any]
    """The resolved recipe as plain data."""
    num_ranks: int
    total_steps: int
    mesh: str = ""
    """Its degrees, for people."""
