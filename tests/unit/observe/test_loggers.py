"""Loggers hand metrics on, and say what to install when their package is missing. VisualDL is there; the packages of
the others are stood in for by what is used of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.observe.loggers import BUILTIN, Loggers

LOGGERS = {spec.name: spec for spec in BUILTIN}
MODULES = {
    "visualdl": "visualdl", "tensorboard": "tensorboardX", "wandb": "wandb", "swanlab": "swanlab", "mlflow": "mlflow",
}  # fmt: skip
Patch = pytest.MonkeyPatch


class Recorder:
    """Notes every call of every method, and what came back from one is another."""

    def __init__(self, calls: list[Any], name: str = ""):
        self._calls = calls
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == "info":
            return self

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, args, kwargs))
            return Recorder(self._calls, name)

        return call


class Counting:
    """Notes the steps that it was given."""

    def __init__(self) -> None:
        self.seen: list[int | str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(step)

    def close(self) -> None:
        self.seen.append("closed")


@pytest.fixture
def calls(monkeypatch: Patch) -> list[Any]:
    """The calls of the stand-ins of all packages."""
    made: list[Any] = []
    recorder = Recorder(made)
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_PROJECT",
        "SWANLAB_MODE",
        "SWANLAB_PROJ_NAME",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)
    stand_ins: dict[str, dict[str, Any]] = {
        "tensorboardX": {"SummaryWriter": recorder.SummaryWriter},
        "wandb": {"init": recorder.init},
        "swanlab": {"init": recorder.init, "log": recorder.log, "finish": recorder.finish},
        "mlflow": {"MlflowClient": recorder.MlflowClient},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named(monkeypatch: Patch, tmp_path: Path, name: str) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(UserError, match=rf"^loggers: {name} needs .*pip install {MODULES[name]}$"):
        LOGGERS[name].factory(tmp_path)


def use(name: str, run_dir: Path) -> None:
    logger = LOGGERS[name].factory(run_dir)
    logger.log(3, {"loss": 0.5, "eval/loss": 0.25})
    logger.close()


def test_tensorboard_gets_each_metric(calls: list[Any], tmp_path: Path) -> None:
    use("tensorboard", tmp_path)
    assert calls == [
        ("SummaryWriter", (str(tmp_path / "tensorboard"),), {}),
        ("add_scalar", ("loss", 0.5, 3), {}),
        ("add_scalar", ("eval/loss", 0.25, 3), {}),
        ("close", (), {}),
    ]


def test_weights_and_biases_sends_nothing_without_an_account(
    calls: list[Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    use("wandb", tmp_path)
    assert calls[0][2] == {"project": "llmsuite", "name": tmp_path.name, "dir": str(tmp_path), "mode": "offline"}
    assert calls[1:] == [("log", ({"loss": 0.5, "eval/loss": 0.25},), {"step": 3}), ("finish", (), {})]
    monkeypatch.setenv("WANDB_API_KEY", "known")
    use("wandb", tmp_path)
    assert calls[3][2]["mode"] == "online"


def test_swanlab_is_offline_by_default(calls: list[Any], tmp_path: Path, monkeypatch: Patch) -> None:
    use("swanlab", tmp_path)
    assert (calls[0][2]["mode"], calls[0][2]["logdir"]) == ("offline", str(tmp_path / "swanlog"))
    assert calls[1:] == [("log", ({"loss": 0.5, "eval/loss": 0.25},), {"step": 3}), ("finish", (), {})]
    monkeypatch.setenv("SWANLAB_MODE", "cloud")
    use("swanlab", tmp_path)
    assert calls[3][2]["mode"] == "cloud"


def test_mlflow_writes_into_the_run_without_a_server(calls: list[Any], tmp_path: Path, monkeypatch: Patch) -> None:
    use("mlflow", tmp_path)
    assert calls[0] == ("MlflowClient", (), {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"})
    metrics = [(args[1:], kwargs) for name, args, kwargs in calls if name == "log_metric"]
    assert metrics == [(("loss", 0.5), {"step": 3}), (("eval/loss", 0.25), {"step": 3})]
    assert calls[-1][0] == "set_terminated"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    LOGGERS["mlflow"].factory(tmp_path)
    assert ("MlflowClient", (), {"tracking_uri": "http://127.0.0.1:5000"}) in calls


def test_visualdl_itself(tmp_path: Path) -> None:
    pytest.importorskip("visualdl", reason="comes with paddlenlp")
    use("visualdl", tmp_path)
    (written,) = (tmp_path / "visualdl").iterdir()
    assert b"loss" in written.read_bytes()


class Failing(Counting):
    """A logger whose server is lost after the first record."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if step > 1:
            raise ConnectionError("no server at http://me:secret@host")


def test_a_logger_that_fails_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing()
    working = Counting()
    loggers = Loggers({"failing": failing, "working": working})
    for step in (1, 2, 3):
        loggers.log(step, {"loss": 1.0})
    loggers.close()
    assert (failing.seen, working.seen) == ([1, 2], [1, 2, 3, "closed"])
    printed = capsys.readouterr().err
    assert printed.count("logger failing failed and gets no more metrics") == 1
    assert "ConnectionError: no server" in printed
    assert "secret" not in printed
