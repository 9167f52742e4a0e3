"""Makes and records the forms of a family's model, in processes of its own, for `llmsuite.testing.family_contract`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmsuite import builtin
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli import commands
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.start import start_paddle
from llmsuite.errors import UserError
from llmsuite.launch.launch import launch
from llmsuite.plugins.given import add_files
from llmsuite.plugins.manager import load_plugins
from llmsuite.regular import exists
from llmsuite.schema.degrees import Degrees
from llmsuite.specs import ModelFamily

if TYPE_CHECKING:
    from llmsuite.align.activations import Record

LENGTH, STD, SEED = 14, 0.15, 3
LOGPROBS = "logprobs"
"""Largest difference of the log-probabilities of drawn tokens, beside the records of rollouts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a process does."""

    family: str
    shape: dict[str, Any]
    directory: str
    """Where the model and the records are."""
    tokenizer: str
    tp: int = 1
    pp: int = 1


def main(path: str) -> int:
    """Do what a JSON file with the fields of `Told` says; returns the exit code."""
    told = Told(**json.loads(Path(path).read_text(encoding="utf-8")))
    registry = add_files(load_plugins(builtin, commands))
    family, backend = registry.models[told.family], registry.devices["cpu"].factory()
    degrees = Degrees(told.pp, 1, 1, told.tp)
    if degrees.num_ranks == 1:
        start_paddle(backend, 1)
        _Alone(told, family, backend).run()
        return 0
    backend.prepare_ranks()
    start_paddle(backend, degrees.num_ranks, fork=True)

    def work() -> int:
        backend.after_paddle()
        _in_rank(told, family, backend, degrees)
        return 0

    logs = Path(told.directory) / f"logs-{told.tp}-{told.pp}"
    return launch(work, degrees.num_ranks, logs, lambda rank: backend.variables(degrees.num_ranks, rank), print)


class _Alone:
    """The forms on one device."""

    def __init__(self, told: Told, family: ModelFamily, backend: DeviceBackend):
        from llmsuite.checkpoint.model_dir import open_model
        from llmsuite.inference.forms import Rows

        self._family, self._backend, self._directory = family, backend, Path(told.directory)
        self._config = family.config_cls(**told.shape)
        self._rows = Rows.random(self._config.vocab_size, LENGTH)
        model = self._directory / "model"
        write_random_model(model, family, self._config, Path(told.tokenizer))
        self._source = open_model(model, {family.name: family})

    def run(self) -> None:
        """Record each form, or why there is none."""
        from llmsuite.inference.forms import as_trained
        from llmsuite.parallel.parallelize import parallelize_inference

        trained = _trained(self._source, self._backend, parallelize_inference)
        trained.train()
        _write(self._directory / "training", [as_trained(trained, self._rows)])
        trained.eval()
        self._try("evaluation", lambda where: _write(where, [as_trained(trained, self._rows)]))
        self._try("the model as it is called", lambda where: _write(where, [self._called(trained)]))
        self._try("generation", self._generation)
        self._try("export", self._export)
        self._try("rollouts", lambda where: self._rollouts(where, trained))

    def _try(self, path: str, make: Callable[[Path], None]) -> None:
        where = self._directory / path
        try:
            make(where)
        except UserError as error:
            where.mkdir(exist_ok=True)
            (where / "refused.txt").write_text(str(error), encoding="utf-8")

    def _called(self, model: Any) -> Record:
        """Logits of `model(ids)`."""
        import paddle

        from llmsuite.inference.forms import Watched

        watched, names = Watched([model]), self._rows.to_left(self._rows.names)
        watched.begin(names)
        with paddle.no_grad():
            logits = model(paddle.to_tensor(self._rows.to_left(self._rows.ids)))
        watched.logits(names, logits.astype("float32").numpy())
        return watched.record()

    def _generation(self, where: Path) -> None:
        from llmsuite.inference.decoder import ModelDecoder
        from llmsuite.inference.forms import as_decoded
        from llmsuite.inference.fused import fuse, layer_by_layer
        from llmsuite.inference.load import load_model

        model = load_model(self._source, self._backend)
        fuse(model, self._backend.ops("fp32"))
        _write(where, [as_decoded(model, ModelDecoder(model).forward, self._rows)])
        layer_by_layer(model)
        _write(_layers_of(where), [as_decoded(model, ModelDecoder(model).forward, self._rows)])

    def _export(self, where: Path) -> None:
        from llmsuite.inference.export import export, recorded
        from llmsuite.inference.forms import as_decoded
        from llmsuite.inference.predictor import Predictor

        program = self._directory / "program"
        export(self._source, program, self._backend, self._source.path)
        predictor = Predictor(program)
        _write(where, [as_decoded(_Nothing(), predictor.forward, self._rows)])
        _write(_layers_of(where), [recorded(self._source, self._backend, "fp32", self._rows)])

    def _rollouts(self, where: Path, trained: Any) -> None:
        from llmsuite.inference.decoder import ModelDecoder
        from llmsuite.inference.forms import as_decoded
        from llmsuite.inference.fused import layer_by_layer
        from llmsuite.inference.load import AS_TRAINED, load_model
        from llmsuite.inference.refresh import RefreshableModel
        from llmsuite.rl.drawing import Drawing, Request, draw_groups

        model = load_model(self._source, self._backend, stored=AS_TRAINED)
        refreshable = RefreshableModel(model, self._backend.ops("fp32"))
        refreshable.release()
        refreshable.refresh(trained.named_parameters())
        decoder = ModelDecoder(model)
        _write(where, [as_decoded(model, decoder.forward, self._rows)])
        prompts = [
            tuple(int(i) for i in row[start : self._rows.prompt])
            for row, start in zip(self._rows.ids, self._rows.padding)
        ]
        requests = [Request(prompt, (SEED, i)) for i, prompt in enumerate(prompts)]
        groups = draw_groups(decoder, requests, Drawing(2, LENGTH - self._rows.prompt, 1.0, 4), ())
        gap = 0.0
        for prompt, group in zip(prompts, groups):
            for drawn in group:
                expected = _logprobs(trained, [*prompt, *drawn.ids])[-len(drawn.ids) :]
                gap = max(gap, float(np.abs(expected - np.asarray(drawn.logprobs)).max()))
        (where / "metrics.json").write_text(json.dumps({LOGPROBS: gap}), encoding="utf-8")
        layer_by_layer(model)
        _write(_layers_of(where), [as_decoded(model, ModelDecoder(model).forward, self._rows)])


class _Nothing:
    """A model whose modules cannot be seen: a program."""

    def named_sublayers(self) -> list[Any]:
        return []


def _in_rank(told: Told, family: ModelFamily, backend: DeviceBackend, degrees: Degrees) -> None:
    """Generation over the ranks of a mesh, in one of them; and, from there, the program of each."""
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.inference.decoder import ModelDecoder
    from llmsuite.inference.export import export
    from llmsuite.inference.forms import Rows, as_decoded
    from llmsuite.inference.load import load_model
    from llmsuite.inference.predictor import Predictor
    from llmsuite.parallel import collective

    backend.activate(collective.local_rank())
    mesh = collective.start(degrees)
    directory = Path(told.directory)
    source = open_model(directory / "model", {family.name: family})
    rows = Rows.random(source.config.vocab_size, LENGTH)
    path = "tensor parallel" if degrees.tp > 1 else "pipeline parallel"

    def generation(where: Path) -> None:
        model = load_model(source, backend, mesh=mesh)
        _write(where, [as_decoded(model, ModelDecoder(model, mesh).forward, rows, mesh)])

    def programs(where: Path) -> None:
        program = directory / f"program {path} {mesh.rank}"  # of its own: what refuses does so on all ranks
        export(source, program, backend, source.path, degrees=degrees)
        _write(where, [as_decoded(_Nothing(), Predictor(program, mesh=mesh).forward, rows, mesh)])

    for name, make in ((f"{path} generation", generation), (f"{path} export", programs)):
        where = directory / name
        where.mkdir(exist_ok=True)
        try:
            make(where)
        except UserError as error:
            (where / "refused.txt").write_text(str(error), encoding="utf-8")


# helpers


def _layers_of(where: Path) -> Path:
    """Where the modules of a form are recorded that has a kernel, or is a program, in place of them."""
    return where.with_name(f"{where.name}, layer by layer")


def _write(where: Path, records: Sequence[Record]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for record in records:
        record.write(where)
    metrics = where / "metrics.json"
    if not exists(metrics):
        metrics.write_text("{}", encoding="utf-8")


def write_random_model(directory: Path, family: ModelFamily, config: Any, tokenizer: Path) -> None:
    """A model with random values: of gains too, as those that are all alike hide what they are multiplied with."""
    from llmsuite.checkpoint.model_writer import write_model
    from llmsuite.inference.load import parameter_shapes
    from llmsuite.train.initial_values import initial_values

    shapes = parameter_shapes(family, config)

    def value(name: str) -> np.ndarray:
        return initial_values(SEED, name, shapes[name], STD) + (len(shapes[name]) == 1)

    directory.mkdir(parents=True)
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    write_model(directory, family, config, value, specs, "hf", tokenizer)


def _trained(source: Any, backend: DeviceBackend, fill: Any) -> Any:
    """The model with the operations that train it."""
    import paddle

    from llmsuite.inference.forms import ALONE
    from llmsuite.models.shard_plan import WHOLE

    with paddle.LazyGuard():
        model = source.family.factory()(source.config, backend.ops("fp32"))
    plan = source.family.shard_plan or WHOLE
    fill(model, plan, ALONE, lambda name, shape, index: source.read(name, index), backend.parameter_dtype("fp32"))
    return model


def _logprobs(model: Any, ids: Sequence[int]) -> np.ndarray:
    """The log-probability of each token but the first, as the training pass computes it."""
    import paddle

    from llmsuite.inference.forms import ALONE
    from llmsuite.parallel.pipeline import PipelineStage

    stage = PipelineStage([model], ALONE, model.config.hidden_size, [], None)
    row = paddle.to_tensor(np.asarray([ids], "int64"))
    with paddle.no_grad():
        hidden, _ = stage.hidden_states(row)
        nll: np.ndarray = stage.token_nll(hidden[0, :-1], row[0, 1:]).numpy()
    return -nll
