"""A decoder that runs an exported model on Paddle Inference."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file, read_json_object
from llmsuite.base.safe_files import is_file
from llmsuite.base.typing import Tensor
from llmsuite.contract.registry import left_out_precision, load_plugins
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_kernels import kernels_for
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.batch import check_context_length
from llmsuite.inference.decoder import Cache, DecoderTraits
from llmsuite.inference.export_manifest import (
    ALONE,
    LOOP,
    PARAMETERS,
    PROGRAM,
    ExportManifest,
    rank_directory,
    read_manifest,
)
from llmsuite.inference.rank_shards import make_rings
from llmsuite.inference.stages import run_stages
from llmsuite.parallel.mesh import Mesh


class Predictor:
    """A decoder (`llmsuite.inference.decoder.Decoder`) that runs an exported program, or this rank's."""

    traits = DecoderTraits()

    def __init__(
        self,
        directory: Path,
        backend: DeviceBackend | None = None,
        num_threads: int | None = None,
        mesh: Mesh | None = None,
    ):
        """
        Args:
            directory: written by `llmsuite export`.
            backend: of the device, which is the current one; None for the CPU.
            num_threads: on cpu; None for OMP_NUM_THREADS.
            mesh: this rank's coordinates; all ranks make the same passes.

        Raises:
            UserError: there is no complete exported model, it is for other ranks or another device, its kernels cannot
                be built here, the device is missing, or its backend does not support predictors.
        """
        self.exported = read_manifest(directory)
        self._mesh = mesh or Mesh(ALONE, 0)
        _check_degrees(self.exported, self._mesh.degrees, directory)
        if broken := broken_file(directory, check_hashes=False):
            raise UserError(f"{broken}; export the model again")
        self._directory = rank_directory(directory, self._mesh)
        if backend is None and not kernels_for("cpu"):
            load_plugins()  # in a script that uses the predictor alone: they add the kernels of the CPU
        self._backend = backend or CpuBackend()
        self._num_threads = num_threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
        self.has_loop = is_file(self._directory / LOOP)
        shape = read_json_object(directory / "config.json")
        self._max_length = int(shape.get("max_position_embeddings") or shape["n_positions"])
        self._vocab_size = int(shape["vocab_size"])
        self._hidden_size = int(shape.get("hidden_size") or shape["n_embd"])
        self._dtype = self.exported.dtype
        if self.exported.has_kernels:
            _load_kernels(directory, self._backend, self.exported.precision)
        if reason := self._backend.unavailable(1):
            raise UserError(f"--device {self._backend.name}: {reason}")
        self._config()  # raises before the first pass, if the backend does not support predictors
        make_rings(self._mesh)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """Make one pass, see `llmsuite.inference.decoder.Decoder.forward`."""
        stage = self._mesh.coordinate["pp"]
        new_cache: list[Tensor] = []
        if cache is None:
            shapes = self.exported.cache_shapes_of(stage)
            cache = [paddle.zeros([len(ids), *shape], self._dtype) for shape in shapes]
        inputs = [tensor_of(ids), tensor_of(padding), *cache]

        def run_stage(hidden: Tensor | None) -> Tensor:
            result, *new = self._run(inputs if hidden is None else [*inputs, hidden])
            new_cache.extend(new)
            return result

        if self._mesh.degrees.pp == 1:
            logits = run_stage(None)
        else:
            sizes = [*ids.shape, self._hidden_size], self._dtype, [len(ids), self._vocab_size]
            logits = run_stages(self._mesh, run_stage, *sizes)
        return np.asarray(logits.numpy()), new_cache

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> list[list[int]]:
        """Greedy answers to prompts, without the stop token, by one run of the program with the decoding loop.

        Raises:
            UserError: there is no such program, or a prompt is too long.
        """
        if not self.has_loop:
            raise UserError(f"{self._directory}: has no decoding loop; export the model with --decoding_loop")
        if not prompts or not max_new_tokens:
            return [[] for _ in prompts]
        for prompt in prompts:
            check_context_length(prompt, max_new_tokens, self)
        length = max(len(prompt) for prompt in prompts)
        ids = np.asarray([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], "int64")
        padding = [length - len(prompt) for prompt in prompts]
        inputs = [ids, padding, [max_new_tokens], sorted(stop_ids) or [-1]]
        (found,) = self._loop.run([tensor_of(np.asarray(value, "int64")) for value in inputs])
        stops = set(stop_ids)
        return [list(itertools.takewhile(lambda token: token not in stops, row)) for row in found.numpy().tolist()]

    @functools.cached_property
    def _runners(self) -> list[_Runner]:
        predictor = self._open(PROGRAM)
        return [_Runner(predictor), _Runner(predictor.clone())]  # they share the weights

    @functools.cached_property
    def _loop(self) -> Any:
        return self._open(LOOP)

    def _config(self) -> Any:
        """A configuration for the device, without a program."""
        from paddle.inference import Config

        config = Config()
        config.disable_glog_info()
        self._backend.configure_predictor(config, _current_device(), self._num_threads)
        return config

    def _open(self, program: str) -> Any:
        from paddle.inference import create_predictor

        config = self._config()
        config.set_model(str(self._directory / program), str(self._directory / PARAMETERS))
        config.switch_ir_optim(True)
        config.enable_memory_optim(False)
        return create_predictor(config)

    def _run(self, inputs: list[Any]) -> list[Any]:
        # two runners: in a chain of passes, the results of one are inputs of the other, so that nothing is copied
        runner = next((runner for runner in self._runners if not runner.referenced_results()), self._runners[0])
        return runner.run(inputs)


