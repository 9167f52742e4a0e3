"""`llmsuite recipe new`, `llmsuite recipe from-paddlenlp FILE` and its like: a recipe to begin with."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from llmsuite.errors import RecipeError, UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.new import METHODS, RULE
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import give_recipe, write_recipe
from llmsuite.regular import exists
from llmsuite.specs import Command
from llmsuite.stages.first_rows import check_rows

if TYPE_CHECKING:
    from llmsuite.recipe.conversion.conversion import Converted


_Action = Literal[
    "new", "from-paddlenlp", "from-llamafactory", "from-trl", "from-paddleformers", "from-axolotl", "from-swift"
]

_OF_NEW = ("preset", "device", "weights", "data", "eval_data", "method")


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "action",
        type=_Action,
        help="new: by a few questions or options; from-…: from arguments of PaddleNLP's llm/ scripts, or of another "
        "suite's training command",
    )
    parser.add_argument(
        "file",
        type=str | None,
        nargs="?",
        default=None,
        help="with from-…: YAML or JSON file of arguments; with from-paddlenlp and from-swift also a shell script",
    )
    parser.add_argument("-o", "--output", type=str | None, default=None, help="file to write; default: print it")
    parser.add_argument("--stage", type=str | None, default=None, help="see: llmsuite list stages")
    parser.add_argument("--family", type=str | None, default=None, help="see: llmsuite list models")
    parser.add_argument("--num_devices", type=PositiveInt | None, default=None, help="of all machines together")
    parser.add_argument(
        "--leave_out", type=str | None, default=None, help="with from-…: arguments to do without, as A,B"
    )
    parser.add_argument("--preset", type=str | None, default=None, help="with new: which model of the family")
    parser.add_argument("--device", type=str | None, default=None, help="with new: gpu (the default), xpu or cpu")
    parser.add_argument(
        "--weights",
        type=str | None,
        default=None,
        help="with new: a directory, a run, or a name such as hf:ORG/NAME; where it is here or on a hub it has family "
        "and shape",
    )
    parser.add_argument(
        "--data", type=str | None, default=None, help="with new: a file or a name such as hf:ORG/NAME to train on"
    )
    parser.add_argument("--eval_data", type=str | None, default=None, help="with new: the same, to evaluate on")
    methods = "; ".join(f"{name}: {text}" for name, text in METHODS.items())
    parser.add_argument(
        "--method", type=Literal["full", "lora", "qlora"] | None, default=None, help=f"with new: {methods}"
    )
    parser.epilog = f"How `new` chooses. {RULE}"


def run(args: Any, registry: Registry) -> int:
    if args.output is not None and exists(Path(args.output)):
        raise UserError(f"{args.output} exists; choose another --output, or remove it first")
    if args.action == "new":
        from llmsuite.cli.new_recipe import make_new

        return make_new(args, registry)
    if args.file is None:
        raise UserError(f"recipe {args.action}: name the file with the arguments")
    if given := [name for name in _OF_NEW if args[name] is not None]:
        raise UserError(f"--{given[0]}: belongs to `llmsuite recipe new`; the arguments say it")
    path = Path(args.file)
    leave_out = [key.strip() for key in (args.leave_out or "").split(",") if key.strip()]
    options = (registry, args.stage, args.family, args.num_devices, leave_out)
    found: Converted
    if args.action == "from-paddlenlp":
        from llmsuite.recipe.conversion.arguments import read_arguments
        from llmsuite.recipe.paddlenlp.convert import convert

        found = convert(read_arguments(path), path.name, *options)
    else:
        from llmsuite.recipe.suites.convert import convert as convert_suite
        from llmsuite.recipe.suites.convert import read_values
        from llmsuite.recipe.suites.known import SUITES

        suite = SUITES[args.action]
        found = convert_suite(suite, read_values(path, suite), path.name, *options)
    problems = _give(found.recipe, args.output, registry)
    _tell(found, sys.stderr if args.output is None else sys.stdout)
    for problem in problems:
        print(f"to do: {problem}", file=sys.stderr if args.output is None else sys.stdout)
    return 0


def _tell(found: Converted, tell: TextIO) -> None:
    """The report of a conversion."""
    from llmsuite.recipe.suites.suite import Report

    for note in found.notes:
        print(f"note: {note}", file=tell)
    if isinstance(found, Report):
        print(f"{len(found.same)} arguments are the same: {', '.join(key for key, _ in found.same)}", file=tell)
        print(f"{len(found.translated)} are translated:", file=tell)
        for key, value, ours in found.translated:
            print(f"  {key} = {value}: {ours}", file=tell)
    if found.left_out:
        print(f"{len(found.left_out)} arguments have no counterpart, and change nothing of what is trained:", file=tell)
    for key, value, why in found.left_out:
        print(f"  {key} = {value}: {why}", file=tell)
    if found.refused:
        print(f"{len(found.refused)} arguments are left out, so it is another job:", file=tell)
    for key, value, why in found.refused:
        print(f"  {key} = {value}: {why}", file=tell)


def _give(recipe: dict[str, Any], output: str | None, registry: Registry) -> list[str]:
    """Write or print a recipe; returns the problems to fix before it is valid."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.json"
        write_recipe(recipe, path)
        try:
            check_rows(plan_run(path, [], registry), registry)
            problems = []
        except RecipeError as error:
            problems = [f"{problem.key}: {problem.message}" for problem in error.problems]
    give_recipe(recipe, output)
    return problems


COMMAND = Command(
    name="recipe",
    help="make a recipe, or turn arguments of another suite into one",
    add_arguments=add_arguments,
    run=run,
)
