"""What a chat template writes, and what of it is supervised, in one text."""

from __future__ import annotations

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Message


def marked(text: str, *turns: tuple[str, str], eos: str = "") -> str:
    """The rendered turns with [ ] around what is supervised."""
    messages = tuple(Message(role, content) for role, content in turns)
    conversation = Conversation(messages, tuple(role == "assistant" for role, _ in turns))
    template = ChatTemplate(text, {"eos_token": eos}, "x")
    found = template.render(messages)
    for before, after in reversed(template.supervised_turns(conversation)):
        found = f"{found[: len(before)]}[{found[len(before) : len(after)]}]{found[len(after) :]}"
    return found.replace("<|im_start|>", "{").replace("<|im_end|>", "}")