class _Runner:
    """A predictor of Paddle whose results are not overwritten while they are in use.

    Paddle's predictor (3.3.1) writes results into the memory of an earlier run when they fit, even while those are
    still referenced or passed back as a cache: rows of a batch would be mixed up without an error.
    """

    def __init__(self, predictor: Any):
        self._predictor = predictor
        self._results: list[weakref.ref[Any]] = []

    def referenced_results(self) -> list[Any]:
        """Results of the last run that are still referenced."""
        return [tensor for reference in self._results if (tensor := reference()) is not None]

    def run(self, inputs: list[Any]) -> list[Any]:
        for tensor in self.referenced_results():
            # a referenced result moves to memory of its own, before Paddle writes over the old one
            copy = tensor.clone()
            tensor.get_tensor()._share_data_with(copy.get_tensor())
        results = list(self._predictor.run(inputs))
        self._results = [weakref.ref(tensor) for tensor in results]
        return results


def _load_kernels(directory: Path, backend: DeviceBackend, precision: str) -> None:
    """Register the operations of a program with matrices that are packed in a precision.

    Raises:
        UserError: it is for another device, or they cannot be built here.
    """
    kernels = backend.program_kernels()
    if kernels is None:
        raise UserError(
            f"{directory}: its matrices are stored for kernels that {backend.name} does not have; export the model "
            f"again with --device {backend.name}{left_out_precision(backend.name, precision)}"
        )
    if not kernels.load_for_programs():
        raise UserError(
            f"{directory}: its matmuls need kernels that are built by g++; install it, or export the model again "
            "with --precision fp32"
        )


def _current_device() -> int:
    """Index of this rank's device."""
    _, _, number = paddle.device.get_device().partition(":")
    return int(number or 0)


def _check_degrees(exported: ExportManifest, degrees: Degrees, directory: Path) -> None:
    """Check that programs are for the ranks of this run. Raises UserError if not."""
    exported_degrees = exported.degrees
    if (exported_degrees.pp, exported_degrees.tp) == (degrees.pp, degrees.tp):
        return
    if exported_degrees.num_ranks == 1:
        raise UserError(
            f"{directory}: was exported for one device; leave out --num_devices, or export it again with "
            f"--tensor_parallel_degree {degrees.tp}"
        )
    pipeline = f" --pipeline_parallel_degree {exported_degrees.pp}" if exported_degrees.pp > 1 else ""
    num_ranks = exported_degrees.num_ranks
    raise UserError(f"{directory}: was exported for {num_ranks} devices; add --num_devices {num_ranks}{pipeline}")
