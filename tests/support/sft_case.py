"""A stage of SFT, and conversations for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.contract.schema.recipe import DataSection
from llmsuite.data.chat_template import ChatTemplate, load_template
from llmsuite.data.conversation_formats import BUILTIN
from llmsuite.data.rows import Conversation, Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.stage import DropCounts, StageContext
from llmsuite.stages.language_model import WeightedTokens
from llmsuite.stages.sections import SftSection
from llmsuite.stages.sft import SftStage
from tests.support import dpo_case
from tests.support.paths import DATA

FORMATS = {f.name: f for f in BUILTIN}


def make_stage(
    max_length: int = 512,
    template: Any = "tokenizer",
    truncate: bool = False,
    report: Callable[[str], None] = lambda text: None,
    tokenizer: TextTokenizer | None = None,
    **data: Any,
) -> SftStage:
    """`template` is a choice of the recipe, or a source; `data` has further keys of the section of that name."""
    tokenizer = tokenizer or TextTokenizer(DATA / "tokenizer")

    def load() -> ChatTemplate:
        if "{" in template:
            return ChatTemplate(template, tokenizer.special_tokens, "a stranger")
        return load_template(template, tokenizer.directory, tokenizer.special_tokens)

    context = StageContext(
        stage_name="sft",
        data=DataSection(
            train=str(DATA / "sft" / "train.jsonl"), ignore_columns=["tasks"], max_length=max_length, **data
        ),
        train=dpo_case.train_section(),
        seed=42,
        tokenizer=tokenizer,
        template=load,
        data_formats=FORMATS,
        initial_digest=lambda: "model",
        length_multiple=1,
        report=report,
        capabilities=frozenset({"plain_text"}),
    )
    return SftStage(SftSection(truncate=truncate), context)


def talk(*texts: str, system: str | None = None, supervised: tuple[bool, ...] | None = None) -> Conversation:
    """User and assistant in turn; `supervised` is for each answer."""
    messages = [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
    flags = [i % 2 == 1 and (supervised is None or supervised[i // 2]) for i in range(len(texts))]
    if system is not None:
        messages = [Message("system", system), *messages]
        flags = [False, *flags]
    return Conversation(tuple(messages), tuple(flags))


def samples(made: SftStage, *rows: Conversation) -> tuple[list[WeightedTokens], dict[str, int]]:
    counts = DropCounts(Path("rows.jsonl"), read=len(rows))
    found = made.make_samples(rows, counts)
    assert len(found) + sum(counts.dropped.values()) == len(rows)
    return found, counts.dropped
