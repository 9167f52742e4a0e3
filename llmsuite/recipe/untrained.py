"""The sections of a recipe whose stage trains nothing: what is left of them. A stage adds one more, of its own name."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PromptSection(Section):
    """What is answered."""

    prompts: str
    """JSON Lines: a text, {"prompt": ...} or {"messages": [...]} in each; other keys stay. A relative path is looked up
    in the working directory, then among the files that come with llmsuite."""
    chat_template: Literal["tokenizer", "chatml", "llama3", "plain"] = "tokenizer"
    """"tokenizer" for the template that comes with the tokenizer, or a built-in one."""

    format: ClassVar[str] = "auto"


@dataclasses.dataclass(kw_only=True)
class InferParallel(Section):
    """How the model is spread: over tensor parallel ranks."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that share each weight matrix."""

    pipeline_parallel_degree: ClassVar[int] = 1
    pipeline_schedule: ClassVar[str] = "1F1B"
    num_chunks: ClassVar[int] = 1
    sharding: ClassVar[str] = "none"
    sharding_parallel_degree: ClassVar[int] = 1
    expert_parallel_degree: ClassVar[int] = 1


@dataclasses.dataclass(kw_only=True)
class InferEngine(Section):
    """How a pass is computed."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of parameters and activations; bf16 and fp16 need a GPU or XPU."""


@dataclasses.dataclass(kw_only=True)
class EmptySection(Section):
    """Belongs to stages that train."""


SECTIONS: dict[str, type[Section]] = {
    "data": PromptSection,
    "parallel": InferParallel,
    "engine": InferEngine,
    "train": EmptySection,
    "lora": EmptySection,
    "checkpoint": EmptySection,
}
"""In place of those of the same names in `Recipe`."""
