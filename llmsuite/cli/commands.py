"""The commands that come with llmsuite, registered as a plugin: their names, and the modules that do the work. Each
module is imported when its command is called."""

from __future__ import annotations

from llmsuite.contract.hookspecs import hookimpl
from llmsuite.contract.specs import Command


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [*_of_recipes(), *_of_models(), *_of_runs(), *_of_the_installation()]


def _of_recipes() -> list[Command]:
    """Return the commands that take a recipe or make one."""
    return [
        _command("run", "run a recipe: train, or answer prompts", takes_overrides=True),
        _command("sweep", "run a recipe with each combination of values of some keys", takes_overrides=True),
        _command("validate", "check recipes without running them", takes_overrides=True),
        _command("plan", "estimate memory, traffic and time of a run, without devices", takes_overrides=True),
        _command("show", "print a resolved recipe, with the origin of each value", takes_overrides=True),
        _command(
            "list",
            "list stages, models, recipes, devices, adapters, formats, loggers, rewards, environments, rollout "
            "engines, layouts, suites, chat templates or recipe keys",
            module="list_things",
        ),
        _command("recipe", "make a recipe, or turn arguments of another suite into one"),
    ]


def _of_models() -> list[Command]:
    """Return the commands that turn files of models into others."""
    return [
        _command("import", "import a model from GGUF, HF or PaddleNLP files", module="import_model"),
        _command("merge", "merge the files of many ranks, or a model and its LoRA adapter", part="merge"),
        _command(
            "convert",
            "convert a model to another layout, dtype or number of files, or an adapter to another layout",
            module="merge",
            part="convert",
        ),
        _command("push", "upload a model or adapters to a hub"),
    ]


def _of_runs() -> list[Command]:
    """Return the commands that take data or a run, or a model to use it."""
    return [
        _command(
            "data",
            "inspect the data of a run, index text for pretraining, or download a data set",
            takes_overrides=True,
        ),
        _command("checkpoints", "list, verify or prune the checkpoints of a run"),
        _command("runs", "list, show or compare runs"),
        _command("report", "write a report page of runs", module="runs", part="report"),
        _command("watch", "serve a live page of running or finished runs", module="runs", part="watch"),
        _command("generate", "generate answers to prompts"),
        _command("serve", "serve a model over HTTP with OpenAI's API"),
        _command(
            "eval",
            "evaluate a model: perplexity, exact match, preference accuracy, lm-eval tasks",
            module="evaluate",
        ),
        _command("calibrate", "quantise a model to 4 bits, calibrated on texts (GPTQ)"),
        _command("export", "write a model as a Paddle Inference program", part="export"),
        _command("verify", "check that an exported model equals the trained one", module="export", part="verify"),
        _command("deploy", "merge, export and verify a trained model", module="export", part="deploy"),
    ]


def _of_the_installation() -> list[Command]:
    """Return the commands about llmsuite itself and this machine."""
    return [
        _command("schema", "print the JSON Schema of a recipe"),
        _command("plugins", "list plugins, show details of one, or write a new one"),
        _command("doctor", "check that this machine can run llmsuite, and how to fix it"),
        _command("completion", "print a script that completes commands in a shell"),
    ]


def _command(name: str, help: str, module: str = "", part: str = "", takes_overrides: bool = False) -> Command:
    """Return a command of a module of this package.

    Args:
        name: of the command.
        help: its line in the list of commands.
        module: its name; empty where it is the command's.
        part: the command's word in the names of its functions, where the module has several commands.
        takes_overrides: as in `Command`.
    """
    return Command.in_module(
        f"llmsuite.cli.{module or name}",
        name=name,
        help=help,
        add_arguments=f"{part}_arguments" if part else "add_arguments",
        run=f"run_{part}" if part else "run",
        takes_overrides=takes_overrides,
    )
