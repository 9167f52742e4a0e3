"""Prompts from the command line, from files and from a conversation, as token ids."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import json_type_name
from llmsuite.data.chat_template import ChatTemplate, load_template
from llmsuite.data.columns import rename_columns
from llmsuite.data.control_tokens import ControlTokens, doubled_bos
from llmsuite.data.keys import ColumnRules, without_ignored
from llmsuite.data.prompt_formats import answer_columns
from llmsuite.data.read import raw_rows
from llmsuite.data.rows import Message, ToolCall
from llmsuite.data.suggest import advice, correct_columns, suggest_prompt_columns
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.data.turns import parse_message, parse_template_kwargs, parse_tools, with_system
from llmsuite.inference.tool_calls import ToolCallFormat, detect_tool_call_format

NO_TEXT = "has half of a surrogate pair (\\ud800 to \\udfff), which is no text"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    row: dict[str, Any]
    """The row of the file: {"prompt": text} or {"messages": turns}."""
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """The prompt of a row of a file, before it is tokenized."""

    row: dict[str, Any]
    """The row of the file, see `Prompt.row`."""
    turns: str | list[Message]
    """A text, or the turns up to the one that is answered."""
    tools: str = ""
    """Tools in JSON, see `Conversation`; empty for none."""
    template_kwargs: str = ""
    """Variables of the chat template in JSON, see `Conversation`; empty for none."""


def parse_prompt_row(row: Any) -> PromptRow:
    """Parse a row with a prompt. Where its messages end with the assistant's turn, this turn is removed from the
    prompt, and becomes the row's "answer" if it has no other one. Raises UserError with the fault of the row."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UserError(f'is {json_type_name(row)}; a text, {{"prompt": …}} or {{"messages": […]}} is needed')
    try:
        tools = parse_tools(row)
        kwargs = parse_template_kwargs(row)
        if isinstance(row.get("prompt"), str) and "messages" not in row:
            turns = with_system(row, [Message("user", row["prompt"])])
            return PromptRow(dict(row), row["prompt"] if len(turns) == 1 else turns, tools, kwargs)
    except ValueError as error:
        raise UserError(str(error)) from error
    if ("prompt" in row) == ("messages" in row):
        raise UserError('has to have either "prompt", a text or a list of turns, or "messages", a list of turns')
    turns = row["prompt"] if "prompt" in row else row["messages"]  # TRL calls them a prompt
    messages = read_messages(turns)
    fields = dict(row)
    if messages[-1].role == "assistant":
        answer = messages.pop()
        if "prompt" in row:  # the user may expect that it is continued
            raise UserError(
                "prompt: ends with the assistant's turn, and no turn is continued; leave it out, or call a "
                'conversation with its answer "messages"'
            )
        if not messages:
            raise UserError("has only the assistant's turn; a turn that it answers is needed")
        fields = {**fields, **answer_columns(answer), **{key: row[key] for key in row if row[key] is not None}}
    try:
        return PromptRow(fields, with_system(row, messages), tools, kwargs)
    except ValueError as error:
        raise UserError(str(error)) from error


def guess_prompt_columns(row: Any, columns: Mapping[str, str]) -> dict[str, str] | None:
    """A proposal for `data.columns`, for a row without a prompt; None where none can be guessed."""
    if not isinstance(row, Mapping):
        return None
    return correct_columns(columns, row) if columns else suggest_prompt_columns(row, _is_prompt)


def _is_prompt(row: Mapping[str, Any]) -> bool:
    try:
        return bool(parse_prompt_row(row).turns)
    except UserError:
        return False


