"""A reward model made of a language model and an adapter that contains the score head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec
from llmsuite.models.head import OUTPUT, SCORE
from llmsuite.models.hf_tensors import HfTensors


def with_score_head(base: ModelDirectory) -> ModelDirectory:
    """The language model as a reward model without an output projection, with the shape of the adapter's score head."""
    config = dataclasses.replace(base.config, head="score")
    tensors = {name: place for name, place in base.tensors.items() if name != OUTPUT}
    shape = (1, config.hidden_size) if base.linears_transposed else (config.hidden_size, 1)
    files = _WithScoreHead(base.files, TensorSpec(SCORE, shape, base.spec(base.names[0]).dtype))
    return dataclasses.replace(base, config=config, tensors={**tensors, SCORE: HfTensors((SCORE,))}, files=files)


@dataclasses.dataclass(frozen=True)
class _WithScoreHead:
    """Tensors of a language model, and the spec of a score head that an adapter provides."""

    files: TensorSource
    head_spec: TensorSpec

    @property
    def names(self) -> list[str]:
        return [*self.files.names, self.head_spec.name]

    @property
    def paths(self) -> list[Path]:
        return self.files.paths

    def spec(self, name: str) -> TensorSpec:
        if name == self.head_spec.name:
            return self.head_spec
        return self.files.spec(name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        assert name != self.head_spec.name, "read from the adapter instead"
        return self.files.read(name, index)
