"""`llmsuite recipe new`: a recipe by a few questions, each of which has an option too."""

from __future__ import annotations

import contextlib
import difflib
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llmsuite.data.remote import is_remote
from llmsuite.data.suggest import MEANS
from llmsuite.errors import Problem, RecipeError, UserError
from llmsuite.hub.fetch import fetch
from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.new import METHODS, Choice, Method, new_recipe, stage_recipe
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.shape import local_weights, missing_model
from llmsuite.recipe.write import give_recipe, write_recipe
from llmsuite.regular import exists, is_file
from llmsuite.resources import find
from llmsuite.schema.columns import columns_of
from llmsuite.specs import ModelFamily
from llmsuite.stages.first_rows import check_rows, unread_columns

_DEVICES = {"gpu": "nvidia[0-9]*", "xpu": "xpu[0-9]*"}
"""What the driver of a device has in /dev, one for each."""


def make_new(args: Any, registry: Registry) -> int:
    """Ask for what is not given, write or print the recipe, and tell the next command."""
    if args.leave_out is not None:
        raise UserError("--leave_out: belongs to `llmsuite recipe from-paddlenlp` and its like")
    if args.file is not None:
        raise UserError(f"recipe new: takes no file; to write to {args.file} add -o {args.file}")
    choice = _choice(args, registry)
    stage = registry.stages[choice.stage]
    recipe = new_recipe(choice, _num_parameters(choice, registry), stage.adapters)
    if choice.data is not None and _asks():
        _ask_columns(recipe, registry)
    output = args.output
    if output is None and _asks():
        output = _file(f"{choice.name}.json")
    give_recipe(recipe, output)
    tell = sys.stderr if output is None else sys.stdout
    for problem in _problems(recipe, registry):
        print(f"to do: {problem}", file=tell)
    if output is not None:
        name = shlex.quote(output)
        print(f"next: llmsuite run {name} --smoke  # does it run? a tiny model and a few rows, on the cpu")
        print(f"then: llmsuite run {name}")
    return 0


def _choice(args: Any, registry: Registry) -> Choice:
    """The options, and the answers to questions about the others."""
    stages = {name: spec.help for name, spec in registry.stages.items() if spec.trains}
    stage = _chosen("stage", args.stage, stages, "sft")
    weights = args.weights
    if weights is None and args.preset is None and _asks():
        weights = _weights(stage)
    family, config = None, None
    if weights is not None and args.family is None and args.preset is None:
        family, config = _model_at(weights, registry)
    preset = None
    if family is None:
        family = registry.models[_chosen("family", args.family, dict.fromkeys(registry.models, ""), "llama")]
        preset = _chosen("preset", args.preset, dict.fromkeys(family.presets, ""))
    data, eval_data = args.data, args.eval_data
    if data is None and eval_data is not None:
        raise UserError("--eval_data: needs --data; without it recipes have rows that come with llmsuite")
    if data is None and _asks():
        data, eval_data = _data(stage_recipe(stage, family.name)["data"]["train"])
    method = _method(args.method, stage, registry)
    found = _devices(registry)
    device = _chosen("device", args.device, dict.fromkeys(registry.devices, ""), found[0] if _asks() else "gpu")
    num_devices = args.num_devices or _number("num_devices, of all machines", found[1] if device == found[0] else 1)
    if method != "full" and stage == "sft":
        stage = "lora"
    return Choice(stage, family, preset, num_devices, device, weights, method, data, eval_data, config)


def _method(given: str | None, stage: str, registry: Registry) -> Method:
    """All parameters or adapters, as far as the stage has both."""
    spec = registry.stages[stage]
    known = dict(METHODS)
    if spec.adapters:
        del known["full"]
    if "rollout" in spec.sections:  # completions are drawn from whole matrices
        del known["qlora"]
    if given is None and (stage == "pretrain" or not _asks()):
        given = next(iter(known))
    chosen = _chosen("method", given, known, next(iter(known)))
    return cast(Method, chosen)


def _model_at(weights: str, registry: Registry) -> tuple[ModelFamily | None, Any]:
    """The family and shape of weights that are on this machine or on a hub, whose config is fetched; None and None
    where no hub answers. Raises UserError for a directory that is no model, or not there."""
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.checkpoint.model_dir import read_config

    name = hub_name(weights)
    if name is None:
        place = local_weights(weights)
        if find_adapter(place) is not None:
            raise UserError(f"--weights: {missing_model(place)}")
        if not is_file(place / "config.json"):
            later = "; or, where it will be there later, say what it is with --family and --preset"
            raise UserError(f"--weights: {missing_model(place, '')}{'' if exists(place) else later}")
    else:
        try:
            found = cached(name, Want.CONFIG) or fetch(name, Want.CONFIG, lambda text: print(text, file=sys.stderr))
        except UserError as error:
            print(f"{error}; so its family and shape are not known", file=sys.stderr)
            return None, None
        place = found.directory
    return read_config(place, registry.models) if is_file(place / "config.json") else (None, None)


