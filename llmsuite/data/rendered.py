"""What a chat template refuses of a row, in the words in which the stages that train on such rows refuse it."""

from __future__ import annotations

from typing import Any

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Preference, Prompt, Unpaired


def has_answers(row: Conversation) -> bool:
    """Whether there are supervised turns, none of them empty."""
    answers = [message for message, is_supervised in zip(row.messages, row.supervised) if is_supervised]
    return bool(answers) and all(message.content.strip() or message.tool_calls for message in answers)


def prompt_text(template: ChatTemplate, row: Prompt) -> str:
    """The text of a prompt, up to where the answer begins. Raises UserError when the template refuses it."""
    text = template.render(row.messages, add_generation_prompt=True, tools=row.tools)
    template.check_tools(text, row.tools)
    return text


def check_rendered(template: ChatTemplate, row: Any) -> None:
    """Raise UserError when a template refuses a row, of any kind that comes with llmsuite. What trains nothing, such as
    an empty answer, is left out before it is rendered."""
    if isinstance(row, Conversation):
        if has_answers(row):
            template.ahead_of_turns([row]).supervised_turns(row)
    elif isinstance(row, Preference):
        answers = (row.chosen, row.rejected)
        if all(answer.strip() for answer in answers) and row.chosen.strip() != row.rejected.strip():
            ready = template.ahead_of_splits((row.prompt, answer) for answer in answers)
            for answer in answers:
                ready.split(row.prompt, answer)
    elif isinstance(row, Unpaired):
        if row.completion.strip():
            template.ahead_of_splits([(row.prompt, row.completion)]).split(row.prompt, row.completion)
    elif isinstance(row, Prompt):
        prompt_text(template, row)
