"""Checks that a chat template can render a row, with the same errors as the stages that train on it."""

from __future__ import annotations

from typing import Any

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Message, Preference, Prompt, Ranking, Unpaired, conversations_of


def is_plain(row: Any) -> bool:
    """Return True for a row of plain text, which needs no chat template."""
    return isinstance(row, Conversation) and row.is_plain


def has_answers(row: Conversation) -> bool:
    """Return True if there are supervised turns, none of them empty."""
    answers = [message for message, is_supervised in zip(row.messages, row.supervised) if is_supervised]
    return bool(answers) and not any(message.is_empty for message in answers)


def same_answers(row: Preference) -> bool:
    """Return True if both answers have the same content, thoughts and tool calls."""
    return _answer_parts(row.chosen) == _answer_parts(row.rejected)


def _answer_parts(answer: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.content.strip(), answer.reasoning.strip(), calls


def check_rendered(template: ChatTemplate, row: Any) -> None:
    """Raise UserError when a template refuses a row of one of llmsuite's kinds.

    Rows on which nothing is trained, such as one with an empty answer, are not rendered.
    """
    if isinstance(row, Conversation):
        if has_answers(row) and not row.is_plain:
            template.prerender_turns([row]).supervised_turns(row)
    elif isinstance(row, Preference):
        if not (row.chosen.is_empty or row.rejected.is_empty or same_answers(row)):
            _check_answers(template, row)
    elif isinstance(row, Ranking):
        _check_answers(template, row)
    elif isinstance(row, Unpaired):
        if not row.completion.is_empty:
            _check_answers(template, row)
    elif isinstance(row, Prompt):
        template.prompt(row.messages, row.tools, row.template_kwargs)


def _check_answers(template: ChatTemplate, row: Preference | Ranking | Unpaired) -> None:
    template.prerender_splits(conversations_of(row)).splits(conversations_of(row))
