"""Execution paths of a model family, run and recorded in their own processes for `llmsuite.testing.family_contract`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmsuite import builtin
from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli import commands
from llmsuite.contract.given import add_files
from llmsuite.contract.registry import load_plugins
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.start import start_paddle
from llmsuite.devices.tensors import tensor_of
from llmsuite.launch.launch import launch

if TYPE_CHECKING:
    from llmsuite.observe.activations.recording import RankRecord

LENGTH = 14
STD = 0.15
SEED = 3
LOGPROBS = "logprobs"
"""Metric of rollouts: largest difference of the log-probabilities of sampled tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Task of a process, passed as JSON."""

    family: str
    shape: dict[str, Any]
    directory: str
    """Directory of the model and the records."""
    tokenizer: str
    tp: int = 1
    pp: int = 1


def main(path: str) -> int:
    """Run the task of a JSON file with the fields of `Task`; returns the exit code."""
    task = Task(**json.loads(Path(path).read_text(encoding="utf-8")))
    registry = add_files(load_plugins(builtin, commands))
    family = registry.models[task.family]
    backend = registry.devices["cpu"].factory()
    degrees = Degrees(task.pp, 1, 1, task.tp)
    if degrees.num_ranks == 1:
        start_paddle(backend, 1)
        _OnOneDevice(task, family, backend).run()
        return 0
    backend.prepare_ranks()
    start_paddle(backend, degrees.num_ranks, fork=True)

    def work() -> int:
        backend.after_paddle()
        _in_rank(task, family, backend, degrees)
        return 0

    logs = Path(task.directory) / f"logs-{task.tp}-{task.pp}"
    return launch(work, degrees.num_ranks, logs, lambda rank: backend.variables(degrees.num_ranks, rank), print)


class _OnOneDevice:
    """Execution paths on one device."""

    def __init__(self, task: Task, family: ModelFamily, backend: DeviceBackend):
        from llmsuite.checkpoint.model_dir import open_model
        from llmsuite.inference.parity import TokenRows

        self._family = family
        self._backend = backend
        self._directory = Path(task.directory)
        self._config = family.config_cls(**task.shape)
        self._rows = TokenRows.random(self._config.vocab_size, LENGTH)
        model = self._directory / "model"
        write_random_model(model, family, self._config, Path(task.tokenizer))
        self._source = open_model(model, {family.name: family})

    def run(self) -> None:
        """Record each path, or the message that refuses it."""
        from llmsuite.inference.parity import record_training
        from llmsuite.parallel.parallelize import parallelize_inference

        trained = _trained(self._source, self._backend, parallelize_inference)
        trained.train()
        _write(self._directory / "training", [record_training(trained, self._rows)])
        trained.eval()
        self._try("evaluation", lambda where: _write(where, [record_training(trained, self._rows)]))
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

    def _called(self, model: Any) -> RankRecord:
        """Record the logits of `model(ids)`."""
        import paddle

        from llmsuite.inference.parity import ActivationRecorder

        recorder = ActivationRecorder([model])
        names = self._rows.to_left(self._rows.names)
        recorder.begin(names)
        with paddle.no_grad():
            logits = model(tensor_of(self._rows.to_left(self._rows.ids)))
        recorder.logits(names, logits.astype("float32").numpy())
        return recorder.record()

    def _generation(self, where: Path) -> None:
        from llmsuite.inference.decoder import ModelDecoder
        from llmsuite.inference.fused import disable_decoder_kernels, fuse
        from llmsuite.inference.load import load_model
        from llmsuite.inference.parity import record_decoding

        model = load_model(self._source, self._backend)
        fuse(model, self._backend.ops("fp32"))
        _write(where, [record_decoding(model, ModelDecoder(model).forward, self._rows)])
        disable_decoder_kernels(model)
        _write(_layers_of(where), [record_decoding(model, ModelDecoder(model).forward, self._rows)])

    def _export(self, where: Path) -> None:
        from llmsuite.inference.export import export, record_export
        from llmsuite.inference.parity import record_decoding
        from llmsuite.inference.predictor import Predictor

        program = self._directory / "program"
        export(self._source, program, self._backend, self._source.path)
        predictor = Predictor(program)
        _write(where, [record_decoding(_Opaque(), predictor.forward, self._rows)])
        _write(_layers_of(where), [record_export(self._source, self._backend, "fp32", self._rows)])

    def _rollouts(self, where: Path, trained: Any) -> None:
        from llmsuite.inference.decoder import ModelDecoder
        from llmsuite.inference.fused import disable_decoder_kernels
        from llmsuite.inference.group_sampling import SampleRequest, SamplingParams, sample_groups
        from llmsuite.inference.load import AS_TRAINED, load_model
        from llmsuite.inference.parity import record_decoding
        from llmsuite.inference.refresh import RefreshableModel

        model = load_model(self._source, self._backend, packed=AS_TRAINED)
        refreshable = RefreshableModel(model, self._backend.ops("fp32"))
        refreshable.release()
        refreshable.refresh(trained.named_parameters())
        decoder = ModelDecoder(model)
        _write(where, [record_decoding(model, decoder.forward, self._rows)])
        prompts = []
        for row, start in zip(self._rows.ids, self._rows.padding):
            prompts.append(tuple(int(i) for i in row[start : self._rows.prompt]))
        requests = [SampleRequest(prompt, (SEED, i)) for i, prompt in enumerate(prompts)]
        groups = sample_groups(decoder, requests, SamplingParams(2, LENGTH - self._rows.prompt, 1.0, 4), ())
        gap = 0.0
        for prompt, group in zip(prompts, groups):
            for completion in group:
                expected = _logprobs(trained, [*prompt, *completion.ids])[-len(completion.ids) :]
                gap = max(gap, float(np.abs(expected - np.asarray(completion.logprobs)).max()))
        (where / "metrics.json").write_text(json.dumps({LOGPROBS: gap}), encoding="utf-8")
        disable_decoder_kernels(model)
        _write(_layers_of(where), [record_decoding(model, ModelDecoder(model).forward, self._rows)])


class _Opaque:
    """Stand-in for the model of a program, whose modules are not accessible."""

    def named_sublayers(self) -> list[Any]:
        return []


def _in_rank(task: Task, family: ModelFamily, backend: DeviceBackend, degrees: Degrees) -> None:
    """Record generation over the ranks of a mesh, in one of these ranks, and the exported program of this rank."""
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.inference.decoder import ModelDecoder
    from llmsuite.inference.export import export
    from llmsuite.inference.load import load_model
    from llmsuite.inference.parity import TokenRows, record_decoding
    from llmsuite.inference.predictor import Predictor
    from llmsuite.parallel import collective

    backend.activate(collective.local_rank())
    mesh = collective.start(degrees)
    directory = Path(task.directory)
    source = open_model(directory / "model", {family.name: family})
    rows = TokenRows.random(source.config.vocab_size, LENGTH)
    path = "tensor parallel" if degrees.tp > 1 else "pipeline parallel"

    def generation(where: Path) -> None:
        model = load_model(source, backend, mesh=mesh)
        _write(where, [record_decoding(model, ModelDecoder(model, mesh).forward, rows, mesh)])

    def programs(where: Path) -> None:
        program = (
            directory / f"program {path} {mesh.rank}"
        )  # one per rank: each exports its part, and a refusal comes on all ranks
        export(source, program, backend, source.path, degrees=degrees)
        _write(where, [record_decoding(_Opaque(), Predictor(program, mesh=mesh).forward, rows, mesh)])

    for name, make in ((f"{path} generation", generation), (f"{path} export", programs)):
        where = directory / name
        where.mkdir(exist_ok=True)
        try:
            make(where)
        except UserError as error:
            (where / "refused.txt").write_text(str(error), encoding="utf-8")


# helpers


def _layers_of(where: Path) -> Path:
    """Return the directory for the modules of a path that runs a kernel or a program instead of them."""
    return where.with_name(f"{where.name}, layer by layer")


def _write(where: Path, records: Sequence[RankRecord]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for record in records:
        record.write(where)
    metrics = where / "metrics.json"
    if not exists(metrics):
        metrics.write_text("{}", encoding="utf-8")


def write_random_model(directory: Path, family: ModelFamily, config: Any, tokenizer: Path) -> None:
    """Write a model with random values, also of gains: gains that are all 1 would hide errors in their use."""
    from llmsuite.checkpoint.model_writer import write_model
    from llmsuite.inference.load import parameter_shapes
    from llmsuite.models.initial_values import initial_values

    shapes = parameter_shapes(family, config)

    def value(name: str) -> np.ndarray:
        return initial_values(SEED, name, shapes[name], STD) + (len(shapes[name]) == 1)

    directory.mkdir(parents=True)
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    write_model(directory, family, config, value, specs, "hf", tokenizer)


def _trained(source: Any, backend: DeviceBackend, fill: Any) -> Any:
    """Build the model with the operations of training."""
    import paddle

    from llmsuite.inference.parity import ALONE
    from llmsuite.models.shard_plan import UNSHARDED

    with paddle.LazyGuard():
        model = source.family.factory()(source.config, backend.ops("fp32"))
    plan = source.family.shard_plan or UNSHARDED
    fill(model, plan, ALONE, lambda name, shape, index: source.read(name, index), backend.parameter_dtype("fp32"))
    return model


def _logprobs(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the log-probability of each token but the first [L - 1], from the training pass."""
    import paddle

    from llmsuite.inference.parity import ALONE
    from llmsuite.parallel.pipeline import PipelineStage

    stage = PipelineStage([model], ALONE, model.config.hidden_size, [], None)
    row = tensor_of(np.asarray([ids], "int64"))
    with paddle.no_grad():
        hidden, _ = stage.hidden_states(row)
        nll: np.ndarray = stage.token_nll(hidden[0, :-1], row[0, 1:]).numpy()
    return -nll
