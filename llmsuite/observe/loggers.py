"""Built-in loggers: each forwards the metrics to another package, which is imported on first use.

A package gets the directory of the run; its own environment variables configure a server. None sends anything to a
server by default: without an account or a server they write below the run's directory.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import redacted
from llmsuite.contract.specs import Logger, LoggerSpec

_PROJECT = "llmsuite"


def _import(logger: str, module: str, package: str) -> Any:
    """Import a module of a logger's package.

    Args:
        logger: the logger that needs it.
        module: the module to import.
        package: the name to install it by.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"loggers: {logger} needs the package {package} ({error}); install it with: pip install {package}"
        ) from error


class VisualDL:
    """Writes for VisualDL; view with `visualdl --logdir RUN/visualdl`."""

    def __init__(self, run_dir: Path):
        self._writer = _import("visualdl", "visualdl", "visualdl").LogWriter(logdir=str(run_dir / "visualdl"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(tag=name, value=value, step=step)

    def close(self) -> None:
        self._writer.close()


class TensorBoard:
    """Writes for TensorBoard; view with `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run_dir: Path):
        self._writer = _import("tensorboard", "tensorboardX", "tensorboardX").SummaryWriter(
            str(run_dir / "tensorboard")
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases: online with `WANDB_API_KEY` or `WANDB_MODE=online`, else in `RUN/wandb`, for `wandb sync`."""

    def __init__(self, run_dir: Path):
        wandb = _import("wandb", "wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if "WANDB_API_KEY" in os.environ else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=run_dir.name, dir=str(run_dir), mode=mode
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab: online with `SWANLAB_MODE=cloud` and an account, else in `RUN/swanlog`, for `swanlab sync`."""

    def __init__(self, run_dir: Path):
        swanlab = _import("swanlab", "swanlab", "swanlab")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", _PROJECT),
            experiment_name=run_dir.name,
            logdir=str(run_dir / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
        )
        self._swanlab = swanlab

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MLflow:
    """MLflow: the server `MLFLOW_TRACKING_URI`, else `RUN/mlflow.db`: `mlflow ui --backend-store-uri sqlite:///…`."""

    def __init__(self, run_dir: Path):
        mlflow = _import("mlflow", "mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        run_dir.mkdir(parents=True, exist_ok=True)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=run_dir.name).info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Loggers:
    """The loggers of a run. One that fails, for example without its server, is reported once and gets no more metrics:
    the run continues, and metrics.jsonl has the numbers."""

    def __init__(self, named: Mapping[str, Logger]):
        self._working = dict(named)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a record to every logger."""
        self._each(lambda logger: logger.log(step, metrics))

    def close(self) -> None:
        """Close every logger at the end of the run."""
        self._each(lambda logger: logger.close())

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in [*self._working.items()]:
            try:
                act(logger)
            except Exception as error:  # any error of a library or of a plugin
                del self._working[name]
                print(
                    f"logger {name} failed and gets no more metrics; all of them are in metrics.jsonl:\n"
                    + redacted("".join(traceback.format_exception(error))),
                    file=sys.stderr,
                )


def _spec(name: str, cls: type[Any]) -> LoggerSpec:
    def make(run_dir: Path) -> Logger:
        logger: Logger = cls(run_dir)
        return logger

    return LoggerSpec(name=name, help=(cls.__doc__ or "").strip(), factory=make)


BUILTIN = [
    _spec("visualdl", VisualDL),
    _spec("tensorboard", TensorBoard),
    _spec("wandb", WandB),
    _spec("swanlab", SwanLab),
    _spec("mlflow", MLflow),
]
