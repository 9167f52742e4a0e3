"""Answers that follow a grammar: JSON, JSON of a schema, or a call of a tool.

The library llguidance compiles the grammar and says before each token which ones may follow. Compiling and each token
have budgets, as schemas come from strangers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.inference.calls import CallFormat
from llmsuite.regular import is_file

MAX_SCHEMA_BYTES = 65536
MOST_CALLS = 8
"""Calls of an answer that has to call tools."""
_BUDGET = 20.0
"""Seconds of the processor for all tokens of an answer. JSON takes about a millisecond a token at most."""
_OPTIONS = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
"""No keyword of a schema is ignored. Space is what JSON allows, but a model cannot write it for ever."""


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, stop_ids: Collection[int]):
        """
        Args:
            tokenizer: of the model.
            vocab_size: of its logits.
            stop_ids: tokens that end an answer: allowed where the grammar is complete.
        """
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(stop_ids)
        self._lock = threading.Lock()
        self._known: Any = None

    def of_schema(self, schema: Mapping[str, Any], key: str) -> Guide:
        """JSON that a schema allows.

        Args:
            schema: in JSON Schema.
            key: of the request, for messages.

        Raises:
            UserError: it is no schema, says something that cannot be followed, or is too large.
        """
        size = len(json.dumps(schema, ensure_ascii=False).encode())
        if size > MAX_SCHEMA_BYTES:
            raise UserError(f"{key}: is {size:,} bytes; a schema may have {MAX_SCHEMA_BYTES:,}")
        return self._guide(lambda library: library.grammar_from_json_schema(dict(schema), overrides=_OPTIONS), key)

    def of_calls(self, form: CallFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Guide:
        """Nothing but calls of tools, as a model's template writes them.

        Args:
            form: how that is.
            tools: as OpenAI's API has them; those that may be called.
            several: whether there may be more than one call, up to `MOST_CALLS`.

        Raises:
            UserError: as `of_schema`, for the parameters of a tool.
        """
        return self._of_tools(form, tools, f"start: {_calls(form, several)}")

    def of_text_or_calls(
        self, form: CallFormat, tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None = None
    ) -> Guide:
        """Text, calls of tools, or text with calls in it. What begins as a call is one: of a tool that there is, with
        arguments that its parameters allow if it is `strict`.

        Args:
            form: how a model's template writes calls.
            tools: as OpenAI's API has them.
            schema: of the text, in JSON Schema; there are no calls in it then.

        Raises:
            UserError: as `of_schema`, for the schema or the parameters of a tool; or there is a schema, and calls have
                no mark, so that such a text could be taken for one.
        """
        if schema is not None and not form.mark:
            raise UserError(
                "response_format: not with tools that are strict and tool_choice auto: this model's calls are JSON "
                "without a mark, and an answer could be taken for one"
            )
        tools = [tool if tool["function"].get("strict") else _of_any_arguments(tool) for tool in tools]
        if schema is None:
            return self._of_tools(form, tools, _free_or_calls(form))
        self.of_schema(schema, "response_format")
        text = json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)
        return self._of_tools(form, tools, f"start: text | {_calls(form, several=True)}\ntext: %json {text}")

    def _of_tools(self, form: CallFormat, tools: Sequence[Mapping[str, Any]], start: str) -> Guide:
        for tool in tools:  # each by itself, to name the one that is wrong
            self.of_schema(_parameters(tool), f"tools: parameters of {tool['function']['name']!r}")
        grammar = f"{start}\n{_rules_of_calls(form, tools)}"
        if (size := len(grammar.encode())) > 2 * MAX_SCHEMA_BYTES:
            raise UserError(f"tools: have {size:,} bytes together; {2 * MAX_SCHEMA_BYTES:,} are possible")
        return self._guide(lambda library: library.grammar_from_lark(grammar), "tools")

    def _guide(self, grammar: Any, key: str) -> Guide:
        tokenizer = self._opened(key)
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, grammar(LLMatcher), log_level=0)
        except ValueError as error:
            raise UserError(f"{key}: {_reason(str(error))}") from error
        guide = Guide(matcher, key)
        guide.allowed()  # a first time here: some schemas are found too large only then
        return guide

    def _opened(self, key: str) -> Any:
        """The vocabulary as the library has it; made once, when it is first needed."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            reason = f"needs the package llguidance; install it with: {install_command('serve')}"
            raise UserError(f"{key}: {reason}") from error
        with self._lock:
            if self._known is None:
                path = self._tokenizer.directory / "tokenizer.json"
                if not is_file(path):
                    raise UserError(f"{key}: needs a model with a tokenizer.json, and this one has none")
                self._known = LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=self._stop_ids)
            return self._known


