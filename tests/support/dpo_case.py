"""The DPO stage on the embedded rows and the smoke shape, for the tests of stage and engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.contract.schema.recipe import DataSection, TrainSection
from llmsuite.data.chat_template import load_template
from llmsuite.data.keys import ColumnRules
from llmsuite.data.preference_formats import BUILTIN
from llmsuite.data.read import read_rows
from llmsuite.data.rows import Preference
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.ops import Ops
from llmsuite.engine.stage import DropCounts, StageContext
from llmsuite.models.dense import DenseLM
from llmsuite.models.families.llama import SMOKE, LlamaConfig
from llmsuite.models.initial_values import initial_values
from llmsuite.stages.answers import Answer
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair
from llmsuite.stages.reference import LogpTable
from llmsuite.stages.sections import DpoSection
from tests.support.paths import DATA

FORMATS = {data_format.name: data_format for data_format in BUILTIN}


def train_section(**keys: Any) -> TrainSection:
    common = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 0.05}
    return TrainSection(**{**common, "optimizer": "sgd", "lr_schedule": "constant", **keys})


def stage(
    *,
    max_length: int = 512,
    chat_template: Any = "tokenizer",
    report: Callable[[str], None] = lambda text: None,
    model_digest: str = "model",
    micro_batch_size: int = 2,
    length_multiple: int = 1,
    caches_logps: bool = True,
    **section: Any,
) -> DpoStage:
    """A stage as a run makes it; `section` are keys of the recipe's section `dpo`."""
    tokenizer = TextTokenizer(DATA / "tokenizer")
    context = StageContext(
        stage_name="dpo",
        data=DataSection(
            train=str(DATA / "preference" / "train.jsonl"),
            ignore_columns=["task", "answer"],
            max_length=max_length,
            chat_template=chat_template,
        ),
        train=train_section(micro_batch_size=micro_batch_size),
        seed=42,
        tokenizer=tokenizer,
        template=lambda: load_template(chat_template, tokenizer.directory, tokenizer.special_tokens),
        data_formats=FORMATS,
        initial_digest=lambda: model_digest,
        length_multiple=length_multiple,
        report=report,
        caches_logps=caches_logps,
    )
    return DpoStage(DpoSection(**section), context)


class MovedLogps(LogpTable):
    """What a reference knows, but for a number of each answer's own around `mean`."""

    def __init__(self, known: LogpTable, mean: float, answers: Sequence[Answer]):
        super().__init__()
        random = np.random.default_rng(1)
        keys = list(dict.fromkeys(answer.key for answer in answers))
        assert len(keys) == len(known)
        self.add({key: value + random.normal(mean) for key, value in zip(keys, known.find(keys).tolist())})


def rows(count: int) -> list[Preference]:
    columns = ColumnRules(ignored=["task", "answer"])
    return read_rows(DATA / "preference" / "train.jsonl", "preference", "auto", FORMATS, columns=columns)[:count]


def pairs(made: DpoStage, rows: Sequence[Preference]) -> tuple[list[Pair], DropCounts]:
    counts = DropCounts(Path("rows.jsonl"), read=len(rows))
    return made.make_samples(rows, counts), counts


def model(seed: int = 1, **shape: Any) -> DenseLM:
    """The smoke shape with initial values, or a variation of it."""
    made = DenseLM(dataclasses.replace(LlamaConfig(**SMOKE), **shape), Ops())
    fill(made, seed)
    made.train()
    return made


def fill(made: DenseLM, seed: int) -> None:
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(initial_values(seed, name, parameter.shape, made.config.initializer_range))
