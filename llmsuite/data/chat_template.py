"""Chat templates: a conversation as the text that a model is trained to read.

Templates are Jinja programs that come with a tokenizer, so they are not to be trusted: they run in a sandbox without
access to attributes of Python, cannot change their arguments, and have a process of their own with a budget, see
`llmsuite.data.rendering`. Those that are built in run here.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from llmsuite.data.call_forms import FORMS, PROBE_TOOLS, CallForms, probe
from llmsuite.data.jinja import Marked, environment, has_mark, unmark
from llmsuite.data.rendering import Refused, render, render_all
from llmsuite.data.rows import REASONING, Conversation, Message, strings_in
from llmsuite.data.said import has_said, says
from llmsuite.data.turns import DEVELOPER
from llmsuite.errors import UserError
from llmsuite.files import read_json_object
from llmsuite.regular import is_file, read_regular

BUILTIN = {
    "chatml": (
        "{% if tools %}<|im_start|>system\nTools you may call:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
        '{"name": {{ c["function"]["name"] | tojson }}, "arguments": {{ c["function"]["arguments"] | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
        "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
    ),
}
"""Templates for tokenizers that bring none. `plain` is for base models: turns on lines of their own."""
PLACEHOLDER = "<think>\nplaceholder\n</think>\n\nplaceholder"
"""Stands for a turn of the model where only the text around it is used, and has what some templates leave out later."""
_MOST_SOURCE = 1 << 20
_Asked = tuple[tuple[Message, ...], bool, str]
"""Turns, whether the prompt of generation follows them, tools as in `Conversation`."""
_WITH_TOOLS = tuple(name for name, source in BUILTIN.items() if "tools" in source)


class ChatTemplate:
    """A compiled template with the special tokens it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str], name: str):
        """Raises UserError when the template is not valid Jinja, or takes too much to be compiled."""
        self.source, self._tokens, self._name = source, special_tokens, name
        self._has_marks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._is_ours = source in BUILTIN.values()
        self._known: Mapping[_Asked, str | Refused] = {}
        """Texts that were rendered ahead."""
        try:
            if not self._is_ours:
                render(source, None)
        except Refused as error:
            raise UserError(f"chat template of {name}: {error}") from error

    def ahead_of_turns(self, conversations: Iterable[Conversation]) -> ChatTemplate:
        """This template, which has rendered what `supervised_turns` of these asks for, all at a time."""
        asked: list[_Asked] = []
        for conversation in conversations:
            messages, tools = conversation.messages, conversation.tools
            asked.append((messages, False, tools))
            for i in (i for i in range(len(messages)) if conversation.supervised[i]):
                asked += [(messages[:i], not self._has_marks, tools), (messages[: i + 1], False, tools)]
        return self._ahead_of(asked)

    def ahead_of_splits(self, answered: Iterable[Conversation]) -> ChatTemplate:
        """As `ahead_of_turns`, for `split` of these conversations."""
        asked: list[_Asked] = []
        for conversation in answered:
            messages, tools = conversation.messages, conversation.tools
            asked += [(messages[:-1], True, tools), (messages, False, tools)]
        return self._ahead_of(asked)

    def ahead_of_prompts(self, prompts: Iterable[tuple[Sequence[Message], str]]) -> ChatTemplate:
        """As `ahead_of_turns`, for `prompt` of these messages with their tools."""
        return self._ahead_of((tuple(messages), True, tools) for messages, tools in prompts)

    def _ahead_of(self, asked: Iterable[_Asked]) -> ChatTemplate:
        if self._is_ours:
            return self
        unique = list(dict.fromkeys(asked))
        known = dict(zip(unique, render_all(self.source, [self._variables(*each) for each in unique])))
        found = copy.copy(self)
        found._known = known
        return found

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: str = "") -> str:
        """Text of a conversation; `tools` as in `Conversation`. Raises UserError when the template refuses it."""
        return self._marked(messages, add_generation_prompt, tools).text

    def prompt(self, messages: Sequence[Message], tools: str = "") -> str:
        """Text of a conversation and of the beginning of its answer. Raises UserError when the template refuses it, or
        leaves out a tool, a call, or what the model thought."""
        text = self.render(messages, add_generation_prompt=True, tools=tools)
        self._check_whole(text, messages, tools)
        return text

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: str = "") -> Marked:
        try:
            rendered = self._rendered((tuple(messages), add_generation_prompt, tools))
        except Refused as error:
            roles = ", ".join(m.role for m in messages)
            raise UserError(f"chat template of {self._name} refuses the turns ({roles}): {error}") from error
        if not self._has_marks:
            return Marked(rendered, [])
        if any(has_mark(text) for message in messages for text in strings_in(message.as_turn())):
            raise UserError(
                f"chat template of {self._name} has {{% generation %}}, and a turn a character that marks it"
            )
        return unmark(rendered)

    def _rendered(self, asked: _Asked) -> str:
        """Raises Refused."""
        if self._is_ours:
            return _built_in(self.source).render(self._variables(*asked))
        known = self._known.get(asked)
        if isinstance(known, Refused):
            raise known
        return render(self.source, self._variables(*asked)) if known is None else known

    def _variables(self, messages: Sequence[Message], add_generation_prompt: bool, tools: str) -> dict[str, Any]:
        return self._named([self._turn(message) for message in messages], add_generation_prompt, tools)

    def _named(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: str) -> dict[str, Any]:
        """What a template may name, as transformers has it."""
        return {
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
            "tools": json.loads(tools) if tools else None,
            "documents": None,
            **self._tokens,
        }

    def _turn(self, message: Message) -> dict[str, Any]:
        """A turn as this template takes it."""
        turn = message.as_turn()
        if turn["role"] == DEVELOPER and DEVELOPER not in self.source:
            turn["role"] = message.role
        return self._call_forms.fit(turn) if message.tool_calls else turn

    @functools.cached_property
    def _call_forms(self) -> CallForms:
        """The forms in which this template takes turns with calls, found by rendering one in each."""
        asked = [{"role": "user", "content": "Hi?"}]
        variables = [
            self._named(asked, True, PROBE_TOOLS),
            *(self._named([*asked, probe(form)], False, PROBE_TOOLS) for form in FORMS),
        ]
        before, *rendered = self._rendered_all(variables)
        if isinstance(before, Refused):
            before = ""
        own = {
            form: None if isinstance(text, Refused) else text[len(os.path.commonprefix([before, text])) :]
            for form, text in zip(FORMS, rendered)
        }
        return CallForms.of(own)

    def _rendered_all(self, variables: Sequence[Mapping[str, Any]]) -> list[str | Refused]:
        if self._is_ours:
            return [_built_in(self.source).render(each) for each in variables]
        return render_all(self.source, variables)

    def continuation(self, messages: Sequence[Message], replies: Sequence[Message], tools: str = "") -> str:
        """Text between the end of the last turn, which is the assistant's, and the turn that it writes next: whatever
        closes that turn, and the replies.

        Args:
            messages: with `PLACEHOLDER` for what the assistant has written in each of its turns.
            replies: what comes behind them.
            tools: as in `Conversation`.

        Raises:
            UserError: the template renders earlier turns differently when others follow, as those do which leave out
                what a model thought: then it would go on from another text than the one it has written.
        """
        assert messages[-1] == Message("assistant", PLACEHOLDER), messages[-1]
        before = self.render(messages[:-1], add_generation_prompt=True, tools=tools) + PLACEHOLDER
        after = self.render([*messages, *replies], add_generation_prompt=True, tools=tools)
        if not after.startswith(before):
            roles = ", ".join(message.role for message in replies)
            fit = ", ".join(name for name in BUILTIN if name != self._name)
            raise UserError(
                f"chat template of {self._name} renders the assistant's turns differently once others follow "
                f"({roles}); it may leave out what a model thought before. An episode of several turns goes on from "
                f"the tokens that the model has written: choose another data.chat_template ({fit}), give the "
                "tokenizer a template that keeps what it has rendered, or let the environment answer with the role "
                '"tool", if that is kept'
            )
        return after[len(before) :]

    def split(self, conversation: Conversation) -> tuple[str, str]:
        """Text before the last turn, which is an answer, and that text with the answer and whatever closes its turn.

        The conversation is rendered as a whole and cut where the prompt ends, so that training is on the text that
        the model has to produce after the prompt.

        Raises:
            UserError: the template renders the prompt differently when an answer follows, or leaves out a part of the
                answer, a tool or a call.
        """
        messages, tools = conversation.messages, conversation.tools
        before = self.render(messages[:-1], add_generation_prompt=True, tools=tools)
        whole = self.render(messages, tools=tools)
        if not whole.startswith(before):
            raise UserError(
                f"chat template of {self._name} renders a prompt differently when an answer follows, so the answer "
                f"cannot be separated from it; choose another data.chat_template ({', '.join(BUILTIN)})"
            )
        self._check_whole(whole, messages, tools)
        self._check_turn(messages[-1], before, whole[len(before) :], "the answer")
        return before, whole

    def supervised_turns(self, conversation: Conversation) -> list[tuple[str, str]]:
        """For each supervised turn: the text before it, and that text with the turn and whatever closes it.

        Each pair is rendered as if the conversation ended there, and has to be a prefix of the whole one, so that
        training is on what the model will be shown and will have to produce. A template with `{% generation %}` says
        itself what of a turn is supervised: each such block of the whole conversation is a pair, as in the mask of
        transformers' `return_assistant_tokens_mask`, and a turn without one is none.

        Raises:
            UserError: the template renders a turn differently when others follow, or leaves out a part of a turn or a
                tool.
        """
        messages, tools = conversation.messages, conversation.tools
        whole = self._marked(messages, tools=tools)
        self._check_whole(whole.text, messages, tools)
        indices = [i for i in range(len(messages)) if conversation.supervised[i]]
        if not self._has_marks:
            return [self._supervised(messages[: i + 1], tools, whole.text) for i in indices]
        turns = [pair for i in indices for pair in self._blocks(messages, i, tools, whole)]
        if indices and not turns:
            raise self._unfit("has {% generation %} around no turn of it")
        return turns

    def left_out(self, text: str, messages: Sequence[Message], tools: str) -> str | None:
        """A tool or a call that a rendered conversation lacks, or thoughts of a turn that this template does not read;
        None where it has all. Which turns keep their thoughts is the choice of a template that reads them."""
        for name in (tool["function"]["name"] for tool in json.loads(tools or "[]")):
            if name not in text:
                return f"the tool {name!r}"
        for i, message in enumerate(messages):
            for call in message.tool_calls:
                if call.name not in text:
                    return f"the call of the tool {call.name!r}"
            if message.reasoning.strip() and not has_said(text, message.reasoning):
                keys = [key for key in message.as_turn() if key in REASONING]
                read = self._keys_of_thoughts
                if not any(key in read for key in keys):
                    hint = f"; it reads {read[0]!r}" if read else ""
                    return f"the thoughts of messages[{i}] ({keys[0]!r}{hint})"
        return None

    @functools.cached_property
    def _keys_of_thoughts(self) -> list[str]:
        """The keys with thoughts that this template names: whole words, as many say `enable_thinking`."""
        return [key for key in REASONING if re.search(rf"\b{key}\b", self.source)]

    def _check_whole(self, text: str, messages: Sequence[Message], tools: str) -> None:
        what = self.left_out(text, messages, tools)
        if what is not None:
            raise self._unfit(f"leaves out {what}", _WITH_TOOLS if "tool" in what else ())

    def _supervised(self, messages: Sequence[Message], tools: str, whole: str) -> tuple[str, str]:
        """The pair of the last turn, in a conversation that is rendered as `whole`."""
        *earlier, message = messages
        where = f"messages[{len(earlier)}]"
        before = self.render(earlier, add_generation_prompt=True, tools=tools)
        after = self.render(messages, tools=tools)
        if not after.startswith(before):
            raise self._unfit(f"renders what is before {where} differently once it follows")
        if not whole.startswith(after):
            raise self._unfit(f"renders {where} differently once other turns follow")
        turn = after[len(before) :]
        self._check_turn(message, before, turn, where)
        if after != whole and turn.strip() == message.content.strip():
            raise self._unfit(f"does not mark the end of {where}, so no model could learn where to end it")
        return before, after

    def _blocks(self, messages: Sequence[Message], i: int, tools: str, whole: Marked) -> list[tuple[str, str]]:
        """The pairs of the marked blocks of turn i. What is marked does not depend on the prompt of generation, which
        may be another one than what is before the block."""
        begin, end = (
            len(os.path.commonprefix([self.render(messages[:n], tools=tools), whole.text])) for n in (i, i + 1)
        )
        self._check_turn(messages[i], "", whole.text[begin:end], f"messages[{i}]")
        return [(whole.text[:a], whole.text[:b]) for a, b in whole.blocks if begin <= a < end]

    def _check_turn(self, message: Message, before: str, text: str, where: str) -> None:
        """Raises UserError unless a turn, rendered as `text` behind `before`, has all that it says."""
        has_calls = all(call.name in text for call in message.tool_calls)
        if not has_calls or not says(message.content, before, text):
            raise self._unfit(f"leaves out a part of what {where} says")
        if message.reasoning.strip() and not says(message.reasoning, before, text):
            raise self._unfit(f"leaves out what the model thought in {where}", ())

    def _unfit(self, what: str, others: Sequence[str] = tuple(BUILTIN)) -> UserError:
        fit = ", ".join(name for name in others if name != self._name)
        return UserError(
            f"chat template of {self._name} {what}, so it cannot be used to train on this conversation; "
            + (f"choose another data.chat_template ({fit})" if fit else "give the tokenizer another chat template")
        )