class Guide:
    """What an answer may go on with. Each answer has its own."""

    def __init__(self, matcher: Any, key: str):
        """`matcher` is an LLMatcher; `key` is of the request, for messages. Raises UserError for an invalid grammar."""
        self._matcher, self._key, self._spent = matcher, key, 0.0
        self._check()

    def copy(self) -> Guide:
        """For another answer, from where this one is."""
        return Guide(self._matcher.deep_copy(), self._key)

    def allowed(self) -> np.ndarray:
        """Whether each token may be next, [V]. Raises UserError when that takes too much."""
        begun = time.thread_time()
        found = np.frombuffer(self._matcher.compute_logit_bias(), "uint8") > 0
        self._check(begun)
        return found

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Logits [V] of minus infinity for tokens that may not be next. Raises as `allowed`."""
        return np.where(self.allowed(), logits, np.asarray(-np.inf, logits.dtype))

    def take(self, token: int) -> None:
        """Go on behind a token. Raises UserError as `allowed`."""
        begun = time.thread_time()
        self._matcher.consume_token(token)
        self._check(begun)

    def _check(self, begun: float | None = None) -> None:
        if self._matcher.is_error():
            raise UserError(f"{self._key}: {_reason(self._matcher.get_error())}")
        if begun is not None:
            self._spent += time.thread_time() - begun
        if self._spent > _BUDGET:
            raise UserError(f"{self._key}: following it takes too long; make it simpler")


def _free_or_calls(form: CallFormat) -> str:
    """Text that may have calls in it, as the first rules of a Lark grammar."""
    if not form.mark:  # an answer is a call by its first character behind what Python takes for space
        space = r"\s\x1c-\x1f"
        text = rf"/[{space}]*([^{space}\[{{](.|\n)*)?/"
        return f"start: TEXT | SPACE? ({_calls(form, several=True)})\nTEXT: {text}"
    mark = json.dumps(form.mark, ensure_ascii=False)
    # lazy: as soon as the mark is there, text is over and a call has to follow
    return f"start: (begin SPACE? called)* TEXT\nbegin[lazy]: TEXT {mark}\nTEXT: /(.|\\n)*/"


def _calls(form: CallFormat, several: bool) -> str:
    """Calls and nothing else, as a part of a Lark grammar."""
    more = f"{{0,{MOST_CALLS - 1}}}"
    if not several:
        return "call"
    if form.mark:
        return f"call (SPACE? call){more}"
    return f'call | "[" SPACE? call (SPACE? "," SPACE? call){more} SPACE? "]"'


def _rules_of_calls(form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Rules of a Lark grammar. The parameters of each tool are a schema of their own, whose references stay in it."""
    rules = ["SPACE: /[ \\n]{1,2}/"]
    for number, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        parts = ["{", json.dumps(form.name_key), ":", name, ",", json.dumps(form.arguments_key), ":"]
        rules.append(f'tool{number}: {" SPACE? ".join(map(json.dumps, parts))} SPACE? arguments{number} SPACE? "}}"')
        parameters = json.dumps({**_parameters(tool), "x-guidance": _OPTIONS}, ensure_ascii=False)
        rules.append(f"arguments{number}: %json {parameters}")
    mark, end = (json.dumps(text, ensure_ascii=False) for text in (form.mark, form.end))
    rules.append(f"tool: {' | '.join(f'tool{number}' for number in range(len(tools)))}")
    rules.append(f"called: tool SPACE? {end}" if form.end else "called: tool")
    rules.append(f"call: {mark} SPACE? called" if form.mark else "call: called")
    return "\n".join(rules) + "\n"


def _of_any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"].get("parameters")
    if given is None:  # which says that there are none
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _reason(message: str) -> str:
    """The first line: what follows is of the inside of the library."""
    return message.strip().partition("\n")[0][:300]
