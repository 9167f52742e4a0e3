"""Prompts from the command line, from files and from a conversation, as token ids."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.data.chat_template import ChatTemplate, load_template
from llmsuite.data.columns import renamed
from llmsuite.data.control import ControlTokens
from llmsuite.data.prompts import answer_columns
from llmsuite.data.read import raw_rows
from llmsuite.data.rows import Message, ToolCall
from llmsuite.data.suggest import advice, corrected, suggested_prompt
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.data.turns import tools_at, turn_at, with_system
from llmsuite.errors import UserError
from llmsuite.inference.calls import CallFormat, call_format
from llmsuite.shown import kind_of_json

NO_TEXT = "has half of a surrogate pair (\\ud800 to \\udfff), which is no text"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    row: dict[str, Any]
    """The row of the file: {"prompt": text} or {"messages": turns}."""
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a row of a file asks."""

    row: dict[str, Any]
    """As in `Prompt`."""
    turns: str | list[Message]
    """A text, or the turns up to the one that is answered."""
    tools: str = ""
    """As in `Conversation`."""


def asked(row: Any) -> Asked:
    """What a row asks. Where its messages end with the assistant's turn, this is no part of the prompt, and the row has
    it as "answer" if it has no other one. Raises UserError saying what is wrong with it."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UserError(f'is {kind_of_json(row)}; a text, {{"prompt": …}} or {{"messages": […]}} is needed')
    try:
        tools = tools_at(row)
        if isinstance(row.get("prompt"), str) and "messages" not in row:
            asks = with_system(row, [Message("user", row["prompt"])])
            return Asked(dict(row), row["prompt"] if len(asks) == 1 else asks, tools)
    except ValueError as error:
        raise UserError(str(error)) from error
    if ("prompt" in row) == ("messages" in row):
        raise UserError('has to have either "prompt", a text or a list of turns, or "messages", a list of turns')
    turns = row["prompt"] if "prompt" in row else row["messages"]  # TRL calls them a prompt
    messages, fields = read_messages(turns), dict(row)
    if messages[-1].role == "assistant":
        answer = messages.pop()
        if "prompt" in row:  # which somebody may mean to be continued
            raise UserError(
                "prompt: ends with the assistant's turn, and no turn is continued; leave it out, or call a "
                'conversation with its answer "messages"'
            )
        if not messages:
            raise UserError("has the assistant's turn alone; a turn that it answers is needed")
        fields = {**fields, **answer_columns(answer), **{key: row[key] for key in row if row[key] is not None}}
    try:
        return Asked(fields, with_system(row, messages), tools)
    except ValueError as error:
        raise UserError(str(error)) from error


def prompt_columns(row: Any, columns: Mapping[str, str]) -> dict[str, str] | None:
    """What `data.columns` may be in place of what it is, for a row that asks nothing; None where that cannot be
    guessed."""
    if not isinstance(row, Mapping):
        return None
    return corrected(columns, row) if columns else suggested_prompt(row, _is_asked)


def _is_asked(row: Mapping[str, Any]) -> bool:
    try:
        return bool(asked(row).turns)
    except UserError:
        return False


def asked_at(where: str, row: Any, fault: str | None, columns: Mapping[str, str] | None) -> Asked:
    """What a row of a file asks, by `data.columns`; the arguments are those of `Prompter.read` and `raw_rows`. Raises
    UserError with its place."""
    try:
        if fault is not None:
            raise UserError(fault)
        if not columns:
            return asked(row)
        if not isinstance(row, Mapping):
            raise UserError(f"is {kind_of_json(row)}, which has no columns")
        fields = renamed(row, columns)
        found = asked(fields)
        return dataclasses.replace(found, row={**found.row, **row, **fields})
    except (ValueError, UserError) as error:
        proposed = None if columns is None or columns else prompt_columns(row, columns)
        hint = "" if proposed is None else f"; {advice(row, proposed, 'prompt')}"
        raise UserError(f"{where}: {error}{hint}") from error


class Prompter:
    """Makes prompts for a model, through its chat template or as plain text."""

    def __init__(
        self, tokenizer: TextTokenizer, template: str | None, system: str | None = None, control_tokens: bool = False
    ):
        """
        Args:
            tokenizer: of the model.
            template: "tokenizer" for the one it brings, the name of a built-in one, or None for plain text.
            system: a turn in front of every conversation that has none.
            control_tokens: whether what turns say may have control tokens, such as one that ends the turn; else they
                are text there. What is rendered around the turns, and plain text, has them in any case.
        """
        self._system, self._tokenizer, self._keeps_control = system, tokenizer, control_tokens
        self._template: ChatTemplate | None = None
        if template is not None:
            self._template = loaded = load_template(template, tokenizer.directory, tokenizer.special_tokens)
        self._control = ControlTokens(tokenizer, None if template is None else lambda: loaded)

    @property
    def template_source(self) -> str | None:
        """The chat template, in Jinja; None for plain text."""
        return self._template.source if self._template is not None else None

    def text(self, text: str) -> Prompt:
        """A user's turn, or without a template the text itself, behind what the tokenizer puts in front of texts."""
        if self._template is not None:
            return Prompt({"prompt": text}, self.turns([Message("user", text)]))
        return Prompt({"prompt": text}, self._tokenizer.framed(self._encode(text)))

    def plain(self, text: str, is_whole: bool = False) -> list[int]:
        """The ids of a text that is not a turn, by somebody who may not write control tokens unless turns may; with
        what the tokenizer puts around texts, see `TextTokenizer.framed`."""
        ids = self._encode(text if self._keeps_control else self._control.mark(text))
        return self._tokenizer.framed(ids, is_whole)

    def turns(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """The ids of a conversation and the beginning of an answer; `tools` as in `Conversation`."""
        if self._template is None:
            raise UserError('plain text is wanted and turns are given; use {"prompt": …}, or a chat template')
        if self._system is not None and all(message.role != "system" for message in messages):
            messages = [Message("system", self._system), *messages]
        if not self._keeps_control:
            messages, tools = [self._marked(message) for message in messages], self._control.mark(tools)
        text = self._template.render(messages, add_generation_prompt=True, tools=tools)
        if missing := [name for name in tool_names(tools) if name not in text]:
            raise UserError(
                f"tools: the model's chat template leaves out {missing[0]!r}, so it knows no tools; send none, or "
                "start the server with --leave_out_tools, which answers without those that may be called"
            )
        if (what := self._template.left_out(text, messages, tools)) is not None:
            raise UserError(f"messages: the model's chat template leaves out {what}; send turns without it")
        return self._encode(text)

    def _marked(self, message: Message) -> Message:
        mark = functools.partial(self._control.mark, role=message.role)
        whole = functools.partial(self._control.mark_turn, role=message.role)
        calls = tuple(ToolCall(mark(call.name), mark(call.arguments), call.id) for call in message.tool_calls)
        turn = {
            key: value if key == "role" else _changed(value, whole if key == "content" else mark)
            for key, value in message.as_turn().items()
        }
        given = json.dumps(turn, ensure_ascii=False)
        return Message(message.role, whole(message.content), calls, mark(message.reasoning), given)

    @functools.cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools. Raises UserError when its template does not say."""
        if self._template is None:
            raise UserError("tools: the model has no chat template")
        return call_format(self._template, self._tokenizer.special_texts)

    def row(self, row: Any) -> Prompt:
        """One row of a file, see `asked`. Raises UserError saying what is wrong with it."""
        return self._prompt(asked(row))

    def read(self, path: Path, columns: Mapping[str, str] | None = None) -> list[Prompt]:
        """The rows of a file of any kind that `llmsuite.data.read` knows.

        `columns` says what "prompt" or "messages" is made of, see `renamed`; the row keeps its columns beside them.
        Raises UserError with file and line of the first fault.
        """
        prompts = []
        for where, row, fault in raw_rows(path):
            question = asked_at(where, row, fault, columns)
            try:
                prompts.append(self._prompt(question))
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        if not prompts:
            raise UserError(f"{path}: has no rows")
        return prompts

    def _prompt(self, question: Asked) -> Prompt:
        turns = question.turns
        if isinstance(turns, str):
            if not question.tools:
                return dataclasses.replace(self.text(turns), row=question.row)
            turns = [Message("user", turns)]
        return Prompt(question.row, self.turns(turns, question.tools))

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(NO_TEXT) from None
        return self._control.encode(text)


def tool_names(tools: str) -> list[str]:
    """The names of tools as `Conversation` has them."""
    return [tool["function"]["name"] for tool in json.loads(tools or "[]")]


def read_messages(turns: Any) -> list[Message]:
    """Turns in OpenAI's format. Raises UserError naming the first invalid one."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise UserError("messages: has to be a list of turns, at least one")
    try:
        return [turn_at(turn, f"messages[{number}]") for number, turn in enumerate(turns)]
    except ValueError as error:
        raise UserError(str(error)) from error


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    if isinstance(value, dict):
        return {change(key): _changed(inner, change) for key, inner in value.items()}
    return value
