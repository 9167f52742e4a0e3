"""What all tests share, and what those of recipes, plugins and the command line do."""

from __future__ import annotations

import atexit
import copy
import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from llmsuite import builtin
from llmsuite.base.cache import BUILT
from llmsuite.base.errors import Problem, RecipeError
from llmsuite.contract.registry import ALLOW_LIST, NO_PLUGINS, PluginInfo, Registry, load_plugins
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_kernels import DEVICE_KERNELS
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.further import ALIKE_FILES, FURTHER_FILES, RUNS_ALL, SAMPLED_FILES, sample
from tests.support.paths import ROOT

# before Paddle is imported; one thread, as the models are tiny and test processes share the cores
for _name, _value in CpuBackend().environment(os.cpu_count() or 1).items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("GLOG_minloglevel", "2")

# before huggingface_hub is imported: no test reaches a hub, or the tokens and models of whoever runs the tests
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="llmsuite-hub-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
for _name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "LLMSUITE_HUBS"):
    os.environ.pop(_name, None)

# the same examples in every run, and no deadline: a busy machine is no failure
hypothesis.settings.register_profile("llmsuite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("llmsuite")
# other examples in every run, and more: `pytest --hypothesis-profile=explore`
hypothesis.settings.register_profile("explore", max_examples=500, deadline=None, database=None)

STAGES = sorted(spec.name for spec in builtin.llmsuite_register_stages())
"""The built-in ones."""
TRAINING_STAGES = sorted(spec.name for spec in builtin.llmsuite_register_stages() if spec.trains)
VALID: dict[str, Any] = {
    "stage": "dpo",
    "model": {"family": "llama", "preset": "llama-7b", "tokenizer": "data/tokenizer"},
    "data": {"train": "data/preference/train.jsonl", "ignore_columns": ["task", "answer"]},
    "train": {"max_steps": 10, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3},
    "output_dir": "runs/test",
}


def pytest_configure(config: pytest.Config) -> None:
    """Keep hypothesis from the constants of modules that are imported by chance, unless it explores.

    It adds those of all modules of the project that are in `sys.modules`, so the examples of a derandomised run would
    depend on the tests before it. It has no setting for that (hypothesis 6.170).
    """
    if config.getoption("--hypothesis-profile") is None:
        providers._get_local_constants = providers.Constants


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-further`, and drop what both leave to `make parity`."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        tests.setdefault((path, item.name.partition("[")[0]), []).append(item)
    dropped = set()
    for (path, _), cases in tests.items():
        runs = sample([_parameters(item) for item in cases], 1 if RUNS_ALL else ALIKE_FILES.get(path, 1))
        dropped.update(item for index, item in enumerate(cases) if index not in runs)
        left = [cases[index] for index in sorted(runs)]
        first = (
            set() if path in FURTHER_FILES else sample([_parameters(item) for item in left], SAMPLED_FILES.get(path, 1))
        )
        for index, item in enumerate(left):
            if index not in first:
                item.add_marker(pytest.mark.further)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--durations`, the files that take longest too: what a change costs all runs of the tests."""
    if not (most := terminalreporter.config.getoption("durations")):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {most} files of {len(seconds)}, {seconds.total():.0f}s in all")
    for file, total in seconds.most_common(most):
        terminalreporter.line(f"{total:8.1f}s  {file}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the tests import stays: no collection looks at it again."""
    gc.collect()
    gc.freeze()


def registry_with(**plugins: Any) -> Registry:
    """What comes with llmsuite and the plugins given by name, without those of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_LIST, "")
        result = load_plugins()
    for name, plugin in plugins.items():
        result.add(PluginInfo(name, f"{name}-package 1.0", name, plugin=plugin))
    return result


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from or written to the cache of whoever runs the tests. What is built for this machine is built
    once, by one of the processes that share the tests; or once and for all, in the directory LLMSUITE_TEST_BUILT."""
    cache = tmp_path_factory.mktemp("cache")
    together = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        together = together.parent
    built = Path(os.environ.get("LLMSUITE_TEST_BUILT") or together / BUILT).absolute()
    built.mkdir(parents=True, exist_ok=True, mode=0o700)
    (cache / BUILT).symlink_to(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSUITE_CACHE", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def bundled_plugins() -> None:
    """The methods of adapters and the kernels of bundled plugins, known to all tests as to all commands: not all make a
    registry."""
    registry_with()


@pytest.fixture(autouse=True)
def own_plugins() -> Iterator[None]:
    """`--no-plugins` sets a variable for child processes, and leaves the process without kernels of plugins: both end
    with the test that gave the option."""
    before = {name: os.environ.get(name) for name in (ALLOW_LIST, NO_PLUGINS)}
    kernels = dict(DEVICE_KERNELS)
    yield
    DEVICE_KERNELS.clear()
    DEVICE_KERNELS.update(kernels)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test that fails does so again, whichever came before it: Paddle draws the same initial values in each."""
    if (paddle := sys.modules.get("paddle")) is not None:
        paddle.seed(0)


@pytest.fixture(scope="session")
def registry() -> Registry:
    """What comes with llmsuite; not to be changed."""
    return registry_with()


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe file: a small valid recipe with dotted keys changed or, with REMOVE, taken away."""

    def write(changes: Mapping[str, Any] | None = None, name: str = "recipe.json") -> Path:
        tree = copy.deepcopy(VALID)
        for dotted, value in (changes or {}).items():
            *sections, key = dotted.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            if value is REMOVE:
                del node[key]
            else:
                node[key] = value
        if tree.get("stage") == "pretrain" and "data.ignore_columns" not in (changes or {}):
            tree["data"].pop("ignore_columns", None)  # which is refused there
        path = tmp_path / name
        path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
        return path

    return write


@pytest.fixture
def plan(write_recipe: Callable[..., Path], registry: Registry) -> Callable[..., RunPlan]:
    """Plans the valid recipe with some changes and overrides."""

    def run(changes: Mapping[str, Any] | None = None, *overrides: str, smoke: bool = False) -> RunPlan:
        return plan_run(write_recipe(changes), overrides, registry, smoke)

    return run


@pytest.fixture
def problems(plan: Callable[..., RunPlan]) -> Callable[..., list[Problem]]:
    """What is wrong with the valid recipe after some changes and overrides; fails when nothing is."""

    def run(changes: Mapping[str, Any] | None = None, *overrides: str, smoke: bool = False) -> list[Problem]:
        with pytest.raises(RecipeError) as caught:
            plan(changes, *overrides, smoke=smoke)
        return caught.value.problems

    return run


def position(path: Path, needle: str) -> str:
    """`file:line:col` of something that occurs once in a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(needle) == 1, needle
    at = text.index(needle)
    return f"{path}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


STAGE_PLUGIN = '''
import dataclasses
import llmsuite
from llmsuite.contract.hookspecs import StageSpec
from llmsuite.contract.schema.section import Section

@dataclasses.dataclass(kw_only=True)
class SpinSection(Section):
    beta: float = 0.1
    """How much."""

@llmsuite.hookimpl
def llmsuite_register_stages():
    return [StageSpec(name="spin", help="a third party's stage", config_cls=SpinSection, factory=lambda: object)]
'''


class PluginSite:
    """A directory on sys.path into which packages with plugins are installed, as pip would."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.modules: set[str] = set()

    def install(self, name: str, code: str = STAGE_PLUGIN, entry_points: str = "{module} = {module}") -> None:
        """A distribution of version 1.0 with one module; `entry_points` are those of the group `llmsuite`."""
        module = name.replace("-", "_")
        self.modules.add(module)
        (self.directory / f"{module}.py").write_text(code)
        information = self.directory / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[llmsuite]\n" + entry_points.format(module=module) + "\n")
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    """Third-party packages of this test, all of them allowed."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delenv(ALLOW_LIST, raising=False)
    made = PluginSite(directory)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
