"""The Python API without runs; tests/multi/test_python.py runs what the guide says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmsuite
from llmsuite import api, builtin
from llmsuite.base.errors import UserError
from llmsuite.cli.main import main, pop_plugin_files
from llmsuite.contract.given import FILES, load_file, plugin_files, plugin_from_specs
from llmsuite.contract.registry import ALLOW_LIST
from llmsuite.contract.schema.section import as_plain
from tests.conftest import VALID

STAGE = """
import dataclasses, llmsuite
from llmsuite.contract.hookspecs import Section, StageSpec

@dataclasses.dataclass(kw_only=True)
class SpinSection(Section):
    beta: float = 0.1
    "How much."

SPEC = StageSpec(name="spin", help="of a file", config_cls=SpinSection, factory=lambda: object)

@llmsuite.hookimpl
def llmsuite_register_stages():
    return [SPEC]
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    monkeypatch.delenv(FILES, raising=False)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "spin_of_a_test.py"
    path.write_text(STAGE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return path


class Receiver:
    """Stands for a process: keeps the signals that it is sent."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def interrupt(self) -> None:
        self.received.append(signal.SIGINT)

    def kill(self) -> None:
        self.received.append(signal.SIGKILL)


@pytest.mark.parametrize("early", range(4))
def test_interrupts_are_for_the_process_of_the_run(early: int) -> None:
    process = Receiver()
    before = signal.getsignal(signal.SIGINT)
    with api._Interrupts() as interrupts:
        for _ in range(early):
            signal.raise_signal(signal.SIGINT)  # before the process is known
        assert process.received == []
        interrupts.forward_to(process)  # type: ignore[arg-type]
        for _ in range(3 - early):
            signal.raise_signal(signal.SIGINT)
    assert process.received == [signal.SIGINT, signal.SIGINT, signal.SIGKILL]
    assert signal.getsignal(signal.SIGINT) is before


def test_importing_it_imports_nothing_large() -> None:
    code = (
        "import sys, llmsuite; llmsuite.load_recipe('recipes/llama/dpo.json'); llmsuite.train, llmsuite.generate; "
        "print([name for name in ('paddle', 'paddlenlp', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_all_that_is_promised_is_there() -> None:
    assert {name for name in llmsuite.__all__ if getattr(llmsuite, name) is None} == set()
    assert callable(llmsuite.train)
    with pytest.raises(AttributeError, match="has no attribute 'tran'"):
        _ = llmsuite.tran  # type: ignore[attr-defined]


def test_a_recipe_is_a_file_or_its_content(write_recipe: Callable[..., Path]) -> None:
    of_file, of_content = (llmsuite.load_recipe(given, {"dpo.beta": 0.3}) for given in (write_recipe(), VALID))
    assert as_plain(of_file) == as_plain(of_content)
    assert of_file.dpo.beta == 0.3  # type: ignore[attr-defined]
    assert of_file.train.lr_schedule == "cosine"


def test_overrides_are_values(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"train.max_grad_norm": None, "data.eval": tmp_path, "lora.target_modules": ["q_proj"],
                               "lora.rank": 4, "data.chat_template": "plain"}  # fmt: skip
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    recipe = llmsuite.load_recipe(VALID, changes)
    assert recipe.train.max_grad_norm is None
    assert (recipe.data.eval, recipe.lora.target_modules) == (str(tmp_path), ["q_proj"])


def test_a_recipe_whose_rows_a_run_would_refuse_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("Frage,gut,schlecht\na,b,c\n")
    with pytest.raises(llmsuite.RecipeError, match=r"rows.csv:2: keys .* fit no format with preference rows") as caught:
        llmsuite.load_recipe(VALID, {"data.train": rows})
    assert [problem.key for problem in caught.value.problems] == ["data.train"]
    columns = {"prompt": "Frage", "chosen": "gut", "rejected": "schlecht"}
    assert llmsuite.load_recipe(VALID, {"data.train": rows, "data.eval": None, "data.columns": columns})


def test_smoke_is_small() -> None:
    assert llmsuite.load_recipe(VALID, smoke=True).train.max_steps == 8


def test_what_is_wrong_is_raised() -> None:
    with pytest.raises(llmsuite.RecipeError) as caught:
        llmsuite.train(VALID, {"train.max_stepps": 3, "seed": -1})
    assert [problem.key for problem in caught.value.problems] == ["train.max_stepps", "seed"]
    with pytest.raises(llmsuite.RecipeError, match=r"^seed: expected"):  # no line of a file that nobody has written
        llmsuite.load_recipe({**VALID, "seed": -1})
    with pytest.raises(llmsuite.UserError, match="is a text; give a list"):
        llmsuite.generate("nowhere", "Hello")
    infer = {"stage": "infer", "model": VALID["model"], "data": {"prompts": "p.jsonl"}, "output_dir": "x"}
    with pytest.raises(llmsuite.UserError, match="stage infer, which does not train"):
        llmsuite.train(infer)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: llmsuite.load_recipe({}, {"seed": np.float32(1)}), "^seed: Object of type float32 is not JSON"),
        (lambda: llmsuite.load_recipe({"seed": np.float32(1)}), "^recipe: Object of type float32 is not JSON"),
        (lambda: llmsuite.load_recipe({}, ["--seed=1"]), "^overrides: is of type list; give values by dotted key"),
        (lambda: llmsuite.load_recipe({}, plugins="mine.py"), r"give a list of them: plugins=\['mine\.py'\]"),
        (lambda: llmsuite.generate("m", ["a"], max_tokens=1), "'max_tokens'; did you mean 'max_new_tokens'"),
        (lambda: llmsuite.generate("m", "a"), "prompts is a text"),
        (lambda: llmsuite.generate(None, ["a"]), "model is of type NoneType; give a directory, such as run.checkpoint"),
        (lambda: llmsuite.generate("m", [{"role": "user", "content": "a"}]), r"prompts\[0\] is of type dict; give a"),
        (lambda: llmsuite.generate("m", ["a", 3]), r"prompts\[1\] is of type int"),
    ],
)
def test_arguments_of_other_types_are_named(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ask()


def test_objects_of_this_process_cannot_go_to_others() -> None:
    (family, *_) = builtin.llmsuite_register_models()
    own = dataclasses.replace(family, name="mine")
    changes = {"model.family": "mine", "launch.num_devices": 2}
    assert llmsuite.load_recipe(VALID, changes, plugins=[own]).model.family == "mine"
    with pytest.raises(llmsuite.UserError, match=r"mine exists in this process only.*plugins=\['my_model.py'\]"):
        llmsuite.train(VALID, changes, plugins=[own])


# plugins that are named


def test_a_file_is_a_plugin(plugin: Path) -> None:
    recipe = llmsuite.load_recipe({**VALID, "stage": "spin"}, {"spin.beta": 0.5}, plugins=[plugin])
    assert recipe.spin.beta == 0.5  # type: ignore[attr-defined]
    assert sys.modules[plugin.stem].SPEC.name == "spin"
    again = llmsuite.load_recipe({**VALID, "stage": "spin"}, plugins=[str(plugin)])
    assert again.stage == "spin", "imported once"


def test_a_file_on_the_command_line(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "stages"]) == 0
    assert "spin" not in capsys.readouterr().out
    for words in (["--plugin", str(plugin), "list", "stages"], ["list", "stages", f"--plugin={plugin}"]):
        assert main(words) == 0
        assert "spin" in capsys.readouterr().out
    assert main(["list", "stages", "--plugin"]) == 2
    assert "--plugin: is the last word" in capsys.readouterr().err


def test_a_file_may_hold_its_plugin_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import llmsuite\nclass Hooks:\n    @llmsuite.hookimpl\n    def llmsuite_step_end(self, run, step): ...\n"
    (tmp_path / "held_as_an_object.py").write_text(text + "plugin = Hooks()\n")
    plugin = load_file(tmp_path / "held_as_an_object.py").plugin
    assert plugin is sys.modules.pop("held_as_an_object").plugin


def test_words_without_plugins() -> None:
    words = ["run", "a.json", "--plugin", "a.py", "--seed=1", "--plugin=b.py"]
    assert pop_plugin_files(words) == ["a.py", "b.py"]
    assert words == ["run", "a.json", "--seed=1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_that_there_is", "ModuleNotFoundError: No module named 'nothing_that_there_is'"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "has no function marked with @llmsuite.hookimpl"),
        (STAGE.replace('"spin"', '"dpo"'), "stage 'dpo' is registered by both"),
    ],
)
def test_a_file_that_does_not_work(plugin: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.write_text(text)
    assert main(["list", "stages", "--plugin", str(plugin)]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.py: is not a Python file"):
        load_file(tmp_path / "absent.py")
    (tmp_path / "json.py").write_text("")
    with pytest.raises(UserError, match="another module 'json' is already imported"):
        load_file(tmp_path / "json.py")


def test_files_are_handed_on_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plugin_files([tmp_path / "a.py"]):
        with plugin_files([tmp_path / "b.py", tmp_path / "a.py"]):
            assert os.environ[FILES] == f"{tmp_path / 'a.py'}{os.pathsep}{tmp_path / 'b.py'}"
        assert os.environ[FILES] == str(tmp_path / "a.py")
    assert FILES not in os.environ


@dataclasses.dataclass
class Best:
    """A plugin with settings of its own, which is no spec though it is a dataclass."""

    path: str

    @llmsuite.hookimpl
    def llmsuite_run_end(self, run: Any) -> None: ...


def test_an_object_with_hooks_may_be_a_dataclass() -> None:
    changes = {"launch.num_devices": 1}
    assert llmsuite.load_recipe(VALID, changes, plugins=[Best("a"), Best("b")])
    with pytest.raises(llmsuite.UserError, match="Best is already registered, as plugin Best of this program"):
        llmsuite.load_recipe(VALID, changes, plugins=[Best("a"), Best("a")])


def test_only_specs_are_registered() -> None:
    with pytest.raises(UserError, match="a int cannot be registered; pass one of: StageSpec, JobSpec, ModelFamily"):
        plugin_from_specs([3])


RECORDS = [
    {"step": 1, "epoch": 0.5, "loss": 3.0, "reward": 0.25},
    {"step": 2, "epoch": 1.0, "loss": None, "reward": 0.5},
    {"step": 2, "eval/loss": 2.5},
    {"step": 3, "epoch": 1.5, "loss": 1.0, "reward": 1.0, "grad_norm": 2.0},
]


@pytest.fixture
def finished(tmp_path: Path) -> llmsuite.Run:
    """A run with four records."""
    (tmp_path / "recipe.json").write_text("{}")
    lines = [json.dumps({"schema": 1, **record}) for record in RECORDS]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return llmsuite.Run(tmp_path)


def test_metrics_are_a_table(finished: llmsuite.Run) -> None:
    table = finished.to_pandas()
    assert list(table.index) == [1, 2, 3]
    assert table.index.name == "step"
    assert list(table.columns) == ["epoch", "loss", "reward", "eval/loss", "grad_norm"]
    assert {str(kind) for kind in table.dtypes} == {"float64"}
    assert table["loss"].dropna().to_dict() == {1: 3.0, 3: 1.0}
    assert table["eval/loss"].dropna().to_dict() == {2: 2.5}


def test_a_run_without_metrics_is_an_empty_table(finished: llmsuite.Run) -> None:
    (finished.output_dir / "metrics.jsonl").write_text("")
    assert len(finished.to_pandas()) == 0
    with pytest.raises(UserError, match=r"Run\.plot: .* has no metrics yet"):
        finished.plot()


def test_the_loss_and_the_reward_are_plotted(finished: llmsuite.Run, tmp_path: Path) -> None:
    figure = finished.plot()
    assert [axes.get_title() for axes in figure.axes] == ["Loss", "Reward"]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}
    assert lines == {"train": ([1, 3], [3.0, 1.0]), "eval": ([2], [2.5])}
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_charts_are_plotted_in_the_order_given(finished: llmsuite.Run) -> None:
    titles = [axes.get_title() for axes in finished.plot("grad_norm", "loss", "reward").axes]
    assert titles == ["Gradient norm", "Loss", "Reward"]


def test_a_chart_that_the_run_does_not_have_is_named(finished: llmsuite.Run) -> None:
    message = r"the run has no chart 'los'; did you mean 'loss'\? it has: loss, reward, grad_norm$"
    with pytest.raises(UserError, match=message):
        finished.plot("los")


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("plot", "matplotlib")])
def test_what_is_not_installed_is_named(
    method: str, package: str, finished: llmsuite.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"Run\.{method}: needs the package {package}; install it with: pip install"):
        getattr(finished, method)()
