"""Chat templates: render a conversation as the text that a model is trained to read.

Templates are Jinja programs that come with a tokenizer, so they are not trusted: they run in a sandbox without access
to attributes of Python, cannot change their arguments, and are rendered by a separate process with a budget, see
`llmsuite.data.rendering`. The built-in ones are rendered in this process.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.resources import find
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.chat_templates import (
    NAMES,
    OF_TOKENIZER,
    is_template_file,
    is_template_text,
    template_fault,
)
from llmsuite.contract.schema.columns import kwargs_fault
from llmsuite.data.call_forms import FORMS, PROBE_TOOLS, CallForms, probe
from llmsuite.data.jinja import Marked, TurnTexts, compiled, has_mark, template_facts, turn_texts, unmark
from llmsuite.data.keys import unknown_keys
from llmsuite.data.named_templates import check_tokens, named_template, read_template
from llmsuite.data.rendering import RenderError, read_facts, render, render_all
from llmsuite.data.row_limits import MAX_RENDERED_CHARS, MAX_RENDERED_TURNS, MAX_UNKNOWN_KEYS
from llmsuite.data.rows import REASONING, Conversation, Message, Prompt, strings_in
from llmsuite.data.thoughts import (
    THINK_BLOCK,
    THOUGHT_END,
    RenderedText,
    contains,
    earlier_turn_length,
    shared_prompt,
    thought_place,
    thought_span,
    thoughts_of,
    without_thoughts,
)
from llmsuite.data.turns import DEVELOPER

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
"""Content of the model's turn where only the text around it is used. It has the part that some templates drop from
earlier turns."""
OWN = "data.chat_template"
"""Name in messages of a template whose text a recipe has."""
_RenderKey = tuple[tuple[Message, ...], bool, str, str]
"""Turns; True if the generation prompt follows them; tools and variables as in `Conversation`."""
_Texts = Mapping[_RenderKey, str | RenderError]
_WITH_TOOLS = tuple(name for name, source in BUILTIN.items() if "tools" in source)
_MAX_OPENED_CHARS = 64
"""Characters of a turn that a generation prompt may already have written, such as `<think>`."""
_NEXT_TURN = re.compile(r"<\|[^<>|]+\|>")
"""A token such as `<|user|>`, with which a turn begins. It ends the one before it where templates write no other end,
as those of GLM-4 do."""


@dataclasses.dataclass(frozen=True)
class _Beginnings:
    """The texts of the first turns of a conversation, for any number of turns."""

    template: ChatTemplate
    conversation: Conversation
    cut: Mapping[bool, TurnTexts]
    """The full conversation, cut into its turns, with and without the generation prompt; empty where the template has
    to render each beginning."""
    num_first: int
    """Number of turns up to which beginnings are rendered anyway."""
    has_marks: bool
    """True if the template marks `{% generation %}` blocks."""

    def first(self, count: int, add_generation_prompt: bool = False) -> str:
        """Return the text of the first `count` turns, without marks of blocks. Raises UserError when the template
        refuses them."""
        if count >= self.num_first and add_generation_prompt in self.cut:
            text = self.cut[add_generation_prompt].first(count)
            return unmark(text).text if self.has_marks else text
        conversation = self.conversation
        return self.template.render(
            conversation.messages[:count], add_generation_prompt, conversation.tools, conversation.template_kwargs
        )


class ChatTemplate:
    """A compiled template with the special tokens it may use."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        ignores_unknown: bool = False,
    ):
        """
        Args:
            source: the template.
            special_tokens: the tokenizer's, by their roles.
            name: of the template, for messages.
            kwargs: `data.chat_template_kwargs`: variables for every conversation that does not set them itself.
            ignores_unknown: True to leave out keys of turns that are unknown and that the template does not read;
                else they are refused.

        Raises:
            UserError: the template is not valid Jinja, takes too much time or memory to compile, or does not read a
                variable of `kwargs`.
        """
        self.source = source
        self._kwargs = dict(kwargs or {})
        self._ignores_unknown = ignores_unknown
        self._generically_read: set[tuple[bool, str]] = set()
        """Unknown keys that the template reads without naming them, such as one that writes turns as JSON; each with
        True for one of a call, and False for one of a turn."""
        self._tokens = special_tokens
        self._name = name
        self._has_marks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._is_builtin = source in BUILTIN.values()
        self._prerendered: _Texts = {}
        """Results of `prerender_turns` and the like."""
        self._prerendered_cut: _Texts = {}
        """Results with marks between turns."""
        try:
            facts = template_facts(source) if self._is_builtin else read_facts(source)
        except RenderError as error:
            raise UserError(f"chat template of {name}: {error}") from error
        self._variables_read = frozenset(facts.variables)
        self._num_first = facts.num_first
        self._check_kwargs(self._kwargs)

    @property
    def has_marks(self) -> bool:
        """True for a template with `{% generation %}`, which decides what is supervised."""
        return self._has_marks

    @property
    def name(self) -> str:
        """Name of the template in messages."""
        return self._name

    def prerender_turns(self, conversations: Iterable[Conversation]) -> ChatTemplate:
        """Return a copy that has rendered, in one batch, all that `supervised_turns` needs for these conversations."""
        keys: list[_RenderKey] = []
        cut_keys: list[_RenderKey] = []
        for conversation in conversations:
            messages = conversation.messages
            tools = conversation.tools
            kwargs = conversation.template_kwargs
            keys.append((messages, False, tools, kwargs))
            cut_keys += [(messages, flag, tools, kwargs) for flag in self._flags if self._num_first is not None]
            if self._num_first is not None or _turns_to_render(conversation) > MAX_RENDERED_TURNS:
                continue
            for i in range(len(messages)):
                if conversation.supervised[i]:
                    keys += [
                        (messages[:i], not self._has_marks, tools, kwargs),
                        (messages[: i + 1], False, tools, kwargs),
                    ]
        return self._prerender(keys, cut_keys)

    @property
    def _flags(self) -> tuple[bool, ...]:
        """Values of `add_generation_prompt` with which beginnings of a conversation are rendered."""
        return (False,) if self._has_marks else (False, True)

    def prerender_splits(self, answered: Iterable[Conversation]) -> ChatTemplate:
        """Return a copy that has rendered, in one batch, all that `split` needs for these conversations."""
        keys: list[_RenderKey] = []
        for conversation in answered:
            messages = conversation.messages
            tools = conversation.tools
            kwargs = conversation.template_kwargs
            keys += [(messages[:-1], True, tools, kwargs), (messages, False, tools, kwargs)]
        return self._prerender(keys)

    def prerender_prompts(self, prompts: Iterable[Prompt]) -> ChatTemplate:
        """Return a copy that has rendered, in one batch, all that `prompt` needs for these rows."""
        return self._prerender((row.messages, True, row.tools, row.template_kwargs) for row in prompts)

    def _prerender(self, keys: Iterable[_RenderKey], cut_keys: Iterable[_RenderKey] = ()) -> ChatTemplate:
        if self._is_builtin:
            return self
        prerendered = copy.copy(self)
        prerendered._prerendered = self._texts(keys)
        prerendered._prerendered_cut = self._texts(cut_keys, marks_turns=True)
        return prerendered

    def _texts(self, keys: Iterable[_RenderKey], marks_turns: bool = False) -> _Texts:
        unique = list(dict.fromkeys(keys))
        return dict(zip(unique, render_all(self.source, [self._variables(*key) for key in unique], marks_turns)))

    def _beginnings(self, conversation: Conversation) -> _Beginnings:
        """Return the texts of the first turns of a conversation.

        Raises:
            UserError: each has to be rendered, and these are too many.
        """
        cut = {}
        if self._num_first is not None:
            found = {flag: self._cut(conversation, flag) for flag in self._flags}
            cut = {flag: texts for flag, texts in found.items() if texts is not None}
        count = _turns_to_render(conversation)
        if len(cut) < len(self._flags) and count > MAX_RENDERED_TURNS:
            raise UserError(
                f"chat template of {self._name} may render a turn differently once others follow, so a conversation "
                f"is rendered up to each supervised turn: for this one, of {len(conversation.messages):,} turns with "
                f"{sum(conversation.supervised):,} supervised, that is {count:,} turns; at most "
                f"{MAX_RENDERED_TURNS:,} are rendered for a row: split it into several rows"
            )
        return _Beginnings(self, conversation, cut, self._num_first or 0, self._has_marks)

    def _cut(self, conversation: Conversation, add_generation_prompt: bool) -> TurnTexts | None:
        """Return a rendered conversation, cut into its turns; None where that is not possible."""
        key = (conversation.messages, add_generation_prompt, conversation.tools, conversation.template_kwargs)
        text = self._prerendered_cut.get(key)
        if text is None and self._is_builtin:
            text = _built_in(self.source, marks_turns=True).render(self._variables(*key))
        elif text is None:
            (text,) = render_all(self.source, [self._variables(*key)], marks_turns=True)
        if isinstance(text, RenderError):
            return None
        return turn_texts(text, len(conversation.messages))

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: str = "", kwargs: str = ""
    ) -> str:
        """Render a conversation; `tools` and `kwargs` as in `Conversation`. Raises UserError when the template refuses
        it."""
        return self._marked(messages, add_generation_prompt, tools, kwargs).text

    def prompt(self, messages: Sequence[Message], tools: str = "", kwargs: str = "") -> str:
        """Render a conversation and the beginning of its answer.

        Raises:
            UserError: the template refuses it, or leaves out a tool, a call, a key of a turn, or the model's thoughts.
        """
        text = self.render(messages, add_generation_prompt=True, tools=tools, kwargs=kwargs)
        self._check_complete(text, messages, tools, kwargs)
        return text

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise UserError for a variable that is not set by hand, or that the template does not read: it would change
        nothing."""
        if (fault := kwargs_fault(kwargs)) is not None:
            raise UserError(f"chat_template_kwargs.{fault[0]}: {fault[1]}")
        for name in kwargs:
            if name not in self._variables_read:
                raise UserError(
                    f"chat template of {self._name} has no variable {name!r}, which chat_template_kwargs sets; leave "
                    "it out, or choose a template that reads it"
                )

    def _marked(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: str = "", kwargs: str = ""
    ) -> Marked:
        if kwargs:
            self._check_kwargs(json.loads(kwargs))
        try:
            rendered = self._rendered((tuple(messages), add_generation_prompt, tools, kwargs))
        except RenderError as error:
            roles = ", ".join(m.role for m in messages)
            raise UserError(f"chat template of {self._name} refuses the turns ({roles}): {error}") from error
        if not self._has_marks:
            return Marked(rendered, [])
        if any(has_mark(text) for message in messages for text in strings_in(message.as_turn())):
            raise UserError(
                f"chat template of {self._name} has {{% generation %}}, and a turn has a character that is reserved to "
                "mark such blocks"
            )
        return unmark(rendered)

    def _rendered(self, key: _RenderKey) -> str:
        """Return the rendered text. Raises RenderError."""
        if self._is_builtin:
            return _built_in(self.source).render(self._variables(*key))
        text = self._prerendered.get(key)
        if isinstance(text, RenderError):
            raise text
        if text is None:
            return render(self.source, self._variables(*key))
        return text

    def _variables(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: str, kwargs: str
    ) -> dict[str, Any]:
        return self._named([self.turn(message) for message in messages], add_generation_prompt, tools, kwargs)

    def _named(
        self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: str, kwargs: str = ""
    ) -> dict[str, Any]:
        """Variables of a template, the same as in transformers."""
        return {
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
            "tools": json.loads(tools) if tools else None,
            "documents": None,
            **self._tokens,
            **self._kwargs,
            **(json.loads(kwargs) if kwargs else {}),
        }

    def kwargs_of(self, conversation: Conversation) -> dict[str, Any]:
        """Return the variables that are set for a conversation: those of its row, and the template's others."""
        return {**self._kwargs, **json.loads(conversation.template_kwargs or "{}")}

    def turn(self, message: Message) -> dict[str, Any]:
        """Return a turn in the form that this template accepts."""
        turn = message.as_turn()
        if turn["role"] == DEVELOPER and DEVELOPER not in self.source:
            turn["role"] = message.role
        if message.reasoning and self._keys_of_thoughts and not any(turn.get(key) for key in self._keys_of_thoughts):
            turn = {key: value for key, value in turn.items() if key not in REASONING}
            turn[self._keys_of_thoughts[0]] = message.reasoning
        return self._call_forms.fit(turn) if message.tool_calls else turn

    @functools.cached_property
    def _call_forms(self) -> CallForms:
        """Forms of turns with calls that this template accepts, found by rendering a probe in each form."""
        user_turn = [{"role": "user", "content": "Hi?"}]
        variables = [
            self._named(user_turn, True, PROBE_TOOLS),
            *(self._named([*user_turn, probe(form)], False, PROBE_TOOLS) for form in FORMS),
        ]
        before, *rendered = self._rendered_all(variables)
        if isinstance(before, RenderError):
            before = ""
        own: dict[tuple[str, bool], str | None] = {}
        for form, text in zip(FORMS, rendered):
            if isinstance(text, RenderError):
                own[form] = None
            else:
                own[form] = text[len(os.path.commonprefix([before, text])) :]
        return CallForms.of(own)

    def _rendered_all(self, variables: Sequence[Mapping[str, Any]]) -> list[str | RenderError]:
        if self._is_builtin:
            return [_built_in(self.source).render(each) for each in variables]
        return render_all(self.source, variables)

    def continuation(
        self, messages: Sequence[Message], replies: Sequence[Message], tools: str = "", kwargs: str = ""
    ) -> str:
        """Return the text between the end of the last turn, which is the assistant's, and its next turn.

        This is the text that closes the last turn, the replies, and the generation prompt.

        Args:
            messages: with `PLACEHOLDER` as the content of each turn of the assistant.
            replies: the turns that follow them.
            tools: as in `Conversation`.
            kwargs: variables of the template, as in `Conversation`.

        Raises:
            UserError: the template renders earlier turns differently when others follow, such as one that drops
                earlier thoughts of the model: the model would continue from a text that it has not written.
        """
        assert messages[-1] == Message("assistant", PLACEHOLDER), messages[-1]
        before = self.render(messages[:-1], add_generation_prompt=True, tools=tools, kwargs=kwargs) + PLACEHOLDER
        after = self.render([*messages, *replies], add_generation_prompt=True, tools=tools, kwargs=kwargs)
        if not after.startswith(before):
            roles = ", ".join(message.role for message in replies)
            fit = ", ".join(name for name in BUILTIN if name != self._name)
            raise UserError(
                f"chat template of {self._name} renders the assistant's turns differently once others follow "
                f"({roles}); it may leave out the earlier thoughts of the model. An episode of several turns continues "
                f"from the tokens that the model has written: choose another data.chat_template ({fit}), give the "
                "tokenizer a template that keeps earlier turns unchanged, or let the environment answer with the role "
                '"tool", if the template keeps the turns before that'
            )
        return after[len(before) :]

    def split(self, conversation: Conversation) -> tuple[str, str]:
        """Return the text before the last turn, and that text with the answer and the end of its turn.

        The full conversation is rendered and cut where the prompt ends, so that training is on the text that the model
        has to produce after the prompt. The prompt is cut before thoughts that it opens and the answer does not have.

        Raises:
            UserError: the template renders the prompt differently when an answer follows, or leaves out a part of the
                answer, a tool or a call.
        """
        messages = conversation.messages
        tools = conversation.tools
        kwargs = conversation.template_kwargs
        prompt = self.render(messages[:-1], add_generation_prompt=True, tools=tools, kwargs=kwargs)
        full = self.render(messages, tools=tools, kwargs=kwargs)
        before = shared_prompt(prompt, full)
        if before is None:
            raise UserError(
                f"chat template of {self._name} renders a prompt differently when an answer follows, so the answer "
                f"cannot be separated from it; choose another data.chat_template ({', '.join(BUILTIN)})"
            )
        self._check_complete(full, messages, tools, kwargs)
        self._check_turn(messages[-1], before, full[len(before) :], "the answer")
        return before, full

    def splits(self, conversations: Sequence[Conversation]) -> list[tuple[str, str]]:
        """Return `split` of conversations that differ in their last turn only, with the same text before it.

        Of a prompt that opens thoughts, answers with thoughts and answers without have different parts.
        """
        found = [self.split(conversation) for conversation in conversations]
        shared = min((before for before, _ in found), key=len)
        return [(shared, full) for _, full in found]

    def supervised_turns(self, conversation: Conversation) -> list[tuple[str, str]]:
        """Return, for each supervised turn, the text before it, and that text with the turn and its end.

        Each pair is rendered as if the conversation ended there, and has to be a prefix of the full conversation, so
        that training is on the text that the model will see and will have to produce. Only the thoughts of a turn may
        be left out once others follow: which turns keep them is the template's choice. A template with
        `{% generation %}` decides itself which part of a turn is supervised: each such block of the full conversation
        is a pair, as in the mask of transformers' `return_assistant_tokens_mask`, and a turn without one has none.

        Raises:
            UserError: the template renders a turn differently when others follow, in more than its thoughts, or leaves
                out a part of a turn or a tool.
        """
        messages = conversation.messages
        tools = conversation.tools
        kwargs = conversation.template_kwargs
        full = self._marked(messages, tools=tools, kwargs=kwargs)
        self._check_complete(full.text, messages, tools, kwargs)
        indices = [i for i in range(len(messages)) if conversation.supervised[i]]
        if len(full.text) * len(indices) > MAX_RENDERED_CHARS:
            raise UserError(
                f"chat template of {self._name} renders {len(full.text):,} characters for a conversation with "
                f"{len(indices):,} supervised turns; at most {MAX_RENDERED_CHARS:,} characters are rendered for a row, "
                "as each supervised turn has all text before it: split it into several rows"
            )
        beginnings = self._beginnings(conversation)
        if not self._has_marks:
            return [self._supervised(beginnings, i, full.text) for i in indices]
        turns = [pair for i in indices for pair in self._blocks(beginnings, i, full)]
        if indices and not turns:
            raise self._unfit("has {% generation %} around no turn of it")
        return turns

    def numbers_of(self, conversation: Conversation, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Return, for each pair of `supervised_turns`, the number of its message, from 0."""
        indices = [i for i in range(len(conversation.messages)) if conversation.supervised[i]]
        if not self._has_marks:
            return indices
        full = self._marked(conversation.messages, tools=conversation.tools, kwargs=conversation.template_kwargs)
        beginnings = self._beginnings(conversation)
        ends = {i: _shared_length(beginnings.first(i + 1), full.text) for i in indices}
        return [_first_beyond(ends, len(before)) for before, _ in turns]

    def thought_texts(
        self, conversation: Conversation, turns: Sequence[tuple[str, str]]
    ) -> list[tuple[str, str] | None]:
        """Return, for each pair of `supervised_turns`, the text up to the thoughts in it and the text up to their end.

        None for a pair without thoughts. Raises UserError when the template changes the white space in thoughts.
        """
        found: list[tuple[str, str] | None] = []
        for i, (before, after) in zip(self.numbers_of(conversation, turns), turns):
            message = conversation.messages[i]
            turn = after[len(before) :]
            span = thought_span(message, turn)
            thoughts = thoughts_of(message)
            if span is None and thoughts and contains(turn[thought_place(message, turn)], thoughts):
                raise self._unfit(f"changes the white space in the thoughts of messages[{i}]", ())
            found.append(None if span is None else (before + turn[: span[0]], before + turn[: span[1]]))
        return found

    def missing_part(
        self, text: str, messages: Sequence[Message], tools: str, may_drop_thoughts: bool = False
    ) -> str | None:
        """Return the name of a part that a rendered conversation lacks; None where it has all.

        The part is a tool, a call, or thoughts of a turn where this template reads none. A template that reads thoughts
        may drop those of some turns.

        Args:
            text: the conversation.
            messages: its turns.
            tools: as JSON; "" for none.
            may_drop_thoughts: a template that reads none may drop them, if it knows thoughts: DeepSeek's cut them from
                the content of earlier turns, so that a model never sees them again.
        """
        for name in (tool["function"]["name"] for tool in json.loads(tools or "[]")):
            if name not in text:
                return f"the tool {name!r}"
        rendered = RenderedText(text)
        for i, message in enumerate(messages):
            for call in message.tool_calls:
                if call.name not in text:
                    return f"the call of the tool {call.name!r}"
            if may_drop_thoughts and THOUGHT_END in self.source:
                continue
            if message.reasoning.strip() and not rendered.contains(message.reasoning):
                keys = [key for key in message.as_turn() if key in REASONING]
                if not self._keys_of_thoughts:
                    return f"the thoughts of messages[{i}] ({keys[0]!r})"
        return None

    @functools.cached_property
    def _keys_of_thoughts(self) -> list[str]:
        """Keys of thoughts that this template reads, matched as full words: many templates name `enable_thinking`."""
        return [key for key in REASONING if self._names(key)]

    def dropped_thoughts(self, conversation: Conversation) -> list[int]:
        """Return the turns whose thoughts the template leaves out, as it may those of earlier turns."""
        messages = conversation.messages
        if not any(map(thoughts_of, messages)):
            return []
        rendered = RenderedText(self.render(messages, tools=conversation.tools, kwargs=conversation.template_kwargs))
        found = []
        for i, message in enumerate(messages):
            thoughts = thoughts_of(message) if message.role == "assistant" else ""
            if thoughts and not rendered.contains(thoughts):
                found.append(i)
        return found

    def unread_key(self, messages: Sequence[Message], tools: str = "", kwargs: str = "") -> str | None:
        """Return the first key of a turn or a call that is unknown and that this template does not read; None without
        one.

        A template may read a key without naming it, such as one that writes turns as JSON: its text then changes when
        the key is left out.
        """
        if self._ignores_unknown:
            return None
        num_unknown = 0
        for i, message in enumerate(messages):
            if not message.raw:
                continue
            for place, key, turn in unknown_keys(message.as_turn()):
                if (bool(place), key) in self._generically_read or self._names(key):
                    continue
                num_unknown += 1
                if num_unknown > MAX_UNKNOWN_KEYS:
                    raise UserError(
                        f"the turns have more than {MAX_UNKNOWN_KEYS} unknown keys, such as {key!r} of messages[{i}]: "
                        'remove them from the rows, or list them in data.ignore_columns ("*" stands for all such keys)'
                    )
                without = dataclasses.replace(message, raw=json.dumps(turn, ensure_ascii=False))
                others = [*messages[:i], without, *messages[i + 1 :]]
                if self.render(messages, tools=tools, kwargs=kwargs) == self.render(others, tools=tools, kwargs=kwargs):
                    return f"{key!r} of messages[{i}]{place}"
                self._generically_read.add((bool(place), key))
        return None

    def _names(self, key: str) -> bool:
        """Return True if the template names a key of a turn, as `turn.key` or `turn["key"]`."""
        return re.search(rf"""(?:\.|['"]){re.escape(key)}\b""", self.source) is not None

    def _check_complete(self, text: str, messages: Sequence[Message], tools: str, kwargs: str) -> None:
        what = self.missing_part(text, messages, tools)
        if what is not None:
            raise self._unfit(f"leaves out {what}", _WITH_TOOLS if "tool" in what else ())
        key = self.unread_key(messages, tools, kwargs)
        if key is not None:
            raise UserError(
                f"chat template of {self._name} does not read the key {key}, which is no key that is known: remove it "
                'from the rows, or list it in data.ignore_columns ("*" stands for all such keys)'
            )

    def _supervised(self, beginnings: _Beginnings, i: int, full: str) -> tuple[str, str]:
        """Return the pair of turn i of a conversation that is rendered as `full`.

        Of earlier turns a template may leave out the thoughts, and what the generation prompt writes to open them: the
        turn is then supervised as it is in the full conversation.
        """
        conversation = beginnings.conversation
        message = conversation.messages[i]
        where = f"messages[{i}]"
        before = beginnings.first(i, add_generation_prompt=True)
        after = beginnings.first(i + 1)
        own_before = shared_prompt(before, after)
        full_before = shared_prompt(before, full)
        if own_before is None:
            raise self._unfit(f"renders what is before {where} differently once it follows")
        turn = after[len(own_before) :]
        self._check_turn(message, own_before, turn, where)
        if full_before is None:
            # the thoughts of turns between the last question and this one, such as before a call, are kept only until
            # the next question
            reduced = dataclasses.replace(conversation, messages=_forgetting(conversation.messages, i))
            shorter = _Beginnings(self, reduced, {}, 0, self._has_marks)
            before = shorter.first(i, add_generation_prompt=True)
            after = shorter.first(i + 1)
            own_before = shared_prompt(before, after)
            full_before = shared_prompt(before, full)
            if own_before is None or full_before is None:
                raise self._unfit(
                    f"renders what is before {where} differently once other turns follow, by more than the thoughts of "
                    "the turns before it"
                )
            turn = after[len(own_before) :]
        if full.startswith(after):
            is_bare = after != full and turn.strip() == message.content.strip()
            if is_bare and not _NEXT_TURN.match(full, len(after)):
                raise self._unfit(f"does not mark the end of {where}, so no model could learn where to end it")
            return own_before, after
        length = earlier_turn_length(message, turn, full[len(full_before) :])
        if length is None:
            raise self._unfit(f"renders {where} differently once other turns follow")
        return full_before, full[: len(full_before) + length]

    def _blocks(self, beginnings: _Beginnings, i: int, full: Marked) -> list[tuple[str, str]]:
        """Return the pairs of the marked blocks of turn i.

        The marks do not depend on the generation prompt, which may differ from the text before the block.
        """
        messages = beginnings.conversation.messages
        begin = _shared_length(beginnings.first(i), full.text)
        end = _shared_length(beginnings.first(i + 1), full.text)
        self._check_turn(messages[i], "", full.text[begin:end], f"messages[{i}]")
        return [(full.text[:a], full.text[:b]) for a, b in full.blocks if begin <= a < end]

    def _check_turn(self, message: Message, before: str, text: str, where: str) -> None:
        """Raise UserError unless a turn, rendered as `text` after `before`, has all of its content."""
        has_calls = all(call.name in text for call in message.tool_calls)
        if not has_calls or not _is_rendered(message.content, before, text):
            raise self._unfit(f"leaves out a part of the content of {where}")
        if message.reasoning.strip() and not _is_rendered(message.reasoning, before, text):
            raise self._unfit(f"leaves out the model's thoughts in {where}", ())

    def _unfit(self, what: str, others: Sequence[str] = tuple(BUILTIN)) -> UserError:
        fit = ", ".join(name for name in others if name != self._name)
        advice = "give the tokenizer another chat template"
        if fit:
            advice = f"choose another data.chat_template ({fit})"
        return UserError(
            f"chat template of {self._name} {what}, so it cannot be used to train on this conversation; {advice}"
        )


def _forgetting(messages: Sequence[Message], i: int) -> tuple[Message, ...]:
    """Return the turns without the thoughts of those before turn i."""
    earlier = [without_thoughts(message) if message.role == "assistant" else message for message in messages[:i]]
    return (*earlier, *messages[i:])


def _turns_to_render(conversation: Conversation) -> int:
    """Return the number of turns that are rendered if the conversation is, up to and before each supervised turn."""
    return sum(2 * i + 1 for i, is_supervised in enumerate(conversation.supervised) if is_supervised)


def _shared_length(beginning: str, text: str) -> int:
    """Return the length of the common prefix of two texts, of which one is most likely a beginning of the other."""
    if text.startswith(beginning):
        return len(beginning)
    return len(os.path.commonprefix([beginning, text]))


def _first_beyond(ends: Mapping[int, int], position: int) -> int:
    """Return the first turn that ends after a position."""
    return next(i for i, end in ends.items() if end > position)


def _is_rendered(content: str, before: str, text: str) -> bool:
    """Return True if a turn that is rendered as `text` after `before` has all of a content.

    The generation prompt may have written its beginning already, such as `<think>`; and a template that knows thoughts
    may write them in its own form.
    """
    if contains(text, content):
        return True
    squeezed = "".join(content.split())
    turn = "".join(text.split())
    opened = "".join(before[-4 * _MAX_OPENED_CHARS :].split())
    for length in range(1, min(len(squeezed), _MAX_OPENED_CHARS) + 1):
        if opened.endswith(squeezed[:length]) and turn.startswith(squeezed[length:]):
            return True
    parts = THINK_BLOCK.fullmatch(content)
    return parts is not None and all(contains(text, part) for part in parts.groups())


@functools.cache
def _built_in(source: str, marks_turns: bool = False) -> jinja2.Template:
    return compiled(source, marks_turns)


def load_template(
    choice: str,
    tokenizer_dir: Path,
    special_tokens: dict[str, str],
    kwargs: Mapping[str, Any] | None = None,
    ignores_unknown: bool = False,
) -> ChatTemplate:
    """Return the template that a recipe selects.

    Args:
        choice: a value of `data.chat_template`: "tokenizer", the name of a template that comes along, the text of one,
            or the path of a file with one.
        tokenizer_dir: directory of the tokenizer.
        special_tokens: as of `ChatTemplate`.
        kwargs: as of `ChatTemplate`.
        ignores_unknown: as of `ChatTemplate`.

    Raises:
        UserError: there is no such template, or it cannot be used.
    """
    chosen = chosen_template(choice)
    if chosen is not None:
        if named_template(choice) is not None:
            check_tokens(choice, tokenizer_dir)
        name = OWN if is_template_text(choice) else choice
        return ChatTemplate(chosen, special_tokens, name, kwargs, ignores_unknown)
    source = tokenizer_template(tokenizer_dir)
    if source is None:
        raise UserError(
            f"{tokenizer_dir}: has no chat template; set data.chat_template to one of: {', '.join(NAMES)}; in "
            "`generate`, `serve` and `eval` it is --chat_template"
        )
    return ChatTemplate(source, special_tokens, str(tokenizer_dir), kwargs, ignores_unknown)


def chosen_template(choice: str) -> str | None:
    """Return the text of a template that a recipe or a command selects in place of the tokenizer's; None for
    "tokenizer".

    Raises:
        UserError: there is no such template, or its file cannot be read.
    """
    if choice == OF_TOKENIZER:
        return None
    if choice in BUILTIN:
        return BUILTIN[choice]
    if is_template_text(choice):
        return choice
    if is_template_file(choice):
        return read_template(find(choice))
    fault = template_fault(choice)
    if fault is not None:
        raise UserError(f"chat template: {fault}")
    return named_template(choice)


def tokenizer_template(directory: Path) -> str | None:
    """Return chat_template.jinja, else the entry of tokenizer_config.json (which may be a list of named ones)."""
    separate = directory / "chat_template.jinja"
    if is_file(separate):
        return read_template(separate)
    path = directory / "tokenizer_config.json"
    if not is_file(path):
        return None
    found = read_json_object(path).get("chat_template")
    if isinstance(found, list):
        return _join_named(found)
    return found if isinstance(found, str) else None


def _join_named(entries: Sequence[Any]) -> str | None:
    """Join named templates into one. As in transformers, "tool_use" is for conversations with tools, and "default" for
    all others."""
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    default = named.get("default")
    with_tools = named.get("tool_use")
    if not isinstance(default, str):
        return None
    if not isinstance(with_tools, str):
        return default
    # the plus signs keep the white space of each template around the tags; Jinja drops a last line end
    with_tools, default = (source.removesuffix("\n") for source in (with_tools, default))
    return f"{{% if tools +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif %}}"
