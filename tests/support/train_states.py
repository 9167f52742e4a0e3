"""Training states, small and quickly saved, and damage to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.save import CheckpointJob
from llmsuite.checkpoint.save import save as save_job
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.checkpoint.train_state import TrainState
from tests.support import alone, tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILY, TOKENIZER

STATE = TrainState(step=2, samples=16, seed=7, recipe_sha256="ab" * 32, loss_scale=512.0, good_steps=3)


def load_slots(path: Path) -> dict[str, np.ndarray]:
    files = TensorFiles(path, "optimizer")
    return {name: files.read(name) for name in files.names}


class Bits:
    """A tensor as far as saving is concerned: values of any dtype, handed out as Paddle does."""

    def __init__(self, values: np.ndarray):
        self.shape = list(values.shape)
        self.dtype = f"paddle.{values.dtype.name}"
        self.values = values

    def numpy(self) -> np.ndarray:
        return self.values.view("uint16") if self.dtype == "paddle.bfloat16" else self.values


def quick_save(root: Path, step: int, keep_last: int = 2, seed: int = 0, dtype: str = "float32") -> Path:
    parameters = {name: Bits(value) for name, value in tiny_llama.values(seed=seed, dtype=dtype).items()}
    slots = {f"{name}/moment1": Bits(value.values.astype("float32")) for name, value in parameters.items()}
    state = dataclasses.replace(STATE, step=step, samples=8 * step)
    tensors = alone.whole(parameters), alone.whole(slots)
    path = save_job(CheckpointJob(root, state, FAMILY, CONFIG, *tensors, TOKENIZER, keep_last))
    assert path is not None
    return path


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def damage(path: Path) -> None:
    file = next(path.glob("optimizer-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
