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

from llmsuite.devices.base import PADDLE_DTYPE
from llmsuite.errors import UserError
from llmsuite.files import broken_file, read_json_file
from llmsuite.inference.batch import check_room
from llmsuite.inference.decoder import Cache
from llmsuite.inference.export import LOOP, PARAMETERS, PROGRAM, read_manifest


class Predictor:
    """A decoder (`llmsuite.inference.decoder.Decoder`) that runs an exported program."""

    def __init__(self, directory: Path, device: str = "cpu", num_threads: int | None = None):
        """
        Args:
            directory: written by `llmsuite export`.
            device: "cpu", "gpu" or "xpu".
            num_threads: on cpu; None for OMP_NUM_THREADS as it is.

        Raises:
            UserError: there is no whole exported model.
        """
        self.exported = read_manifest(directory)
        if broken := broken_file(directory, check_hashes=False):
            raise UserError(f"{broken}; export the model again")
        self._directory, self._device, self._num_threads = directory, device, num_threads
        self.has_loop = (directory / LOOP).is_file()
        shape = read_json_file(directory / "config.json")
        self._max_length = int(shape.get("max_position_embeddings") or shape["n_positions"])
        self._vocab_size = int(shape["vocab_size"])
        self._dtype = PADDLE_DTYPE["bf16" if self.exported.precision == "int8" else self.exported.precision]

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
        if cache is None:
            cache = [paddle.zeros([len(ids), *shape], self._dtype) for shape in self.exported.cache_shapes]
        logits, *present = self._run([paddle.to_tensor(ids), paddle.to_tensor(padding), *cache])
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

    def _open(self, program: str) -> Any:
        from paddle.inference import Config, create_predictor

        config = Config(str(self._directory / program), str(self._directory / PARAMETERS))
        config.disable_glog_info()
        if self._device == "gpu":
            config.enable_use_gpu(512, 0)
        elif self._device == "xpu":
            config.enable_xpu()
        else:
            config.disable_gpu()
            config.disable_mkldnn()  # with it, decoding one token at a time is several times slower (3.3.1)
            threads = self._num_threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
            config.set_cpu_math_library_num_threads(threads)
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
