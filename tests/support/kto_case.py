"""A stage of KTO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.data.rows import Message, Unpaired
from llmsuite.engine.stage import DropCounts
from llmsuite.stages.kto import KtoStage, LabelledAnswer
from llmsuite.stages.sections import KtoSection
from tests.support import dpo_case

ROWS = [
    Unpaired((Message("user", question),), Message("assistant", answer), desirable)
    for question, answer, desirable in (
        ("What is 1 + 1?", "2", True),
        ("What is 1 + 1?", "It is 3, I think.", False),
        ("Name a colour.", "Red", True),
        ("Say something long.", "A sentence that has some more words than the others.", False),
        ("What is 2 + 2?", "4", True),
    )
]


def made(**keys: Any) -> tuple[KtoStage, list[LabelledAnswer], DropCounts]:
    max_length = keys.pop("max_length", 512)
    stage = KtoStage(KtoSection(**keys), dpo_case.stage(max_length=max_length).context)
    counts = DropCounts(Path("rows.jsonl"), read=len(ROWS))
    return stage, stage.make_samples(ROWS, counts), counts
