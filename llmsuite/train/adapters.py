"""The adapters of a run: their configuration, and the values that they begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.models.shard_plan import FIRST_FACTOR, MAGNITUDE, MIXER, SECOND_FACTOR
from llmsuite.parallel.fill import ReadSlice
from llmsuite.schema.recipe import LoraSection
from llmsuite.train.initial_values import initial_values


def adapter_config(lora: LoraSection) -> Any:
    """The `paddlenlp.peft.LoRAConfig` that a section with a rank stands for.

    Raises:
        UserError: paddlenlp is not installed.
    """
    from llmsuite.models.peft_configs import lora_config  # takes paddlenlp, which other runs do without

    assert lora.rank is not None
    return lora_config(
        lora.method,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        rslora=lora.rslora,
        lora_plus_scale=lora.lora_plus_ratio,
    )


def with_factors(
    read: ReadSlice, seed: int, shapes: Mapping[str, Sequence[int]], embedding: str | None = None
) -> ReadSlice:
    """The values of a model and of its adapters, which change nothing at first: B is zero, A is random, and so is a
    mixer. The magnitudes of DoRA are the lengths of the columns of W.

    A has the variance of PyTorch's default for a matrix of as many inputs, 1 / (3 I), as in HF PEFT and PaddleNLP. Of
    an embedding A is zero and B standard normal, as in HF PEFT.

    Args:
        read: values of the model.
        seed: of the recipe.
        shapes: of every parameter of the whole model.
        embedding: name of that module.
    """

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if module == embedding and kind == SECOND_FACTOR:
            return initial_values(seed, name, shape, 1.0, index)
        if module == embedding and kind == FIRST_FACTOR:
            return np.zeros([part.stop - part.start for part in index], "float32")
        if kind in (FIRST_FACTOR, MIXER):
            return initial_values(seed, name, shape, (3 * shape[-2]) ** -0.5, index)
        if kind == SECOND_FACTOR:
            return np.zeros([part.stop - part.start for part in index], "float32")
        if kind == MAGNITUDE:
            whole = tuple(shapes[f"{module}.weight"])
            columns = read(f"{module}.weight", whole, [slice(0, whole[0]), index[0]])
            return np.linalg.norm(columns.astype("float32"), axis=0)
        return read(name, shape, index)

    return initial
