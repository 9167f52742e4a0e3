"""The commands `llmsuite recipe new` and `llmsuite recipe from-… FILE`: create a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, TextIO

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.locks import scratch_directory
from llmsuite.base.safe_files import exists
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ConversionOptions, ConvertedRecipe, SuiteSpec
from llmsuite.recipe.new import METHODS, RULE
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import output_recipe, write_recipe
from llmsuite.stages.first_rows import check_rows

_NEW = "new"
_FROM = "from-"
_OF_NEW = ("preset", "device", "weights", "data", "eval_data", "method")


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "action",
        type=str,
        help="new: create a recipe from a few questions or options; from-SUITE, such as from-paddlenlp: convert the "
        "arguments of another suite's training command; see: llmsuite list suites",
    )
    parser.add_argument(
        "file",
        type=str | None,
        nargs="?",
        default=None,
        help="with from-…: YAML or JSON file of arguments; with from-paddlenlp and from-swift also a shell script",
    )
    parser.add_argument("-o", "--output", type=str | None, default=None, help="file to write (default: print it)")
    parser.add_argument("--stage", type=str | None, default=None, help="see: llmsuite list stages")
    parser.add_argument("--family", type=str | None, default=None, help="see: llmsuite list models")
    parser.add_argument("--num_devices", type=PositiveInt | None, default=None, help="of all machines together")
    parser.add_argument("--leave_out", type=str | None, default=None, help="with from-…: arguments to ignore, as A,B")
    parser.add_argument("--preset", type=str | None, default=None, help="with new: a model of the family")
    parser.add_argument(
        "--device",
        type=str | None,
        default=None,
        help="with new: gpu (the default), xpu, cpu, or here for the devices of this machine",
    )
    parser.add_argument(
        "--weights",
        type=str | None,
        default=None,
        help="with new: a directory, a run, or a name such as hf:ORG/NAME; family and shape are read from it",
    )
    parser.add_argument(
        "--data", type=str | None, default=None, help="with new: a file or a name such as hf:ORG/NAME to train on"
    )
    parser.add_argument("--eval_data", type=str | None, default=None, help="with new: a file or a name to evaluate on")
    methods = "; ".join(f"{name}: {text}" for name, text in METHODS.items())
    parser.add_argument(
        "--method", type=Literal["full", "lora", "qlora"] | None, default=None, help=f"with new: {methods}"
    )
    parser.epilog = f"Choices of `new`: {RULE}"


def run(args: Any, registry: Registry) -> int:
    if args.output is not None and exists(Path(args.output)):
        raise UserError(f"{args.output} exists; choose another --output, or remove it first")
    if args.action == _NEW:
        from llmsuite.cli.new_recipe import create_recipe

        return create_recipe(args, registry)
    suite = _suite(args.action, registry)
    if args.file is None:
        raise UserError(f"recipe {args.action}: name the file with the arguments")
    if given := [name for name in _OF_NEW if args[name] is not None]:
        raise UserError(f"--{given[0]}: belongs to `llmsuite recipe new`; here it is read from the arguments")
    leave_out = [key.strip() for key in (args.leave_out or "").split(",") if key.strip()]
    options = ConversionOptions(stage=args.stage, family=args.family, num_devices=args.num_devices, leave_out=leave_out)
    found = suite.convert(Path(args.file), registry, options)
    if not isinstance(found, ConvertedRecipe):
        owner = registry.owner("suite", suite.name).name
        raise UserError(
            f"recipe {args.action}: convert of plugin {owner} returned a {type(found).__name__}; it has to return a "
            "ConvertedRecipe"
        )
    problems = _write_or_print(found.recipe, args.output, registry)
    stream = sys.stderr if args.output is None else sys.stdout
    _print_report(found, stream)
    for problem in problems:
        print(f"to do: {problem}", file=stream)
    return 0


def actions(registry: Registry) -> list[str]:
    """Return the values of the argument `action`."""
    return [_NEW, *registry.recipe_commands, *(f"{_FROM}{name}" for name in registry.suites)]


def add_actions(parser: Any, registry: Registry) -> None:
    """Add the subcommands of plugins to the help of this command."""
    more = "; ".join(f"{name}: {command.help}" for name, command in registry.recipe_commands.items())
    if more:
        parser.epilog = f"{parser.epilog} Further actions, with arguments of their own: {more}."


def _suite(action: str, registry: Registry) -> SuiteSpec:
    """Return the suite of an action such as "from-trl". Raises UserError for an action that does not exist."""
    name = action.removeprefix(_FROM)
    if name in registry.suites and action.startswith(_FROM):
        return registry.suites[name]
    if action.startswith(_FROM):
        raise UserError(f"recipe {action}: {registry.unknown('suite', name)}")
    raise UserError(f"recipe: ACTION: expected one of {', '.join(actions(registry))}, found {action!r}")


def _print_report(found: ConvertedRecipe, stream: TextIO) -> None:
    """Print the report of a conversion."""
    for note in found.notes:
        print(f"note: {note}", file=stream)
    if found.same or found.translated:  # of PaddleNLP's arguments only those without a counterpart are reported
        print(f"{len(found.same)} arguments are the same: {', '.join(key for key, _ in found.same)}", file=stream)
        print(f"{len(found.translated)} are translated:", file=stream)
        for key, value, ours in found.translated:
            print(f"  {key} = {value}: {ours}", file=stream)
    if found.left_out:
        print(f"{len(found.left_out)} arguments have no counterpart, and do not affect the training:", file=stream)
    for key, value, why in found.left_out:
        print(f"  {key} = {value}: {why}", file=stream)
    if found.refused:
        print(f"{len(found.refused)} arguments are left out, so the training differs:", file=stream)
    for key, value, why in found.refused:
        print(f"  {key} = {value}: {why}", file=stream)


def _write_or_print(recipe: dict[str, Any], output: str | None, registry: Registry) -> list[str]:
    """Write or print a recipe; returns the problems to fix before it is valid."""
    with scratch_directory() as directory:
        path = directory / "recipe.json"
        write_recipe(recipe, path)
        try:
            plan = plan_run(path, [], registry)
            check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry)
            problems = []
        except RecipeError as error:
            problems = [f"{problem.key}: {problem.message}" for problem in error.problems]
    output_recipe(recipe, output)
    return problems
