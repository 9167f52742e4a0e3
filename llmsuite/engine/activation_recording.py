"""Recording of one side of `llmsuite align`: one training step in each rank of a run, or one pass of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.int8 import input_scales
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.engine.data_loader import StepDataLoader
from llmsuite.engine.eager_engine import EagerEngine, train_step
from llmsuite.engine.step_recording import StepRecording
from llmsuite.engine.trainer import Trainer
from llmsuite.models.head import head_of
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.observe.activations.merge import Side, build_side
from llmsuite.observe.activations.recording import ActivationHooks, Tokens
from llmsuite.observe.activations.samples import sample_of
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.parallelize import parallelize_inference
from llmsuite.recipe.resolve import RunPlan


def record_step(plan: RunPlan, registry: Registry, directory: Path, every: int) -> int:
    """Run the first step of a recipe in this rank and record it; `merge.read_side` reads it. Returns the exit code.

    Args:
        plan: plan of the run.
        registry: registered stages and model families.
        directory: existing directory to write into.
        every: activations are kept at about one token in `every`.
    """
    if plan.parallel.engine.compiles_steps:
        raise UserError("engine.program: is step, inside of which nothing can be recorded; set it to layers")
    trainer = Trainer(plan, registry)
    engine = trainer.engine
    assert isinstance(engine, EagerEngine)  # as no step is one program
    built = trainer.built
    mesh = trainer.mesh
    built.part.train()
    trainer.init_adapters()
    recording = StepRecording(built, engine.optimizer, mesh, directory, every)
    rules = dataclasses.replace(engine.rules, callbacks=[*engine.rules.callbacks, recording])
    loader = StepDataLoader(trainer.data, mesh.data_rank, 0, 1, num_workers=0)
    with contextlib.closing(loader):
        samples = loader.next_step(1)
        metrics = train_step(engine.with_rules(rules), 1, samples.batches, requests={})
    if collective.rank() == 0:
        del metrics["reader_seconds"]
        (directory / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return 0


ROWS = 4
LENGTH = 64


def random_ids(vocab_size: int, max_length: int) -> np.ndarray:
    """Return random token ids [B, L], int64: the same for two models with the same vocabulary size and length."""
    return np.random.default_rng(0).integers(0, vocab_size, [ROWS, min(LENGTH, max_length)])


def record_model(source: ModelDirectory, backend: DeviceBackend, precision: str, ids: np.ndarray) -> Side:
    """Run and record a forward and backward pass of a model on one device. The loss is the mean negative
    log-probability of the ids, or the mean score of a reward model.

    Args:
        source: model directory with the weights.
        backend: backend of the current device.
        precision: precision of parameters and activations.
        ids: token ids [B, L], int64.

    Raises:
        UserError: the model cannot be trained, so it has no gradients.
    """
    if input_scales(source):
        raise UserError(f"{source.path}: rounds its inputs, so it cannot be compared; name the model it was made of")
    if precision not in backend.precisions:
        raise UserError(f"--precision {precision}: {backend.name} has {', '.join(backend.precisions)}")
    with paddle.LazyGuard():  # no memory before its shapes are known to be those of the files
        model = source.family.factory()(source.config, backend.ops(precision))
    check_shapes(source, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    alone = Mesh(Degrees(1, 1, 1, 1), 0)
    plan = source.family.shard_plan or UNSHARDED
    dtype = backend.parameter_dtype(precision)
    parallelize_inference(model, plan, alone, lambda name, shape, index: source.read(name, index), dtype)
    model.train()

    tokens = Tokens.of(0, ids, None, None, every=1)
    activations = ActivationHooks(lambda: tokens)
    activations.watch(model)
    loss = _loss(model, tensor_of(ids))
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    record = activations.record(alone).with_tokens([tokens])
    record = record.with_samples("parameters", {n: sample_of(_array(p)) for n, p in parameters.items()})
    record = record.with_samples("parameter_gradients", {n: sample_of(_array(g)) for n, g in gradients.items()})
    return build_side([(record.about, record.arrays)], {"loss": float(loss)}, precision)


def _loss(model: Any, ids: Any) -> Any:
    hidden, _ = model.hidden_states(ids)
    if head_of(model.config) == "score":
        return model.scores(hidden.flatten(0, 1)).mean()
    return model.token_nll(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()


def _array(tensor: Any) -> np.ndarray:
    array: np.ndarray = array_of(tensor.detach().astype("float32"))
    return array
