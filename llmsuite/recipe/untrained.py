"""The sections of a recipe whose stage does not train. Such a stage adds one more section, of its own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from llmsuite.schema.columns import column_problems
from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PromptSection(Section):
    """The prompts to answer."""

    prompts: str
    """A .json, .jsonl, .csv, .tsv (all also .gz or .zst) or .parquet file whose rows are texts, {"prompt": ...} or
    {"messages": [...]}; other keys are copied to the answer. A relative path is looked up in the working directory,
    then among the files that come with llmsuite."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """What "prompt" or "messages" is made of: the name of a column, or a template with columns in braces such as
    "{question} {context}". Default: rows are taken as they are."""
    chat_template: Literal["tokenizer", "chatml", "llama3", "plain"] = "tokenizer"
    """"tokenizer": the template that comes with the tokenizer. The others are built in."""

    format: ClassVar[str] = "auto"

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from column_problems(self.columns)
        if self.columns and set(self.columns) not in ({"prompt"}, {"messages"}):
            yield "columns", f"has {', '.join(self.columns)}; the one field of this stage is prompt, or messages"


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
