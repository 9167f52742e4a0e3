"""llmsuite in a Python program: `llmsuite.train`, `llmsuite.load_recipe` and `llmsuite.generate`.

Each does what the command of the command line does. Paddle is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict, Unpack

from llmsuite import builtin
from llmsuite.checkpoint.directory import find_latest
from llmsuite.cli import commands
from llmsuite.cli import run as run_command
from llmsuite.errors import RecipeError, UserError
from llmsuite.files import read_json_object
from llmsuite.launch.ends import INTERRUPTED
from llmsuite.launch.launch import is_worker
from llmsuite.locks import scratch_directory
from llmsuite.plugins.given import add_files, load_file, plugin_files, plugin_of
from llmsuite.plugins.hookspecs import hook_names
from llmsuite.plugins.manager import PluginInfo, Registry, load_plugins
from llmsuite.python_files import code_allowed
from llmsuite.recipe.resolve import plan_run
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import Command, DataFormat, DeviceSpec, Exporter, LoggerSpec, ModelFamily, RewardSpec, StageSpec
from llmsuite.stages.first_rows import check_rows

RecipeLike = str | Path | Mapping[str, Any]
"""A recipe: its file, or its content."""
Spec = StageSpec | ModelFamily | DeviceSpec | DataFormat | Exporter | LoggerSpec | RewardSpec | Command
Plugin = str | Path | Spec | Any
"""A Python file, a spec such as a `ModelFamily`, or a module or object with hooks."""
_TAIL_LINES = 20


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended."""

    output_dir: Path

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, as plain data."""
        recipe: dict[str, Any] = read_json_object(self.output_dir / "recipe.json")
        return recipe

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`: of steps with "loss", of evaluations with "eval/loss"."""
        lines = (self.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint: a model directory."""
        return find_latest(self.output_dir / "checkpoints", lambda message: None)


def load_recipe(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    smoke: bool = False,
    plugins: Sequence[Plugin] = (),
) -> Recipe:
    """A recipe with all its defaults, checked as `llmsuite validate` does, the first rows of its data too. Imports no
    Paddle.

    Args:
        recipe: its file, or its content as JSON data.
        overrides: values by dotted key, such as {"train.max_steps": 3}; None for null.
        smoke: whether to make it small, as `--smoke` does.
        plugins: what it needs besides what comes with llmsuite and with installed packages.

    Raises:
        RecipeError: with everything that is wrong; it is a `UserError`.
    """
    registry = _registry(plugins)
    with _file_of(recipe) as path:
        plan = plan_run(path, _words(overrides), registry, smoke)
        check_rows(plan, registry)
        return plan.recipe


def train(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    smoke: bool = False,
    resume: bool = False,
    plugins: Sequence[Plugin] = (),
) -> Run:
    """Train as a recipe says, to its end, and return what there is to read of the run.

    A run of one rank is in this process. For several, and with `launch.max_restarts`, `llmsuite run` is started with
    what this process can hand on: plugins that are files. In a program that has been started once for each rank (by
    paddle.distributed.launch, say) every rank is in its own process, with all plugins.

    Args:
        recipe, overrides, smoke, plugins: as of `load_recipe`.
        resume: continue from the last whole checkpoint of `output_dir`.

    Raises:
        UserError: the input is wrong.
        KeyboardInterrupt: the run was stopped by a signal; it has saved a checkpoint.
        RuntimeError: ranks have failed or hung; their output says why.
    """
    registry = _registry(plugins)
    with _file_of(recipe) as path:
        plan = plan_run(path, _words(overrides), registry, smoke)
        plan.check_trains("train")
        if is_worker() or (plan.degrees.num_ranks == 1 and not plan.recipe.launch.max_restarts):
            args = types.SimpleNamespace(recipe=str(path), overrides=_words(overrides), smoke=smoke, resume=resume)
            code, said = run_command.run(args, registry), ""
        else:
            options = [*(["--smoke"] if smoke else ()), *(["--resume"] if resume else ())]
            code, said = _run_ranks([str(path), *options, *_words(overrides)], plugins)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == 2:
        raise UserError(said)
    if code != 0:
        raise RuntimeError(f"the run in {plan.output_dir} ended with exit code {code}:\n{said}")
    return Run(plan.output_dir)


Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the turns of a conversation: {"role": …, "content": …}."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`; those that are left out are as on the command line."""

    max_new_tokens: int
    """Most tokens of an answer: 128."""
    temperature: float
    """0, the default, is greedy."""
    top_k: int
    """Draw from so many of the likeliest tokens; 0 for all."""
    top_p: float
    """Draw from the likeliest tokens that have this share of the probability: 1."""
    seed: int
    """Answers are drawn from the seed and their number: 0."""
    chat_template: str | None
    """"tokenizer", the default, a built-in one, or None to continue texts as they are."""
    batch_size: int
    """Answers decoded together: 8."""
    base: str | Path | None
    """The model that an adapter belongs to, if it has been moved."""
    device: str
    """Name of a registered device: "cpu"."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of parameters and activations: "fp32"."""
    plugins: Sequence[Plugin]
    """As of `load_recipe`."""


def generate(model: str | Path, prompts: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[str]:
    """Answers of a model to prompts, as `llmsuite generate` gives them, on one device.

    Args:
        model: a run, a checkpoint or model directory of any layout, or an adapter.
        prompts: texts or conversations.
        options: see `GenerateOptions`.

    Raises:
        UserError: there is no such model, device or precision, or an answer has no room.
    """
    if not isinstance(model, (str, Path)):
        raise UserError(f"generate: model is of type {type(model).__name__}; give a directory, such as run.checkpoint")
    _check_options(options)
    prompts = _checked_prompts(prompts)
    base = options.get("base")
    choice = types.SimpleNamespace(
        model=str(model),
        base=None if base is None else str(base),
        config=None,
        tokenizer=None,
        allow_pickle=False,
        device=options.get("device", "cpu"),
        num_devices=1,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        precision=options.get("precision", "fp32"),
        engine="dynamic",
    )
    from llmsuite.cli.model import open_generator

    generator = open_generator(choice, _registry(options.get("plugins", ()))).generator
    from llmsuite.inference.prompts import Prompter
    from llmsuite.inference.sampling import Sampling

    prompter = Prompter(generator.tokenizer, options.get("chat_template", "tokenizer"))
    ids = [prompter.row(p if isinstance(p, str) else {"messages": [dict(turn) for turn in p]}).ids for p in prompts]
    sampling = Sampling(
        max_new_tokens=options.get("max_new_tokens", 128),
        temperature=options.get("temperature", 0.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        seed=options.get("seed", 0),
    )
    return [answers[0].text for answers in generator.answers(ids, sampling, batch_size=options.get("batch_size", 8))]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for an option of `generate` that nothing would read."""
    known = GenerateOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"generate: no option is called {unknown[0]!r}; {hint}known: {', '.join(known)}")


def _checked_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of `generate`, before a model is loaded for them. Raises UserError where they are none."""
    if isinstance(prompts, str):
        raise UserError("generate: prompts is a text; give a list of them")
    prompts = list(prompts)
    for i, prompt in enumerate(prompts):
        is_conversation = isinstance(prompt, Sequence) and all(isinstance(turn, Mapping) for turn in prompt)
        if not isinstance(prompt, str) and not is_conversation:
            raise UserError(
                f"generate: prompts[{i}] is of type {type(prompt).__name__}; give a list of texts, or of "
                'conversations, each a list of turns: [[{"role": "user", "content": "…"}]]'
            )
    return prompts


def _registry(plugins: Sequence[Plugin]) -> Registry:
    """What comes with llmsuite and with installed packages, and what the program brings."""
    if isinstance(plugins, (str, Path)):
        raise UserError(f"plugins: is one file; give a list of them: plugins=[{str(plugins)!r}]")
    registry = add_files(load_plugins(builtin, commands))
    for plugin in plugins:
        registry.require(_info(plugin))
    return registry


def _info(plugin: Plugin) -> PluginInfo:
    if isinstance(plugin, (str, Path)):
        return load_file(Path(plugin))
    has_hooks = any(hasattr(plugin, hook) for hook in hook_names())
    if dataclasses.is_dataclass(plugin) and not has_hooks:
        name = str(getattr(plugin, "name", type(plugin).__name__))
        return PluginInfo(name, "this program", name, plugin=plugin_of([plugin]))
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return PluginInfo(name, "this program", name, plugin=plugin)


def _words(overrides: Mapping[str, Any] | None) -> list[str]:
    """Overrides as the command line has them."""
    if not isinstance(overrides, (Mapping, type(None))):
        raise UserError(
            f"overrides: is of type {type(overrides).__name__}; give values by dotted key: {{'train.max_steps': 3}}"
        )
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in (overrides or {}).items()}
    return [f"--{key}={_json(value, key)}" for key, value in plain.items()]


def _json(value: Any, what: str, indent: int | None = None) -> str:
    """JSON of something that a program has given, which may be of other types, such as NumPy's."""
    try:
        return json.dumps(value, indent=indent)
    except TypeError as error:
        raise UserError(f"{what}: {error}; give a number, text, list or dictionary of Python") from error


@contextlib.contextmanager
def _file_of(recipe: RecipeLike) -> Iterator[Path]:
    """The file of a recipe; one that is made for a while, of its content."""
    if not isinstance(recipe, Mapping):
        yield Path(recipe)
        return
    with scratch_directory() as directory:
        path = directory / "recipe.json"
        path.write_text(_json(recipe, "recipe", 1), encoding="utf-8")
        try:
            with code_allowed():  # which the program itself has named
                yield path
        except RecipeError as error:  # a line of a file that the program has not written says nothing to it
            told = [
                ("" if problem.where.startswith(f"{path}:") else problem.where, problem) for problem in error.problems
            ]
            raise RecipeError([dataclasses.replace(problem, where=where) for where, problem in told]) from None


def _run_ranks(words: Sequence[str], plugins: Sequence[Plugin]) -> tuple[int, str]:
    """Run `llmsuite run` in a process of its own, as this one has threads and its own modules; what it says is printed
    here. Returns its exit code and the end of what it said."""
    files = [plugin for plugin in plugins if isinstance(plugin, (str, Path))]
    if inside := [plugin for plugin in plugins if not isinstance(plugin, (str, Path))]:
        raise UserError(
            f"plugins: {_info(inside[0]).name} lives in this process, and the ranks of this run are others; write it "
            "into a file and name that: plugins=['my_model.py']; or start this program once for each rank"
        )
    said: list[str] = []
    with plugin_files(files):
        process = subprocess.Popen(
            [sys.executable, "-m", "llmsuite", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )
    assert process.stdout is not None
    try:
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    said = [*said, line][-_TAIL_LINES:]
                return process.wait(), "".join(said).strip()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)  # it saves, and ends
    finally:
        if process.poll() is None:
            process.kill()
