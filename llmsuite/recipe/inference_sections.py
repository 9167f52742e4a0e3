"""The recipe sections of stages that do not train, such as `infer`. Such a stage adds its own section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from llmsuite.contract.schema.chat_templates import OF_TOKENIZER, template_problems
from llmsuite.contract.schema.columns import column_problems, kwargs_problems
from llmsuite.contract.schema.numbers import PositiveInt
from llmsuite.contract.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PromptSection(Section):
    """Prompts to generate answers for."""

    prompts: str
    """Prompts: a .json, .jsonl, .csv, .tsv (all also .gz or .zst) or .parquet file whose rows are texts,
    {"prompt": ...} or {"messages": [...]}; other keys are copied to the output. A relative path is looked up in the
    working directory, then among the files bundled with llmsuite."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Source of "prompt" or "messages": the name of a column, or a template with columns in braces, such as
    "{question} {context}". Default: the columns of the data."""
    chat_template: str = OF_TOKENIZER
    """Chat template. "tokenizer": the template of the tokenizer. Else the name of one that comes along, such as "qwen3"
    (`llmsuite list templates`), or one of your own: the path of a .jinja file, which is looked up in the working
    directory, then next to the recipe, or the text itself."""
    chat_template_kwargs: dict[str, bool | int | float | str | list[str]] = dataclasses.field(default_factory=dict)
    """Variables of the chat template, such as {"enable_thinking": false}. A row may set them in a column of the same
    name. A variable that the template does not read is refused."""
    ignore_columns: list[str] = dataclasses.field(default_factory=list)
    """Keys of turns to leave out. Other keys of turns that are unknown and that the chat template does not read are
    refused by name. "*": leave all of these out."""

    format: ClassVar[str] = "auto"
    collator: ClassVar[None] = None

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from column_problems(self.columns)
        yield from template_problems(self.chat_template)
        yield from kwargs_problems(self.chat_template_kwargs)
        if self.columns and set(self.columns) not in ({"prompt"}, {"messages"}):
            yield "columns", f"has {', '.join(self.columns)}; this stage has one field: prompt or messages"


@dataclasses.dataclass(kw_only=True)
class InferParallel(Section):
    """Parallelism of inference."""

    tensor_parallel_degree: PositiveInt = 1
    """Number of ranks over which each weight matrix is sharded."""

    pipeline_parallel_degree: ClassVar[int] = 1
    pipeline_schedule: ClassVar[str] = "1F1B"
    num_chunks: ClassVar[int] = 1
    sharding: ClassVar[str] = "none"
    sharding_parallel_degree: ClassVar[int] = 1
    expert_parallel_degree: ClassVar[int] = 1


@dataclasses.dataclass(kw_only=True)
class InferEngine(Section):
    """Execution of a forward pass."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of parameters and activations; bf16 and fp16 need a GPU or XPU."""

    deterministic: ClassVar[bool] = False  # concerns gradients


@dataclasses.dataclass(kw_only=True)
class EmptySection(Section):
    """A section without keys: its keys are for stages that train."""


SECTIONS: dict[str, type[Section]] = {
    "data": PromptSection,
    "parallel": InferParallel,
    "engine": InferEngine,
    "train": EmptySection,
    "lora": EmptySection,
    "reft": EmptySection,
    "prefix": EmptySection,
    "generation": EmptySection,
    "qat": EmptySection,
    "checkpoint": EmptySection,
}
"""Sections that replace those of the same names in `Recipe`."""
