"""Python API: `llmsuite.train`, `llmsuite.load_recipe` and `llmsuite.generate`.

Each does the same as the command of the command line. Paddle is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict, Unpack

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.extras import install_command
from llmsuite.base.files import read_json_object
from llmsuite.base.locks import scratch_directory
from llmsuite.base.python_files import code_allowed
from llmsuite.base.suggestions import suggestion
from llmsuite.base.supervisor import SupervisedProcess
from llmsuite.checkpoint.directory import find_latest
from llmsuite.cli import run as run_command
from llmsuite.contract.given import add_files, load_file, plugin_files, plugin_from_specs
from llmsuite.contract.hookspecs import hook_names
from llmsuite.contract.registry import PluginInfo, Registry, load_plugins
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.specs import (
    Command,
    DataFormat,
    DeviceSpec,
    Exporter,
    JobSpec,
    LoggerSpec,
    ModelFamily,
    RewardSpec,
    StageSpec,
)
from llmsuite.launch.ends import INTERRUPTED
from llmsuite.launch.launch import is_worker
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.first_rows import check_rows

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas

RecipeLike = str | Path | Mapping[str, Any]
"""A recipe: its file, or its content as JSON data."""
Spec = StageSpec | JobSpec | ModelFamily | DeviceSpec | DataFormat | Exporter | LoggerSpec | RewardSpec | Command
Plugin = str | Path | Spec | Any
"""A Python file, a spec such as a `ModelFamily`, or a module or object with hooks."""
_DEFAULT_CHARTS = ("loss", "reward", "accuracy")
"""Charts of `Run.plot`, of those that a run has."""
_TAIL_LINES = 20
_MAX_LINE_CHARS = 1 << 16
"""Characters of a line that are passed on together."""
_SAVE_SECONDS = 600.0
"""Time for a run to end its step and save a checkpoint, when the program that has started it has died."""
_KILLING_INTERRUPT = 3
"""Number of the interrupt that kills the process of a run."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    output_dir: Path
    """Directory of the run."""

    @property
    def recipe(self) -> dict[str, Any]:
        """Resolved recipe, as plain data."""
        recipe: dict[str, Any] = read_json_object(self.output_dir / "recipe.json")
        return recipe

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`: those of steps have "loss", those of evaluations "eval/loss"."""
        lines = (self.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def checkpoint(self) -> Path | None:
        """Newest complete checkpoint, a model directory; None where there is none."""
        return find_latest(self.output_dir / "checkpoints", lambda message: None)

    def to_pandas(self) -> pandas.DataFrame:
        """Metrics as a table of pandas: a row for each step, which is the index, and a column for each metric. Those of
        evaluations, such as "eval/loss", are NaN at steps without one.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                f"Run.to_pandas: needs the package pandas; install it with: {install_command('pandas')}"
            ) from error
        rows: dict[int, dict[str, Any]] = {}
        for record in self.metrics:
            numbers = {name: value for name, value in record.items() if name not in ("schema", "step")}
            rows.setdefault(record["step"], {}).update(numbers)
        return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")

    def plot(self, *charts: str) -> matplotlib.figure.Figure:
        """Figure with charts of the metrics, training and evaluations together.

        Args:
            charts: names of charts, as `llmsuite report --png` names its files; by default the loss, and the reward or
                the preference accuracy of runs that have one.

        Raises:
            UserError: the run has no such chart, or matplotlib is not installed.
        """
        from llmsuite.observe.charts import plotted_charts
        from llmsuite.observe.plots import charts_figure
        from llmsuite.observe.runs import read_run

        found = {plotted.chart.name: plotted for plotted in plotted_charts([read_run(self.output_dir)])}
        names = charts or [name for name in _DEFAULT_CHARTS if name in found]
        if not names:
            raise UserError(f"Run.plot: {self.output_dir} has no metrics yet")
        if unknown := [name for name in names if name not in found]:
            hint = suggestion(unknown[0], found)
            raise UserError(f"Run.plot: the run has no chart {unknown[0]!r}; {hint}it has: {', '.join(found)}")
        try:
            return charts_figure([found[name] for name in names])
        except ImportError as error:
            raise UserError(
                f"Run.plot: needs the package matplotlib; install it with: {install_command('plot')}"
            ) from error


def load_recipe(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    smoke: bool = False,
    plugins: Sequence[Plugin] = (),
) -> Recipe:
    """Load a recipe with all defaults, and check it and the first rows of its data as `llmsuite validate` does. Does
    not import Paddle.

    Args:
        recipe: file of the recipe, or its content as JSON data.
        overrides: values by dotted key, such as {"train.max_steps": 3}; None for null.
        smoke: True to reduce the run to a tiny one, as `--smoke` does.
        plugins: plugins that it needs besides the built-in ones and those of installed packages.

    Raises:
        RecipeError: the recipe has errors; the exception, a `UserError`, lists all of them.
    """
    registry = _registry(plugins)
    with _recipe_file(recipe) as path:
        plan = plan_run(path, _override_args(overrides), registry, smoke)
        check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry)
        return plan.recipe


def train(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    smoke: bool = False,
    resume: bool = False,
    plugins: Sequence[Plugin] = (),
) -> Run:
    """Run a recipe to its end, and return the run.

    A run with one rank runs in this process. For several ranks, and with `launch.max_restarts`, `llmsuite run` is
    started in another process, which can use plugins only if they are files. In a program that was started once per
    rank (for example by paddle.distributed.launch), each rank runs in its own process, with all plugins.

    Args:
        recipe, overrides, smoke, plugins: see `load_recipe`.
        resume: continue from the newest complete checkpoint in `output_dir`.

    Raises:
        UserError: the input is wrong.
        KeyboardInterrupt: the run was stopped by a signal, and has saved a checkpoint.
        RuntimeError: ranks failed or hung; the message has the end of their output.
    """
    registry = _registry(plugins)
    with _recipe_file(recipe) as path:
        plan = plan_run(path, _override_args(overrides), registry, smoke)
        plan.check_trains("train")
        if is_worker() or (plan.parallel.degrees.num_ranks == 1 and not plan.recipe.launch.max_restarts):
            args = types.SimpleNamespace(
                recipe=str(path), overrides=_override_args(overrides), smoke=smoke, resume=resume
            )
            code = run_command.run(args, registry)
            output = ""
        else:
            words = [str(path), *_override_args(overrides)]
            if smoke:
                words.append("--smoke")
            if resume:
                words.append("--resume")
            code, output = _run_ranks(words, plugins)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == 2:
        raise UserError(output)
    if code != 0:
        raise RuntimeError(f"the run in {plan.output_dir} ended with exit code {code}:\n{output}")
    return Run(plan.output_dir)


Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the turns of a conversation: [{"role": …, "content": …}, …]."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`; the defaults are those of the command line."""

    max_new_tokens: int
    """Maximum number of tokens of an answer; default 128."""
    temperature: float
    """Temperature of sampling; 0, the default, is greedy decoding."""
    top_k: int
    """Sample from the `top_k` most probable tokens; 0, the default, for all."""
    top_p: float
    """Sample from the most probable tokens whose probabilities sum up to this value (nucleus sampling); default 1."""
    seed: int
    """Seed of sampling, which is combined with the number of each answer; default 0."""
    chat_template: str | None
    """Chat template: "tokenizer", the default, the name of a built-in one, or None to continue plain texts."""
    chat_template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as {"enable_thinking": False}; default none."""
    batch_size: int
    """Number of answers that are decoded together; default 8."""
    base: str | Path | None
    """Base model of an adapter, if it was moved."""
    device: str
    """Name of a registered device; default "cpu"."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of parameters and activations; default "fp32"."""
    plugins: Sequence[Plugin]
    """Plugins, see `load_recipe`."""


