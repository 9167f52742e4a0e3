"""The command `llmsuite recipe new`: creates a recipe from a few questions, which are also options."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.base.hub.fetch import fetch
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import cached
from llmsuite.base.hub.names import hub_name
from llmsuite.base.locks import scratch_directory
from llmsuite.base.memory import available_memory_bytes
from llmsuite.base.redaction import Url
from llmsuite.base.resources import find
from llmsuite.base.safe_files import exists, is_file
from llmsuite.base.suggestions import final_suggestion
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.columns import columns_of
from llmsuite.contract.specs import ModelFamily, StageSpec
from llmsuite.data.read import data_files
from llmsuite.data.remote import is_remote
from llmsuite.data.suggest import FIELD_MEANINGS
from llmsuite.devices.vendors import VENDORS
from llmsuite.recipe.new import METHODS, Choice, Method, RowLengths, fit_to_rows, new_recipe, stage_recipe
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.shape import local_weights, missing_model
from llmsuite.recipe.write import output_recipe, write_recipe
from llmsuite.stages.first_rows import check_rows, unread_columns

_FITTED = ("conversation", "preference")
"""Kinds of rows that the numbers of a recipe are fitted to."""
_MAX_COUNTED = 50_000_000
"""Bytes of data whose rows are counted; it takes about half a minute."""
_DEVICES = {"gpu": "nvidia[0-9]*", "xpu": "xpu[0-9]*"}
"""Patterns of the files in /dev of each kind of device, one file per device."""


def create_recipe(args: Any, registry: Registry) -> int:
    """Ask for options that are not given, write or print the recipe, and print the next command."""
    if args.leave_out is not None:
        raise UserError("--leave_out: belongs to `llmsuite recipe from-paddlenlp` and the like")
    if args.file is not None:
        raise UserError(f"recipe new: takes no file; to write to {args.file} add -o {args.file}")
    choice = _choice(args, registry)
    stage = registry.stages[choice.stage]
    recipe = new_recipe(choice, _num_parameters(choice, registry), "adapters_only" in stage.capabilities)
    if choice.data is not None and _is_interactive():
        _ask_columns(recipe, registry)
    stream = sys.stderr if args.output is None and not _is_interactive() else sys.stdout
    problems = _problems(recipe, registry)
    if not problems and choice.data is not None:
        try:
            lines = _fit_to_data(recipe, registry)
        except UserError as error:  # such as weights without a tokenizer
            lines = [f"data: not counted, so the numbers are those of the stage's recipe: {error}"]
        for line in lines:
            print(line, file=stream)
        problems = _problems(recipe, registry)
    output = args.output
    if output is None and _is_interactive():
        output = _ask_file(f"{choice.name}.json")
    output_recipe(recipe, output)
    for problem in problems:
        print(f"to do: {problem}", file=stream)
    if output is not None:
        name = shlex.quote(output)
        print(f"next: llmsuite run {name} --smoke  # a test with a tiny model and a few rows, on the cpu")
        print(f"then: llmsuite run {name}")
    return 0


def _choice(args: Any, registry: Registry) -> Choice:
    """The choices from the options, and from the answers to questions about those not given."""
    stages = {name: spec.help for name, spec in registry.stages.items() if spec.trains}
    stage = _choose("stage", args.stage, stages, "sft")
    weights = args.weights
    if weights is None and args.preset is None and _is_interactive():
        weights = _ask_weights(stage)
    family = None
    config = None
    if weights is not None and args.family is None and args.preset is None:
        family, config = _model_at(weights, registry)
    preset = None
    if family is None:
        family = registry.models[_choose("family", args.family, dict.fromkeys(registry.models, ""), "llama")]
        preset = _choose("preset", args.preset, dict.fromkeys(family.presets, ""))
    data = args.data
    eval_data = args.eval_data
    if data is None and eval_data is not None:
        raise UserError("--eval_data: needs --data; without it recipes have rows that come with llmsuite")
    if data is None and _is_interactive():
        data, eval_data = _ask_data(stage_recipe(stage, family.name)["data"]["train"])
    method = _method(args.method, stage, registry)
    found = _devices(registry)
    known = [*registry.devices, *(vendor.name for vendor in VENDORS if vendor.name not in registry.devices)]
    if args.device == "here":
        device, default_count = found
        num_devices = args.num_devices or default_count
    else:
        device = _choose("device", args.device, dict.fromkeys(known, ""), found[0] if _is_interactive() else "gpu")
        default_count = found[1] if device == found[0] else 1
        num_devices = args.num_devices or _ask_number("num_devices, of all machines", default_count)
    if method != "full" and stage == "sft":
        stage = "lora"
    return Choice(stage, family, preset, num_devices, device, weights, method, data, eval_data, config)


def _method(given: str | None, stage: str, registry: Registry) -> Method:
    """The training method (all parameters or adapters), among those that the stage supports."""
    spec = registry.stages[stage]
    known = dict(METHODS)
    if "adapters_only" in spec.capabilities:
        del known["full"]
    if isinstance(spec, StageSpec) and spec.profile(spec.config_cls()).updates:
        # rollouts need matrices that are not quantised
        del known["qlora"]
    if given is None and (stage == "pretrain" or not _is_interactive()):
        given = next(iter(known))
    chosen = _choose("method", given, known, next(iter(known)))
    return cast(Method, chosen)


def _model_at(weights: str, registry: Registry) -> tuple[ModelFamily | None, Any]:
    """The family and shape of weights on this machine or on a hub, whose config is fetched; None and None where no hub
    can be reached. Raises UserError for a directory that is no model or does not exist."""
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.checkpoint.model_dir import read_config

    name = hub_name(weights)
    if name is None:
        place = local_weights(weights)
        if find_adapter(place) is not None:
            raise UserError(f"--weights: {missing_model(place)}")
        if not is_file(place / "config.json"):
            later = ""
            if not exists(place):
                later = "; if it will exist later, give its shape with --family and --preset"
            raise UserError(f"--weights: {missing_model(place, '')}{later}")
    else:
        try:
            found = cached(name, Want.CONFIG) or fetch(name, Want.CONFIG, lambda text: print(text, file=sys.stderr))
        except UserError as error:
            print(f"{error}; so its family and shape are unknown", file=sys.stderr)
            return None, None
        place = found.directory
    if is_file(place / "config.json"):
        return read_config(place, registry.models)
    return None, None


def _num_parameters(choice: Choice, registry: Registry) -> int:
    from llmsuite.devices.start import start_paddle

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the shapes of the parameters
    from llmsuite.inference.load import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(choice.family, choice.config).values())


def _problems(recipe: Mapping[str, Any], registry: Registry) -> list[str]:
    """Problems to solve before the recipe can be run here."""
    problems: list[Problem] = []
    try:
        with _planned(recipe, registry) as plan:
            for check in (
                plan.check_files,
                lambda: check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry),
            ):
                try:
                    check()
                except RecipeError as error:
                    problems += error.problems
    except RecipeError as error:
        problems = error.problems
    return list(dict.fromkeys(f"{problem.key}: {problem.message}" for problem in problems))


def _fit_to_data(recipe: dict[str, Any], registry: Registry) -> list[str]:
    """Set the numbers of a recipe without problems that depend on its rows, where these are conversations or pairs on
    this machine. Paddle has started.

    Returns:
        Lines that describe the rows, and the run.
    """
    from llmsuite.engine.cadence import total_steps
    from llmsuite.planning.estimate import estimate
    from llmsuite.stages.explain import open_stage
    from llmsuite.stages.stats import file_stats

    with _planned(recipe, registry) as plan:
        path = plan.data.train_path
        spec = registry.stages[recipe["stage"]]
        is_read = isinstance(spec, StageSpec) and spec.row_kind in _FITTED
        if not is_read or isinstance(path, Url) or is_remote(recipe["data"]["train"]):
            return []
        size = sum(file.stat().st_size for file in data_files(path))
        if size > _MAX_COUNTED:
            return [
                f"data: {size / 1e6:,.0f} MB are not counted here; `llmsuite data stats` does, then set the numbers"
            ]
        stage = open_stage(plan.model, plan.data, plan.parallel, plan.train, registry)
        stats = file_stats(stage, path)
    assert stats.counts is not None  # as it has rows
    lines = [f"data: {stats.counts.total:,} rows, {stats.counts.total - stats.counts.lost:,} used"]
    lines += [f"data: dropped: {reason}" for reason in stats.counts.reasons()]
    if not stats.num_samples:
        return lines
    sequences = round(len(stats.lengths) / stats.num_samples)
    fit_to_rows(recipe, RowLengths(stats.num_samples, int(stats.lengths.max()), max(1, sequences)))
    train = recipe["train"]
    lines[0] += (
        f", of {stats.lengths.min():,} to {stats.lengths.max():,} tokens; "
        f"{stats.num_supervised:,} of {stats.num_tokens:,} tokens are supervised"
    )
    steps = total_steps(None, train["num_epochs"], stats.num_samples, train["global_batch_size"])
    epochs = "1 epoch is" if train["num_epochs"] == 1 else f"{train['num_epochs']} epochs are"
    lines.append(f"run: {epochs} {steps:,} steps of {train['global_batch_size']} rows")
    with _planned(recipe, registry) as plan:
        peak = estimate(plan.model, plan.data, plan.parallel, plan.train).peak
        lines.append(_memory(peak, plan.parallel.degrees.num_ranks, recipe["device"] == "cpu"))
    return lines


def _memory(peak: float, num_ranks: int, is_here: bool) -> str:
    """A line with the memory of a run.

    Args:
        peak: bytes on each device.
        num_ranks: devices of the run.
        is_here: True where this machine runs all of them in its own memory.
    """
    from llmsuite.planning.report import size

    line = f"memory: {size(peak)} for each device by the estimate of `llmsuite plan`"
    available = available_memory_bytes()
    if not is_here or available is None or peak * num_ranks <= available:
        return line
    return (
        f"{line}; that is more than the {size(available)} that are free here: take a smaller model, or --method qlora"
    )


@contextlib.contextmanager
def _planned(recipe: Mapping[str, Any], registry: Registry) -> Iterator[RunPlan]:
    """The plan of a recipe that is not written yet, from a temporary file."""
    with scratch_directory() as directory:
        path = directory / "recipe.json"
        write_recipe(recipe, path)
        yield plan_run(path, [], registry)


def _devices(registry: Registry) -> tuple[str, int]:
    """The kind and the number of devices of this machine."""
    for name, pattern in _DEVICES.items():
        count = len(list(Path("/dev").glob(pattern)))
        if count and name in registry.devices:
            return name, count
    return "cpu", 1


# questions


def _ask_columns(recipe: dict[str, Any], registry: Registry) -> None:
    """Ask for the column of each field, where the columns of the data fit no format, and set them in the recipe."""
    try:
        with _planned(recipe, registry) as plan:
            found = unread_columns(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry)
    except UserError:  # reported later as a problem: the recipe is written anyway
        return
    if found is None:
        return
    print(f"  the columns of {recipe['data']['train']} are {', '.join(map(repr, found.of_file))}")
    columns: dict[str, str] = {}
    for field, default in found.fields.items():
        column = _column(field, found.of_file, default)
        if not column:
            return
        columns[field] = column
    if recipe["stage"] == "pretrain":
        recipe.setdefault("pretrain", {})["key"] = next(iter(columns.values()))
    else:
        recipe["data"]["columns"] = columns


def _column(field: str, known: Sequence[str], default: str) -> str:
    """The column of a field, or a template with columns in braces; "" for an empty answer."""
    left_out = "" if default else "; empty to decide later"
    while True:
        answer = _ask(f"column of {field} ({FIELD_MEANINGS.get(field, 'for rewards')}{left_out})", default)
        if not answer:
            return ""
        try:
            names = columns_of(answer)
        except ValueError as error:
            print(f"{answer!r} {error}")
            continue
        if answer in known or all(name in known for name in names):
            return answer
        print(f"{answer!r} is no column; there are {', '.join(map(repr, known))}")


def _is_interactive() -> bool:
    """True where the input is a terminal, so that questions can be answered."""
    return sys.stdin.isatty()


def _ask(question: str, default: str = "") -> str:
    """The answer to a question; the default for an empty one. Raises UserError at the end of the input."""
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except EOFError:
        raise UserError("recipe new: no answer; nothing is written") from None
    return answer or default


def _choose(what: str, given: str | None, known: Mapping[str, str], default: str = "") -> str:
    """The given choice, else the answer to a question.

    Args:
        what: the name of the option.
        given: its value, if there is one.
        known: the choices, each with a description.
        default: of the question; and without a terminal, of `device`.
    """
    names = ", ".join(known)
    if given is None and what == "device" and not _is_interactive():
        given = default
    if given is None and any(known.values()) and _is_interactive():
        width = max(map(len, known))
        print("".join(f"  {name:{width}}  {text}\n" for name, text in known.items()), end="")
    while given is None:
        if not _is_interactive():
            raise UserError(f"--{what}: is required without a terminal for questions; choose one of {names}")
        answer = _ask(what if any(known.values()) else f"{what} ({names})", default)
        given = answer if answer in known else None
    if given not in known:
        raise UserError(f"--{what} {given}: is none of {names}{final_suggestion(given, known, quotes=False)}")
    return given


def _ask_number(what: str, default: int) -> int:
    answer = ""
    while not (answer.isascii() and answer.isdigit() and int(answer) > 0):
        if not _is_interactive():
            raise UserError(
                f"--{what.partition(',')[0]}: is required without a terminal for questions; give a number such as 8"
            )
        answer = _ask(what, str(default))
    return int(answer)


def _ask_weights(stage: str) -> str | None:
    """The path or name of the weights; None for a shape by its name."""
    without = "to choose a shape by its name first"
    if stage == "pretrain":
        without = "to train from scratch"
    while True:
        answer = _ask(f"weights (a directory, a run, or a name such as hf:ORG/NAME; empty {without})")
        if not answer:
            return None
        if _is_valid(
            lambda given: hub_name(given) is not None or is_file(local_weights(given) / "config.json"), answer
        ):
            return answer
        print(f"{missing_model(Path(answer), '')} (working directory: {Path.cwd()})")


def _ask_data(embedded: str) -> tuple[str | None, str | None]:
    """The data to train and to evaluate on; None and None for the rows that come with llmsuite."""
    print(f"  {embedded} has a few rows for a first try")
    data = _ask_data_path("data (a file such as rows.jsonl, or a name such as hf:ORG/NAME)", embedded)
    if data in (None, embedded):
        return None, None
    return (data, _ask_data_path("eval_data (empty for none)"))


def _ask_data_path(question: str, default: str = "") -> str | None:
    while True:
        answer = _ask(question, default)
        if not answer:
            return None
        if _is_valid(lambda given: is_remote(given) or exists(find(given)) or exists(find(f"{given}.idx")), answer):
            return answer
        print(f"{answer} does not exist (working directory: {Path.cwd()})")


def _is_valid(check: Callable[[str], bool], answer: str) -> bool:
    """The result of a check of an answer; False for a malformed name, whose error is printed."""
    try:
        return check(answer)
    except UserError as error:
        print(error)
        return False


def _ask_file(default: str) -> str:
    while True:
        answer = _ask("file to write", default)
        if not exists(Path(answer)):
            return answer
        print(f"{answer} exists")