def parse_prompt_at(where: str, row: Any, fault: str | None, rules: ColumnRules | None) -> PromptRow:
    """Parse a row of a file, with `data.columns`; the arguments are those of `Prompter.read` and `raw_rows`. Raises
    UserError with the place of the row."""
    columns = None if rules is None else rules.sources
    try:
        if fault is not None:
            raise UserError(fault)
        if isinstance(row, Mapping) and rules is not None:
            row = without_ignored(row, rules.ignored)
        if not columns:
            return parse_prompt_row(row)
        if not isinstance(row, Mapping):
            raise UserError(f"is {json_type_name(row)}, which has no columns")
        fields = rename_columns(row, columns)
        found = parse_prompt_row(fields)
        return dataclasses.replace(found, row={**found.row, **row, **fields})
    except (ValueError, UserError) as error:
        proposed = None if columns is None or columns else guess_prompt_columns(row, columns)
        hint = "" if proposed is None else f"; {advice(row, proposed, 'prompt')}"
        raise UserError(f"{where}: {error}{hint}") from error


class Prompter:
    """A maker of prompts for a model, through its chat template or as plain text."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str | None,
        system: str | None = None,
        control_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        ignores_unknown: bool = False,
    ):
        """
        Args:
            tokenizer: of the model.
            template: "tokenizer" for the tokenizer's own, the name of a built-in one, or None for plain text.
            system: a system turn for every conversation that has none.
            control_tokens: control tokens in the content of turns, such as one that ends the turn, become tokens; else
                they stay text. In the text that the template renders around the turns, and in plain text, they always
                become tokens.
            template_kwargs: variables of the template, for conversations that do not set them themselves.
            ignores_unknown: keys of turns that are unknown and that the template does not read are left out; else they
                are refused.

        Raises:
            UserError: there is no such template, or it does not read a variable.
        """
        if template is None and template_kwargs:
            raise UserError("chat_template_kwargs: plain text has no chat template; leave them out")
        self._system = system
        self._tokenizer = tokenizer
        self._keeps_control = control_tokens
        self._template: ChatTemplate | None = None
        if template is not None:
            self._template = loaded = load_template(
                template, tokenizer.directory, tokenizer.special_tokens, template_kwargs, ignores_unknown
            )
        self._control = ControlTokens(tokenizer, None if template is None else lambda: loaded)

    @property
    def template_source(self) -> str | None:
        """The chat template, in Jinja; None for plain text."""
        return self._template.source if self._template is not None else None

    @property
    def warning(self) -> str | None:
        """A warning about the chat template, see `doubled_bos`; None without one."""
        return None if self._template is None else doubled_bos(self._tokenizer, self._template)

    def text(self, text: str) -> Prompt:
        """The prompt of a user's turn, or without a template of the text itself, with the tokenizer's special tokens in
        front of it."""
        if self._template is not None:
            return Prompt({"prompt": text}, self.turns([Message("user", text)]))
        return Prompt({"prompt": text}, self._tokenizer.with_special_tokens(self._encode(text)))

    def plain(self, text: str, is_complete: bool = False) -> list[int]:
        """The ids of a text that is not a turn, with the tokenizer's special tokens around it, see
        `TextTokenizer.with_special_tokens`. The text is untrusted: its control tokens stay text, as in turns."""
        ids = self._encode(text if self._keeps_control else self._control.escape(text))
        return self._tokenizer.with_special_tokens(ids, is_complete)

    def turns(self, messages: Sequence[Message], tools: str = "", template_kwargs: str = "") -> list[int]:
        """The ids of a conversation and the beginning of an answer; `tools` and `template_kwargs` as in
        `Conversation`."""
        return self._encode(self.rendered(messages, tools, template_kwargs))

    def rendered(self, messages: Sequence[Message], tools: str = "", template_kwargs: str = "") -> str:
        """The text of a conversation and the beginning of an answer. Control tokens of turns are escaped in it."""
        if self._template is None:
            raise UserError('plain text is expected, and turns are given; use {"prompt": …}, or a chat template')
        if self._system is not None and all(message.role != "system" for message in messages):
            messages = [Message("system", self._system), *messages]
        if not self._keeps_control:
            messages = [self._escape_control(message) for message in messages]
            tools = self._control.escape(tools)
            template_kwargs = self._control.escape(template_kwargs)
        text = self._template.render(messages, add_generation_prompt=True, tools=tools, kwargs=template_kwargs)
        if missing := [name for name in tool_names(tools) if name not in text]:
            raise UserError(
                f"tools: the model's chat template leaves out {missing[0]!r}, so it supports no tools; send none, or "
                "start the server with --leave_out_tools, which answers without optional tools"
            )
        if (what := self._template.missing_part(text, messages, tools, may_drop_thoughts=True)) is not None:
            raise UserError(f"messages: the model's chat template leaves out {what}; send turns without it")
        if (key := self._template.unread_key(messages, tools, template_kwargs)) is not None:
            raise UserError(f"messages: the model's chat template does not read the key {key}; send turns without it")
        return text

    def _escape_control(self, message: Message) -> Message:
        """A message whose control tokens are escaped, in all its fields."""
        escape = functools.partial(self._control.escape, role=message.role)
        escape_content = functools.partial(self._control.escape_turn, role=message.role)
        calls = tuple(ToolCall(escape(call.name), escape(call.arguments), call.id) for call in message.tool_calls)
        turn: dict[str, Any] = {}
        for key, value in message.as_turn().items():
            if key == "role":
                turn[key] = value
            elif key == "content":
                turn[key] = _map_texts(value, escape_content)
            else:
                turn[key] = _map_texts(value, escape)
        given = json.dumps(turn, ensure_ascii=False)
        return Message(message.role, escape_content(message.content), calls, escape(message.reasoning), given)

    @functools.cached_property
    def tool_call_format(self) -> ToolCallFormat:
        """Format of the model's tool calls. Raises UserError when its template has none."""
        if self._template is None:
            raise UserError("tools: the model has no chat template")
        return detect_tool_call_format(self._template, self._tokenizer.special_texts)

    def row(self, row: Any) -> Prompt:
        """The prompt of a row of a file, see `parse_prompt_row`. Raises UserError with the fault of the row."""
        return self._prompt(parse_prompt_row(row))

    def read(self, path: Path, rules: ColumnRules | None = None) -> list[Prompt]:
        """Read the prompts of a file, in any format of `llmsuite.data.read`.

        Args:
            path: of the file.
            rules: the columns that become "prompt" or "messages"; the row keeps its own columns too. None for a command
                that has no such rules.

        Raises:
            UserError: with file and line of the first fault.
        """
        prompts = []
        for where, row, fault in raw_rows(path):
            prompt_row = parse_prompt_at(where, row, fault, rules)
            try:
                prompts.append(self._prompt(prompt_row))
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        if not prompts:
            raise UserError(f"{path}: has no rows")
        return prompts

    def _prompt(self, prompt_row: PromptRow) -> Prompt:
        turns = prompt_row.turns
        if isinstance(turns, str):
            if not prompt_row.tools and not prompt_row.template_kwargs:
                return dataclasses.replace(self.text(turns), row=prompt_row.row)
            turns = [Message("user", turns)]
        return Prompt(prompt_row.row, self.turns(turns, prompt_row.tools, prompt_row.template_kwargs))

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(NO_TEXT) from None
        return self._control.encode(text)


def tool_names(tools: str) -> list[str]:
    """The names of the tools of a `Conversation`, which are JSON."""
    return [tool["function"]["name"] for tool in json.loads(tools or "[]")]


def read_messages(turns: Any) -> list[Message]:
    """Parse turns in OpenAI's format. Raises UserError naming the first invalid one."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise UserError("messages: has to be a list of turns, at least one")
    try:
        return [parse_message(turn, f"messages[{number}]") for number, turn in enumerate(turns)]
    except ValueError as error:
        raise UserError(str(error)) from error


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(inner, change) for inner in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(inner, change) for key, inner in value.items()}
    return value