@functools.cache
def _built_in(source: str) -> jinja2.Template:
    return environment().from_string(source)


def load_template(choice: str, tokenizer_dir: Path, special_tokens: dict[str, str]) -> ChatTemplate:
    """The template a recipe asks for: "tokenizer", or the name of a built-in one."""
    if choice in BUILTIN:
        return ChatTemplate(BUILTIN[choice], special_tokens, choice)
    if choice != "tokenizer":  # of a command line; recipes have checked it
        raise UserError(
            f"chat template {choice!r}: is none of tokenizer, {', '.join(BUILTIN)}; one of your own is a file "
            f"chat_template.jinja in {tokenizer_dir}"
        )
    source = tokenizer_template(tokenizer_dir)
    if source is None:
        raise UserError(
            f"{tokenizer_dir}: has no chat template; set data.chat_template to one of: {', '.join(BUILTIN)}; in "
            "`generate`, `serve` and `eval` it is --chat_template"
        )
    return ChatTemplate(source, special_tokens, str(tokenizer_dir))


def tokenizer_template(directory: Path) -> str | None:
    """chat_template.jinja, else the entry of tokenizer_config.json (which may be a list of named ones)."""
    separate = directory / "chat_template.jinja"
    if is_file(separate):
        try:
            return read_regular(separate, _MOST_SOURCE).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{separate}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    path = directory / "tokenizer_config.json"
    if not is_file(path):
        return None
    found = read_json_object(path).get("chat_template")
    return _of_names(found) if isinstance(found, list) else found if isinstance(found, str) else None


def _of_names(entries: Sequence[Any]) -> str | None:
    """The one template that several named ones make. As in transformers, "tool_use" is for conversations with tools,
    and "default" for all others."""
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    default, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        return None
    if not isinstance(with_tools, str):
        return default
    # the plus signs keep white space beside the tags, of which each template has its own; Jinja drops a last line end
    with_tools, default = (source.removesuffix("\n") for source in (with_tools, default))
    return f"{{% if tools +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif %}}"
