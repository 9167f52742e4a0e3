"""What a chat template writes, and what of it is supervised, in one text."""

from __future__ import annotations

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Message


def marked(text: str, *turns: tuple[str, str], eos: str = "", last: bool = False) -> str:
    """The rendered turns with [ ] around what is supervised: all answers, or with `last` the last one."""
    messages = tuple(Message(role, content) for role, content in turns)
    answers = [role == "assistant" for role, _ in turns]
    if last:
        answers[:-1] = [False] * (len(answers) - 1)
    conversation = Conversation(messages, tuple(answers))
    template = ChatTemplate(text, {"eos_token": eos}, "x")
    found = template.render(messages)
    for before, after in reversed(template.supervised_turns(conversation)):
        found = f"{found[: len(before)]}[{found[len(before) : len(after)]}]{found[len(after) :]}"
    return found.replace("<|im_start|>", "{").replace("<|im_end|>", "}")
