"""One row of data as it is trained on: each token with its role, its document and its weight in the loss."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.columns import renamed
from llmsuite.data.read import raw_row
from llmsuite.data.rows import Conversation, Preference, Unpaired, conversations_of
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.data import load_tokenizer, make_stage
from llmsuite.train.stage import DropCounts, Stage
from llmsuite.train.supervision import SupervisedSequence, supervised_sequences


@dataclasses.dataclass(frozen=True)
class Explained:
    """A sequence of a sample."""

    name: str
    """Such as "chosen"; empty for the only one."""
    sequence: SupervisedSequence
    roles: list[str]
    """For each token, the role whose turn it is in."""
    prompt_length: int | None
    """Tokens of the prompt that generation would get for the first answer. None where there is no answer."""
    prompt_matches: bool
    """Whether those tokens precede the answer in training too."""
    changed: str | None = None
    """Where the tokens of the conversation say something else than its rendered text; None where they say the same."""


def open_stage(plan: RunPlan, registry: Registry) -> Stage[Any]:
    """The stage of a recipe with its tokenizer, without a model. It caches no tokens, as it may read a single row,
    and reports nothing."""
    stage = make_stage(plan, registry, lambda: "no model", load_tokenizer(plan))
    stage.context = dataclasses.replace(stage.context, keeps_tokens=False, report=lambda text: None)
    return stage


def explain(stage: Stage[Any], path: Path, number: int) -> tuple[str, str | None, list[Explained]]:
    """Explain a row of a file, counted from 1; for a stage without rows, a sample.

    Returns:
        Its place, the reason if it is dropped, and its sequences.

    Raises:
        UserError: there is no such row, or the batches of the stage do not show their loss mask.
    """
    if getattr(stage, "row_kind", None) is None:
        samples = stage.read(path)
        _check_number(number, len(samples), f"{path}: samples")
        return f"{path}: sample {number}", None, list(_explained(stage, samples[number - 1], None))
    rows = stage.read_rows(path)
    _check_number(number, len(rows), f"{path}: rows")
    row, place = rows[number - 1], rows.places[number - 1]
    counts = DropCounts(path, 1, places=[place])
    samples = stage.make_samples([row], counts)
    if not samples:
        return place, "; ".join(counts.dropped), []
    return place, None, list(_explained(stage, samples[0], row))


def made_of(stage: Stage[Any], path: Path, place: str) -> list[tuple[str, str, Any]]:
    """The fields that `data.columns` makes of the row at a place: name, the column or template, and value."""
    columns = stage.context.recipe.data.columns
    if not columns or getattr(stage, "row_kind", None) is None:
        return []
    row = renamed(raw_row(path, place), columns)
    return [(field, source, row[field]) for field, source in columns.items()]


def _check_number(number: int, count: int, what: str) -> None:
    if number > count:
        raise UserError(f"--row {number}: {what} are numbered from 1 to {count}")


def _explained(stage: Stage[Any], sample: Any, row: Any) -> Iterator[Explained]:
    tokenizer = stage.context.tokenizer
    sequences = supervised_sequences(stage.collate([sample]), tokenizer.eos_id if row is None else None)
    if sequences is None:
        raise UserError(
            f"stage {stage.context.recipe.stage}: its batches have no 'input_ids' and 'targets', so it cannot be "
            "explained token by token"
        )
    conversations = _conversations(row)
    if not conversations:
        for sequence in sequences:
            yield Explained("", sequence, ["text"] * len(sequence.ids), None, True)
        return
    template = stage.context.template()
    for (name, conversation), sequence in zip(conversations, sequences):
        roles = _roles(template, tokenizer, conversation, sequence)
        prompt = _generation_prompt(template, tokenizer, conversation)
        (supervised,) = np.nonzero(sequence.weights)
        before_answer = sequence.ids[: supervised[0]].tolist() if len(supervised) else []
        changed = _changed(template.render(conversation.messages, tools=conversation.tools), tokenizer)
        yield Explained(name, sequence, roles, len(prompt), prompt == before_answer, changed)


def _conversations(row: Any) -> list[tuple[str, Conversation]]:
    """The conversation of each answer of a row, with its name."""
    names = [""]
    if isinstance(row, Preference):
        names = ["chosen", "rejected"]
    elif isinstance(row, Unpaired):
        names = ["desirable" if row.desirable else "undesirable"]
    return [(name, found) for name, found in zip(names, conversations_of(row)) if any(found.supervised)]


def _changed(text: str, tokenizer: Any) -> str | None:
    """Where the tokens of a text say something else, as those of a tokenizer that normalises; None where they do not.
    Space at the beginning does not count, which tokenizers put there and take away."""
    text, told = text.lstrip(), tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).lstrip()
    if text == told:
        return None
    at = len(os.path.commonprefix([text, told]))
    return f"{text[at : at + 20]!r} is {told[at : at + 20]!r} in tokens"


def _generation_prompt(template: ChatTemplate, tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of the prompt that generation would get for the first supervised answer."""
    first = conversation.supervised.index(True)
    text = template.render(conversation.messages[:first], add_generation_prompt=True, tools=conversation.tools)
    return list(tokenizer.encode(text))


def _roles(
    template: ChatTemplate, tokenizer: Any, conversation: Conversation, sequence: SupervisedSequence
) -> list[str]:
    """The role of each token: of the first turn up to which the rendered conversation includes it."""
    ids = sequence.ids.tolist()
    roles: list[str] = []
    for i, message in enumerate(conversation.messages):
        try:
            text = template.render(conversation.messages[: i + 1], tools=conversation.tools)
        except UserError:  # the conversation cannot end here: these tokens count to the next turn
            continue
        end = 0
        for mine, theirs in zip(tokenizer.encode(text), ids):
            if mine != theirs:
                break
            end += 1
        roles += [message.role] * (end - len(roles))
    return roles + [conversation.messages[-1].role] * (len(ids) - len(roles))
