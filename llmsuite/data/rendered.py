"""What a chat template refuses of a row, in the words in which the stages that train on such rows refuse it."""

from __future__ import annotations

from typing import Any

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Preference, Prompt, Unpaired, conversations_of


def has_answers(row: Conversation) -> bool:
    """Whether there are supervised turns, none of them empty."""
    answers = [message for message, is_supervised in zip(row.messages, row.supervised) if is_supervised]
    return bool(answers) and not any(message.is_empty for message in answers)


def same_answers(row: Preference) -> bool:
    """Whether both answers say, think and call the same."""
    first, second = (
        (answer.content.strip(), answer.reasoning.strip(), [(call.name, call.arguments) for call in answer.tool_calls])
        for answer in (row.chosen, row.rejected)
    )
    return first == second


def check_rendered(template: ChatTemplate, row: Any) -> None:
    """Raise UserError when a template refuses a row, of any kind that comes with llmsuite. What trains nothing, such as
    an empty answer, is left out before it is rendered."""
    if isinstance(row, Conversation):
        if has_answers(row):
            template.ahead_of_turns([row]).supervised_turns(row)
    elif isinstance(row, Preference):
        if not (row.chosen.is_empty or row.rejected.is_empty or same_answers(row)):
            _check_answers(template, row)
    elif isinstance(row, Unpaired):
        if not row.completion.is_empty:
            _check_answers(template, row)
    elif isinstance(row, Prompt):
        template.prompt(row.messages, row.tools)


def _check_answers(template: ChatTemplate, row: Preference | Unpaired) -> None:
    ready = template.ahead_of_splits(conversations_of(row))
    for conversation in conversations_of(row):
        ready.split(conversation)
