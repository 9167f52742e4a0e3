"""Guided decoding: answers that follow a grammar, such as JSON, JSON of a schema, or tool calls.

The library llguidance compiles the grammar and computes the mask of allowed tokens before each token. Compiling and
masks have budgets, because schemas come from untrusted clients.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.safe_files import is_file
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.tool_calls import ToolCallFormat

MAX_SCHEMA_BYTES = 65536
MAX_CALLS = 8
"""Most calls of an answer that has to call tools."""
_BUDGET = 20.0
"""CPU seconds for all tokens of an answer. JSON takes at most about a millisecond per token."""
_OPTIONS = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
"""Unknown keywords of a schema are errors. White space is limited, so that a model cannot write it without end."""


class Grammars:
    """A compiler of grammars for one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, stop_ids: Collection[int]):
        """
        Args:
            tokenizer: of the model.
            vocab_size: of its logits.
            stop_ids: tokens that end an answer: allowed where the grammar is complete.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._tokenizer_handle: Any = None

    def from_schema(self, schema: Mapping[str, Any], key: str) -> Guide:
        """The guide for JSON of a schema.

        Args:
            schema: in JSON Schema.
            key: of the request, for messages.

        Raises:
            UserError: it is no schema, has unsupported keywords, or is too large.
        """
        size = len(json.dumps(schema, ensure_ascii=False).encode())
        if size > MAX_SCHEMA_BYTES:
            raise UserError(f"{key}: is {size:,} bytes; a schema may have {MAX_SCHEMA_BYTES:,}")
        return self._guide(lambda library: library.grammar_from_json_schema(dict(schema), overrides=_OPTIONS), key)

    def tool_calls(self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Guide:
        """The guide for answers of tool calls only.

        Args:
            form: format of the model's calls.
            tools: in the format of OpenAI's API; those that may be called.
            several: allow more than one call, up to `MAX_CALLS`.

        Raises:
            UserError: as `from_schema`, for the parameters of a tool.
        """
        return self._tools_grammar(form, tools, f"start: {_calls_rule(form, several)}")

    def text_or_tool_calls(
        self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None = None
    ) -> Guide:
        """The guide for text, tool calls, or text with calls in it. Text that begins like a call has to be one: of an
        existing tool, with arguments that fit its parameters if the tool is `strict`.

        Args:
            form: format of the model's calls.
            tools: in the format of OpenAI's API.
            schema: of the text, in JSON Schema; then the text has no calls in it.

        Raises:
            UserError: as `from_schema`, for the schema or the parameters of a tool; or there is a schema, and calls
                have no marker, so that an answer could be mistaken for a call.
        """
        if schema is not None and not form.start_marker:
            raise UserError(
                "response_format: not with tools that are strict and tool_choice auto: this model's calls are JSON "
                "without a marker, and an answer could be mistaken for one"
            )
        tools = [tool if tool["function"].get("strict") else _of_any_arguments(tool) for tool in tools]
        if schema is None:
            return self._tools_grammar(form, tools, _free_or_calls(form))
        self.from_schema(schema, "response_format")
        text = json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)
        return self._tools_grammar(form, tools, f"start: text | {_calls_rule(form, several=True)}\ntext: %json {text}")

    def _tools_grammar(self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]], start: str) -> Guide:
        for tool in tools:  # each alone, to name the one that is wrong
            self.from_schema(_parameters(tool), f"tools: parameters of {tool['function']['name']!r}")
        grammar = f"{start}\n{_rules_of_calls(form, tools)}"
        if (size := len(grammar.encode())) > 2 * MAX_SCHEMA_BYTES:
            raise UserError(f"tools: have {size:,} bytes together; at most {2 * MAX_SCHEMA_BYTES:,} are allowed")
        return self._guide(lambda library: library.grammar_from_lark(grammar), "tools")

    def _guide(self, grammar: Any, key: str) -> Guide:
        tokenizer = self._load_tokenizer(key)
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, grammar(LLMatcher), log_level=0)
        except ValueError as error:
            raise UserError(f"{key}: {_reason(str(error))}") from error
        guide = Guide(matcher, key)
        guide.allowed()  # once here: llguidance finds some schemas too large only when it computes a mask
        return guide

    def _load_tokenizer(self, key: str) -> Any:
        """The tokenizer of the library; made once, when it is first needed."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            reason = f"needs the package llguidance; install it with: {install_command('serve')}"
            raise UserError(f"{key}: {reason}") from error
        with self._lock:
            if self._tokenizer_handle is None:
                path = self._tokenizer.directory / "tokenizer.json"
                if not is_file(path):
                    raise UserError(f"{key}: needs a model with a tokenizer.json, and this one has none")
                self._tokenizer_handle = LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=self._stop_ids)
            return self._tokenizer_handle


