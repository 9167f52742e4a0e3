"""Runs an exported model on Paddle Inference."""

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

from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import UserError
from llmsuite.files import broken_file, read_json_object
from llmsuite.inference.batch import check_room
from llmsuite.inference.decoder import Cache
from llmsuite.inference.exported import (
    ALONE,
    LOOP,
    PARAMETERS,
    PROGRAM,
    Exported,
    rank_directory,
    read_manifest,
)
from llmsuite.inference.rank_parts import make_rings
from llmsuite.inference.stages import through_stages
from llmsuite.parallel.mesh import Mesh
from llmsuite.regular import is_file
from llmsuite.schema.degrees import Degrees
from llmsuite.typing import Tensor


class Predictor:
    """A decoder (`llmsuite.inference.decoder.Decoder`) that runs an exported program, or this rank's."""

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
            num_threads: on cpu; None for OMP_NUM_THREADS as it is.
            mesh: this rank's place among those that the programs are for; all of them make the same passes.

        Raises:
            UserError: there is no whole exported model, it is for other ranks or another device, its kernels cannot be
                built here, the device is not there, or its backend does not say how predictors compute on it.
        """
        self.exported = read_manifest(directory)
        self._mesh = mesh or Mesh(ALONE, 0)
        _check_degrees(self.exported, self._mesh.degrees, directory)
        if broken := broken_file(directory, check_hashes=False):
            raise UserError(f"{broken}; export the model again")
        self._directory, self._backend = rank_directory(directory, self._mesh), backend or CpuBackend()
        self._num_threads = num_threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
        self.has_loop = is_file(self._directory / LOOP)
        shape = read_json_object(directory / "config.json")
        self._max_length = int(shape.get("max_position_embeddings") or shape["n_positions"])
        self._vocab_size = int(shape["vocab_size"])
        self._hidden_size = int(shape.get("hidden_size") or shape["n_embd"])
        self._dtype = self.exported.dtype
        if self.exported.has_kernels:
            _load_kernels(directory, self._backend)
        if reason := self._backend.unavailable(1):
            raise UserError(f"--device {self._backend.name}: {reason}")
        self._config()  # refused before the first pass
        make_rings(self._mesh)

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self._max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `llmsuite.inference.decoder.Decoder`."""
        stage, present = self._mesh.coordinate["pp"], []  # type: tuple[int, list[Tensor]]
        if cache is None:
            shapes = self.exported.cache_shapes_of(stage)
            cache = [paddle.zeros([len(ids), *shape], self._dtype) for shape in shapes]
        inputs = [paddle.to_tensor(ids), paddle.to_tensor(padding), *cache]

        def own(hidden: Tensor | None) -> Tensor:
            result, *new = self._run(inputs if hidden is None else [*inputs, hidden])
            present.extend(new)
            return result

        if self._mesh.degrees.pp == 1:
            logits = own(None)
        else:
            sizes = [*ids.shape, self._hidden_size], self._dtype, [len(ids), self._vocab_size]
            logits = through_stages(self._mesh, own, *sizes)
        return np.asarray(logits.numpy()), present

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> list[list[int]]:
        """The most likely tokens behind each prompt, without the stop token, by one run of the program with the
        decoding loop.

        Raises:
            UserError: there is no such program, or a prompt is too long.
        """
        if not self.has_loop:
            raise UserError(f"{self._directory}: has no decoding loop; export the model with --decoding_loop")
        if not prompts or not max_new_tokens:
            return [[] for _ in prompts]
        for prompt in prompts:
            check_room(prompt, max_new_tokens, self)
        length = max(len(prompt) for prompt in prompts)
        ids = np.asarray([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], "int64")
        padding = [length - len(prompt) for prompt in prompts]
        inputs = [ids, padding, [max_new_tokens], sorted(stop_ids) or [-1]]
        (found,) = self._loop.run([paddle.to_tensor(np.asarray(value, "int64")) for value in inputs])
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
        # in a chain of passes, the results of one runner are inputs of the other: nothing has to be copied
        runner = next((runner for runner in self._runners if not runner.held()), self._runners[0])
        return runner.run(inputs)


class _Runner:
    """A predictor of Paddle whose results are not overwritten while they are in use.

    Paddle's predictor writes results into the memory of an earlier run when they fit (3.3.1), even while somebody holds
    those or passes them back as a cache: rows of a batch would be mixed up without an error.
    """

    def __init__(self, predictor: Any):
        self._predictor = predictor
        self._results: list[weakref.ref[Any]] = []

    def held(self) -> list[Any]:
        """Results of the last run that are still referenced."""
        return [tensor for reference in self._results if (tensor := reference()) is not None]

    def run(self, inputs: list[Any]) -> list[Any]:
        for tensor in self.held():
            copy = tensor.clone()
            tensor.get_tensor()._share_data_with(copy.get_tensor())
        results = list(self._predictor.run(inputs))
        self._results = [weakref.ref(tensor) for tensor in results]
        return results


def _load_kernels(directory: Path, backend: DeviceBackend) -> None:
    """Register the operations of a program with stored matrices.

    Raises:
        UserError: it is for another device, or they cannot be built here.
    """
    if not backend.program_kernels():
        raise UserError(
            f"{directory}: its matrices are stored for cpu; export the model again with --device {backend.name}"
        )
    from llmsuite.devices.cpu.kernels.ops import load

    if not load():
        raise UserError(
            f"{directory}: its products need kernels that are built by g++; install it, or export the model again "
            "with --precision fp32"
        )


def _current_device() -> int:
    """Number of the device that this rank has."""
    _, _, number = paddle.device.get_device().partition(":")
    return int(number or 0)


def _check_degrees(exported: Exported, degrees: Degrees, directory: Path) -> None:
    """Raise UserError if programs are for other ranks than there are."""
    wanted = exported.degrees
    if (wanted.pp, wanted.tp) == (degrees.pp, degrees.tp):
        return
    if wanted.num_ranks == 1:
        raise UserError(
            f"{directory}: was exported for one device; leave out --num_devices, or export it again with "
            f"--tensor_parallel_degree {degrees.tp}"
        )
    pipeline = f" --pipeline_parallel_degree {wanted.pp}" if wanted.pp > 1 else ""
    raise UserError(
        f"{directory}: was exported for {wanted.num_ranks} devices; add --num_devices {wanted.num_ranks}{pipeline}"
    )