def generate(model: str | Path, prompts: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[str]:
    """Generate the answers of a model to prompts on one device, as `llmsuite generate` does.

    Args:
        model: a run, a checkpoint, a model directory of any layout, or an adapter.
        prompts: texts or conversations.
        options: see `GenerateOptions`.

    Returns:
        The text of the answer to each prompt.

    Raises:
        UserError: there is no such model, device or precision, or a prompt leaves no room for an answer.
    """
    if not isinstance(model, (str, Path)):
        raise UserError(f"generate: model is of type {type(model).__name__}; give a directory, such as run.checkpoint")
    _check_options(options)
    prompts = _checked_prompts(prompts)
    base = options.get("base")
    base_path = None if base is None else str(base)
    args = types.SimpleNamespace(
        model=str(model),
        base=base_path,
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

    generator = open_generator(args, _registry(options.get("plugins", ()))).generator
    from llmsuite.inference.prompts import Prompter
    from llmsuite.inference.sampling import Sampling

    template_kwargs = options.get("chat_template_kwargs")
    prompter = Prompter(generator.tokenizer, options.get("chat_template", "tokenizer"), template_kwargs=template_kwargs)
    ids = []
    for prompt in prompts:
        row = prompt if isinstance(prompt, str) else {"messages": list(map(dict, prompt))}
        ids.append(prompter.row(row).ids)
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
        hint = suggestion(unknown[0], known)
        raise UserError(f"generate: no option is called {unknown[0]!r}; {hint}known: {', '.join(known)}")


def _checked_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Check the prompts of `generate` before a model is loaded. Raises UserError for other types."""
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
    """Build the registry of built-in plugins, those of installed packages, and those of the program."""
    if isinstance(plugins, (str, Path)):
        raise UserError(f"plugins: is one file; give a list of them: plugins=[{str(plugins)!r}]")
    registry = add_files(load_plugins())
    for plugin in plugins:
        registry.require(_info(plugin))
    return registry


def _info(plugin: Plugin) -> PluginInfo:
    if isinstance(plugin, (str, Path)):
        return load_file(Path(plugin))
    has_hooks = any(hasattr(plugin, hook) for hook in hook_names())
    if dataclasses.is_dataclass(plugin) and not has_hooks:
        name = str(getattr(plugin, "name", type(plugin).__name__))
        return PluginInfo(name, "this program", name, plugin=plugin_from_specs([plugin]))
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return PluginInfo(name, "this program", name, plugin=plugin)


def _override_args(overrides: Mapping[str, Any] | None) -> list[str]:
    """Convert overrides to arguments of the command line."""
    if not isinstance(overrides, (Mapping, type(None))):
        raise UserError(
            f"overrides: is of type {type(overrides).__name__}; give values by dotted key: {{'train.max_steps': 3}}"
        )
    args = []
    for key, value in (overrides or {}).items():
        plain = str(value) if isinstance(value, Path) else value
        args.append(f"--{key}={_json(plain, key)}")
    return args


def _json(value: Any, what: str, indent: int | None = None) -> str:
    """Serialize a value of the program to JSON. Raises UserError for other types, such as those of NumPy."""
    try:
        return json.dumps(value, indent=indent)
    except TypeError as error:
        raise UserError(f"{what}: {error}; give a number, text, list or dictionary of Python") from error


@contextlib.contextmanager
def _recipe_file(recipe: RecipeLike) -> Iterator[Path]:
    """Context with the file of a recipe; a temporary file where its content is given."""
    if not isinstance(recipe, Mapping):
        yield Path(recipe)
        return
    with scratch_directory() as directory:
        path = directory / "recipe.json"
        path.write_text(_json(recipe, "recipe", 1), encoding="utf-8")
        try:
            with code_allowed():  # the program itself has named the code in the recipe
                yield path
        except RecipeError as error:
            problems = []
            for problem in error.problems:
                if problem.where.startswith(f"{path}:"):  # a line of the temporary file is of no use to the caller
                    problem = dataclasses.replace(problem, where="")
                problems.append(problem)
            raise RecipeError(problems) from None


def _run_ranks(args: Sequence[str], plugins: Sequence[Plugin]) -> tuple[int, str]:
    """Start `llmsuite run` in a new process, as this one has threads and its own imported modules, and print its
    output. Returns its exit code and the end of its output.

    The run is stopped, with a checkpoint, when this process dies: a notebook's kernel is killed by a click."""
    files = [plugin for plugin in plugins if isinstance(plugin, (str, Path))]
    in_process = [plugin for plugin in plugins if not isinstance(plugin, (str, Path))]
    if in_process:
        raise UserError(
            f"plugins: {_info(in_process[0]).name} exists in this process only, and the ranks of this run are other "
            "processes; write it into a file and name that: plugins=['my_model.py']; or start this program once for "
            "each rank"
        )
    last_lines: list[str] = []
    with _Interrupts() as interrupts:
        read_end, write_end = os.pipe()
        with open(read_end, encoding="utf-8", errors="replace") as printed:
            try:
                with plugin_files(files):
                    process = SupervisedProcess(
                        [sys.executable, "-m", "llmsuite", "run", *args],
                        output=write_end,
                        grace_seconds=_SAVE_SECONDS,
                        environment={**os.environ, "PYTHONUNBUFFERED": "1"},
                    )
            finally:
                os.close(write_end)
            try:
                interrupts.forward_to(process)
                while line := printed.readline(_MAX_LINE_CHARS):
                    print(line, end="", flush=True)
                    last_lines = [*last_lines, line][-_TAIL_LINES:]
                code = process.wait(float("inf"))
                assert code is not None
                return code, "".join(last_lines).strip()
            finally:
                if process.poll() is None:
                    process.kill()
                process.end()


class _Interrupts:
    """Context in which Ctrl-C, or the interrupt of a notebook, is for a process that was started: the first one stops
    its run with a checkpoint, the second one immediately, and the third one kills it.

    A KeyboardInterrupt here could be raised anywhere, such as before the process is known. In another thread than the
    main one nothing is changed, as none is raised there.
    """

    def __init__(self) -> None:
        """Begin with no process."""
        self._process: SupervisedProcess | None = None
        self._pending: list[int] = []
        self._count = 0
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def forward_to(self, process: SupervisedProcess) -> None:
        """Forward interrupts to a process, those that have come before included."""
        self._process = process
        self._send()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)
        self._send()

    def _send(self) -> None:
        while self._process is not None and self._pending:
            self._pending.pop()
            self._count += 1
            if self._count < _KILLING_INTERRUPT:
                self._process.interrupt()
            else:
                self._process.kill()