class Guide:
    """State of a grammar for one answer."""

    def __init__(self, matcher: Any, key: str):
        """
        Args:
            matcher: an LLMatcher.
            key: of the request, for messages.

        Raises:
            UserError: the grammar is invalid.
        """
        self._matcher = matcher
        self._key = key
        self._spent = 0.0
        self._check()

    def copy(self) -> Guide:
        """A copy in the present state, for another answer."""
        return Guide(self._matcher.deep_copy(), self._key)

    def allowed(self) -> np.ndarray:
        """Mask [V] of the tokens that may be next. Raises UserError when the budget is spent."""
        start = time.thread_time()
        found = np.frombuffer(self._matcher.compute_logit_bias(), "uint8") > 0
        self._check(start)
        return found

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Logits [V] with minus infinity for tokens that may not be next. Raises UserError as `allowed`."""
        return np.where(self.allowed(), logits, np.asarray(-np.inf, logits.dtype))

    def accept(self, token: int) -> None:
        """Advance the grammar by a token. Raises UserError as `allowed`."""
        start = time.thread_time()
        self._matcher.consume_token(token)
        self._check(start)

    def _check(self, start: float | None = None) -> None:
        if self._matcher.is_error():
            raise UserError(f"{self._key}: {_reason(self._matcher.get_error())}")
        if start is not None:
            self._spent += time.thread_time() - start
        if self._spent > _BUDGET:
            raise UserError(f"{self._key}: following it takes too long; make it simpler")


def _free_or_calls(form: ToolCallFormat) -> str:
    """Text that may have calls in it, as the first rules of a Lark grammar."""
    if not form.start_marker:  # the first character decides whether an answer is a call, after what Python calls space
        space = r"\s\x1c-\x1f"
        text = rf"/[{space}]*([^{space}\[{{](.|\n)*)?/"
        return f"start: TEXT | SPACE? ({_calls_rule(form, several=True)})\nTEXT: {text}"
    start_marker = json.dumps(form.start_marker, ensure_ascii=False)
    # lazy: as soon as the marker is there, text is over and a call has to follow
    return f"start: (begin SPACE? called)* TEXT\nbegin[lazy]: TEXT {start_marker}\nTEXT: /(.|\\n)*/"


def _calls_rule(form: ToolCallFormat, several: bool) -> str:
    """Calls only, as a part of a Lark grammar."""
    more = f"{{0,{MAX_CALLS - 1}}}"
    if not several:
        return "call"
    if form.start_marker:
        return f"call (SPACE? call){more}"
    return f'call | "[" SPACE? call (SPACE? "," SPACE? call){more} SPACE? "]"'


def _rules_of_calls(form: ToolCallFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Rules of a Lark grammar for calls. The parameters of each tool are a separate schema, because its references are
    relative to it."""
    rules = ["SPACE: /[ \\n]{1,2}/"]
    for number, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        parts = ["{", json.dumps(form.name_key), ":", name, ",", json.dumps(form.arguments_key), ":"]
        rules.append(f'tool{number}: {" SPACE? ".join(map(json.dumps, parts))} SPACE? arguments{number} SPACE? "}}"')
        parameters = json.dumps({**_parameters(tool), "x-guidance": _OPTIONS}, ensure_ascii=False)
        rules.append(f"arguments{number}: %json {parameters}")
    start_marker, end = (json.dumps(text, ensure_ascii=False) for text in (form.start_marker, form.end_marker))
    rules.append(f"tool: {' | '.join(f'tool{number}' for number in range(len(tools)))}")
    rules.append(f"called: tool SPACE? {end}" if form.end_marker else "called: tool")
    rules.append(f"call: {start_marker} SPACE? called" if form.start_marker else "call: called")
    return "\n".join(rules) + "\n"


def _of_any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"].get("parameters")
    if given is None:  # the tool has no parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _reason(message: str) -> str:
    """The first line of a message; later lines are internals of the library."""
    return message.strip().partition("\n")[0][:300]