def _num_parameters(choice: Choice, registry: Registry) -> int:
    from llmsuite.devices.start import start_paddle

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the shapes of the parameters
    from llmsuite.inference.load import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(choice.family, choice.config).values())


def _problems(recipe: Mapping[str, Any], registry: Registry) -> list[str]:
    """What is left to do until it can be run here."""
    problems: list[Problem] = []
    try:
        with _planned(recipe, registry) as plan:
            for check in (plan.check_files, lambda: check_rows(plan, registry)):
                try:
                    check()
                except RecipeError as error:
                    problems += error.problems
    except RecipeError as error:
        problems = error.problems
    return list(dict.fromkeys(f"{problem.key}: {problem.message}" for problem in problems))


@contextlib.contextmanager
def _planned(recipe: Mapping[str, Any], registry: Registry) -> Iterator[RunPlan]:
    """The plan of a recipe that is not written yet, while its file is there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.json"
        write_recipe(recipe, path)
        yield plan_run(path, [], registry)


def _devices(registry: Registry) -> tuple[str, int]:
    """The kind of device that this machine has, and how many."""
    for name, pattern in _DEVICES.items():
        count = len(list(Path("/dev").glob(pattern)))
        if count and name in registry.devices:
            return name, count
    return "cpu", 1


# questions


def _ask_columns(recipe: dict[str, Any], registry: Registry) -> None:
    """Ask which column is what, where those of the data fit no format, and write the answers into the recipe."""
    try:
        with _planned(recipe, registry) as plan:
            found = unread_columns(plan, registry)
    except UserError:  # which is to do, as the recipe is written all the same
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
    """The column of a field, or a template with columns in braces; "" for an answer that is left out."""
    left_out = "" if default else "; empty to leave it to do"
    while True:
        answer = _ask(f"column of {field} ({MEANS.get(field, 'for rewards')}{left_out})", default)
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


def _asks() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _ask(question: str, default: str = "") -> str:
    """An answer; the default for an empty one. Raises UserError at the end of the input."""
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except EOFError:
        raise UserError("recipe new: no answer; nothing is written") from None
    return answer or default


def _chosen(what: str, given: str | None, known: Mapping[str, str], default: str = "") -> str:
    """The given choice, else the answer to a question.

    Args:
        what: the name of the option.
        given: its value, if there is one.
        known: what can be chosen, with what each is for.
        default: of the question; and without a terminal, of `device`.
    """
    names = ", ".join(known)
    if given is None and what == "device" and not _asks():
        given = default
    if given is None and any(known.values()) and _asks():
        width = max(map(len, known))
        print("".join(f"  {name:{width}}  {text}\n" for name, text in known.items()), end="")
    while given is None:
        if not _asks():
            raise UserError(f"--{what}: is required without a terminal to ask in; choose one of {names}")
        answer = _ask(what if any(known.values()) else f"{what} ({names})", default)
        given = answer if answer in known else None
    if given not in known:
        near = difflib.get_close_matches(given, known, n=1)
        raise UserError(f"--{what} {given}: is none of {names}" + (f"; did you mean {near[0]}?" if near else ""))
    return given


def _number(what: str, default: int) -> int:
    answer = ""
    while not (answer.isascii() and answer.isdigit() and int(answer) > 0):
        if not _asks():
            raise UserError(
                f"--{what.partition(',')[0]}: is required without a terminal to ask in; give a number such as 8"
            )
        answer = _ask(what, str(default))
    return int(answer)


def _weights(stage: str) -> str | None:
    """Where the weights are; None for a shape by its name."""
    without = "to train from the beginning" if stage == "pretrain" else "to choose a shape by its name first"
    while True:
        answer = _ask(f"weights (a directory, a run, or a name such as hf:ORG/NAME; empty {without})")
        if not answer:
            return None
        if _is_so(lambda given: hub_name(given) is not None or is_file(local_weights(given) / "config.json"), answer):
            return answer
        print(f"{missing_model(Path(answer), '')} (working directory: {Path.cwd()})")


def _data(embedded: str) -> tuple[str | None, str | None]:
    """What to train and to evaluate on; None and None for the rows that come with llmsuite."""
    print(f"  {embedded} has a few rows to try it with")
    data = _place("data (a file such as rows.jsonl, or a name such as hf:ORG/NAME)", embedded)
    return (None, None) if data in (None, embedded) else (data, _place("eval_data (empty for none)"))


def _place(question: str, default: str = "") -> str | None:
    while True:
        answer = _ask(question, default)
        if not answer:
            return None
        if _is_so(lambda given: is_remote(given) or exists(find(given)) or exists(find(f"{given}.idx")), answer):
            return answer
        print(f"{answer} is not here (working directory: {Path.cwd()})")


def _is_so(question: Callable[[str], bool], answer: str) -> bool:
    """Whether it is so of an answer; not of one that is no name at all, which is said."""
    try:
        return question(answer)
    except UserError as error:
        print(error)
        return False


def _file(default: str) -> str:
    while True:
        answer = _ask("file to write", default)
        if not exists(Path(answer)):
            return answer
        print(f"{answer} exists")
