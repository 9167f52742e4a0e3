"""A row of data as the loss sees it: each token with its role, its document and its weight."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.columns import rename_columns
from llmsuite.data.keys import filled_columns
from llmsuite.data.plain_text import plain_texts
from llmsuite.data.read import raw_row
from llmsuite.data.render_checks import is_plain
from llmsuite.data.rows import Conversation, Message, Preference, Ranking, Unpaired, conversations_of
from llmsuite.engine.collator import collate_of
from llmsuite.engine.data import load_tokenizer, make_stage
from llmsuite.engine.row_reader import RowReader
from llmsuite.engine.stage import DropCounts, Stage
from llmsuite.engine.supervision import SupervisedSequence, supervised_sequences
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan


@dataclasses.dataclass(frozen=True)
class Explained:
    """A sequence of a sample."""

    name: str
    """Such as "chosen"; empty for the only one."""
    sequence: SupervisedSequence
    roles: list[str]
    """For each token, the role of its turn."""
    prompt_length: int | None
    """Length of the generation prompt for the first answer, in tokens; None where there is no answer."""
    prompt_matches: bool
    """True where the tokens of the generation prompt are those before the answer in training."""
    given: tuple[str, ...] = ()
    """Parts that the chat template is given besides the roles and contents of the turns."""
    has_default_system: bool = False
    """True where the system turn is that of `data.system`."""
    changed: str | None = None
    """The difference between the rendered conversation and its decoded tokens; None where they are equal."""


def open_stage(
    model_plan: ModelPlan, data_plan: DataPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan, registry: Registry
) -> Stage[Any]:
    """The stage of a recipe with its tokenizer, but without a model. It does not cache tokens, as it may read a single
    row, and reports nothing."""
    tokenizer = load_tokenizer(model_plan)
    stage = make_stage(model_plan, data_plan, parallel_plan, train_plan, registry, lambda: "no model", tokenizer)
    stage.context = dataclasses.replace(stage.context, caches_tokens=False, report=lambda text: None)
    return stage


def explain(stage: Stage[Any], path: Path, number: int) -> tuple[str, str | None, list[Explained]]:
    """Explain a row of a file, numbered from 1; for a stage without rows, a sample.

    Returns:
        The location of the row, the reason if it is dropped, else None, and its sequences.

    Raises:
        UserError: there is no such row, or the batches of the stage have no loss mask to show.
    """
    reader = stage.reader
    if not isinstance(reader, RowReader):
        samples = reader.read(path)
        _check_number(number, len(samples), f"{path}: samples")
        return f"{path}: sample {number}", None, list(_explained(stage, samples[number - 1], None))
    rows = reader.read_rows(path)
    _check_number(number, len(rows), f"{path}: rows")
    row = rows[number - 1]
    place = rows.places[number - 1]
    counts = DropCounts(path, 1, places=[place])
    samples = stage.make_samples([row], counts)
    if not samples:
        return place, "; ".join([*counts.dropped, *counts.left_out]), []
    if isinstance(row, Ranking):
        return place, None, list(_explained_pairs(stage, row))
    return place, None, list(_explained(stage, samples[0], row))


def _explained_pairs(stage: Stage[Any], row: Ranking) -> Iterator[Explained]:
    """The sequences of the pairs of a row with ranked answers, numbered from 1. Pairs that are left out are skipped."""
    for number, pair in enumerate(row.pairs(stage.context.data.ranked_pairs), 1):
        for sample in stage.make_samples([pair], DropCounts(Path(), 1)):
            for found in _explained(stage, sample, pair):
                yield dataclasses.replace(found, name=f"{found.name} of pair {number}")


def made_of(stage: Stage[Any], path: Path, place: str) -> list[tuple[str, str, Any]]:
    """The fields that `data.columns` makes from a row: name, column or template, and value of each, filled in."""
    data = stage.context.data
    columns = data.columns
    if not columns or not stage.row_kind:
        return []
    row = rename_columns(filled_columns(raw_row(path, place), columns, data.fill), columns)
    return [(field, source, row[field]) for field, source in columns.items()]


def use_of(stage: Stage[Any], path: Path, number: int) -> str | None:
    """The use of a row of `data.train` with `data.sample` or `data.holdout`; None where every row is trained on."""
    reader = stage.reader
    data = stage.context.data
    if not isinstance(reader, RowReader) or (data.sample is None and data.holdout is None):
        return None
    files = [path, *reader.mixed_files().values()]
    train, held_out = reader.choose_rows([reader.open_rows(file) for file in files])
    if number - 1 in held_out[0]:
        return f"is held out for evaluation by data.holdout {data.holdout}"
    times = int((train[0] == number - 1).sum())
    if times:
        return f"is trained on {times} times in an epoch" if times > 1 else "is trained on"
    if data.sample is None:
        return "is not used: it is dropped before rows are held out"
    return f"is not used: it is not among the rows of data.sample {data.sample_sizes()[0]}"


def _check_number(number: int, count: int, what: str) -> None:
    if number > count:
        raise UserError(f"--row {number}: {what} are numbered from 1 to {count}")


def _explained(stage: Stage[Any], sample: Any, row: Any) -> Iterator[Explained]:
    tokenizer = stage.context.tokenizer
    document_end = tokenizer.eos_id if row is None else None
    sequences = supervised_sequences(collate_of(stage)([sample]), document_end)
    if sequences is None:
        raise UserError(
            f"stage {stage.context.stage_name}: its batches have no 'input_ids' and 'targets', so it cannot be "
            "explained token by token"
        )
    conversations = _conversations(row)
    if not conversations:
        for sequence in sequences:
            yield Explained("", sequence, ["text"] * len(sequence.ids), None, True)
        return
    if is_plain(row):
        yield _plain(tokenizer, conversations[0][1], sequences[0])
        return
    template = stage.context.template()
    for (name, conversation), sequence in zip(conversations, sequences):
        roles = _roles(template, tokenizer, conversation, sequence)
        prompt = _generation_prompt(template, tokenizer, conversation)
        (supervised,) = np.nonzero(sequence.weights)
        before_answer = sequence.ids[: supervised[0]].tolist() if len(supervised) else []
        changed = _changed(_full_text(template, conversation), tokenizer)
        matches = prompt == before_answer
        given = _given(template, conversation)
        system = stage.context.data.system
        is_default = system is not None and Message("system", system) in conversation.messages
        yield Explained(name, sequence, roles, len(prompt), matches, given, is_default, changed)


def _plain(tokenizer: Any, conversation: Conversation, sequence: SupervisedSequence) -> Explained:
    """A row of plain text; its tokens are of the prompt or of the answer."""
    prompt, text = plain_texts(conversation)
    (supervised,) = np.nonzero(sequence.weights)
    begin = int(supervised[0]) if len(supervised) else len(sequence.ids)
    changed = _changed(text, tokenizer)
    if not prompt:
        return Explained("", sequence, ["text"] * len(sequence.ids), None, True, (), False, changed)
    roles = ["prompt"] * begin + ["answer"] * (len(sequence.ids) - begin)
    given = tokenizer.with_special_tokens(tokenizer.encode(prompt))
    matches = given == sequence.ids[:begin].tolist()
    return Explained("", sequence, roles, len(given), matches, (), False, changed)


def _conversations(row: Any) -> list[tuple[str, Conversation]]:
    """The conversation of each answer of a row, with its name."""
    names = [""]
    if isinstance(row, Preference):
        names = ["chosen", "rejected"]
    elif isinstance(row, Unpaired):
        names = ["desirable" if row.desirable else "undesirable"]
    return [(name, found) for name, found in zip(names, conversations_of(row)) if any(found.supervised)]


def _given(template: ChatTemplate, conversation: Conversation) -> tuple[str, ...]:
    """Return the parts that a template is given besides roles and contents: further keys of turns, tools, variables."""
    found = []
    for i, message in enumerate(conversation.messages):
        keys = [key for key in template.turn(message) if key not in ("role", "content")]
        if keys:
            found.append(f"{', '.join(keys)} of messages[{i}]")
    if conversation.tools:
        names = [tool["function"]["name"] for tool in json.loads(conversation.tools)]
        found.append(f"tools {', '.join(names)}")
    dropped = template.dropped_thoughts(conversation)
    found += [f"thoughts of messages[{i}], which it leaves out" for i in dropped]
    found += [f"{name} = {json.dumps(value)}" for name, value in template.kwargs_of(conversation).items()]
    return tuple(found)


def _full_text(template: ChatTemplate, conversation: Conversation) -> str:
    return template.render(conversation.messages, tools=conversation.tools, kwargs=conversation.template_kwargs)


def _changed(text: str, tokenizer: Any) -> str | None:
    """The first difference between a text and its decoded tokens, as with a tokenizer that normalises text; None where
    they are equal. Leading space is ignored, as tokenizers add and remove it."""
    decoded = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).lstrip()
    text = text.lstrip()
    if text == decoded:
        return None
    at = len(os.path.commonprefix([text, decoded]))
    return f"{text[at : at + 20]!r} is {decoded[at : at + 20]!r} in tokens"


def _generation_prompt(template: ChatTemplate, tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of the generation prompt for the first supervised answer."""
    first = conversation.supervised.index(True)
    text = template.render(
        conversation.messages[:first],
        add_generation_prompt=True,
        tools=conversation.tools,
        kwargs=conversation.template_kwargs,
    )
    return list(tokenizer.encode(text))


def _roles(
    template: ChatTemplate, tokenizer: Any, conversation: Conversation, sequence: SupervisedSequence
) -> list[str]:
    """The role of each token: that of the first turn at whose end the rendered conversation includes the token."""
    ids = sequence.ids.tolist()
    roles: list[str] = []
    for i, message in enumerate(conversation.messages):
        try:
            text = template.render(
                conversation.messages[: i + 1], tools=conversation.tools, kwargs=conversation.template_kwargs
            )
        except UserError:  # the template cannot end here: these tokens belong to the next turn
            continue
        end = 0
        for mine, theirs in zip(tokenizer.encode(text), ids):
            if mine != theirs:
                break
            end += 1
        roles += [message.role] * (end - len(roles))
    return roles + [conversation.messages[-1].role] * (len(ids) - len(roles))
