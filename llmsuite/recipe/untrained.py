"""The sections of a recipe whose stage does not train. Such a stage adds one more section, of its own name."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PromptSection(Section):
    """The prompts to answer."""

    prompts: str
    """JSON Lines: each a text, {"prompt": ...} or {"messages": [...]}; other keys are copied to the answer. A relative
    path is looked up in the working directory, then among the files that come with llmsuite."""
    chat_template: Literal["tokenizer", "chatml", "llama3", "plain"] = "tokenizer"
    """"tokenizer": the template that comes with the tokenizer. The others are built in."""

    format: ClassVar[str] = "auto"


@dataclasses.dataclass(kw_only=True)
class InferParallel(Section):
    """How the model is spread over ranks."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks over which each weight matrix is sharded."""

    pipeline_parallel_degree: ClassVar[int] = 1
    pipeline_schedule: ClassVar[str] = "1F1B"
    num_chunks: ClassVar[int] = 1
    sharding: ClassVar[str] = "none"
    sharding_parallel_degree: ClassVar[int] = 1
    expert_parallel_degree: ClassVar[int] = 1


@dataclasses.dataclass(kw_only=True)
class InferEngine(Section):
    """How a forward pass is computed."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of parameters and activations; bf16 and fp16 need a GPU or XPU."""

    deterministic: ClassVar[bool] = False  # of gradients, which there are none of


@dataclasses.dataclass(kw_only=True)
class EmptySection(Section):
    """A section without keys: only stages that train have some."""


SECTIONS: dict[str, type[Section]] = {
    "data": PromptSection,
    "parallel": InferParallel,
    "engine": InferEngine,
    "train": EmptySection,
    "lora": EmptySection,
    "checkpoint": EmptySection,
}
"""The sections that replace those of the same names in `Recipe`."""
