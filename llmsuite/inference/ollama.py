"""A model's conversation format for llama.cpp and Ollama: the tokens that end answers, and the chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.gguf_export import Dialogue
from llmsuite.data.chat_template import ChatTemplate, load_template, tokenizer_template
from llmsuite.data.control_tokens import ControlTokens
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer

MODELFILE = "Modelfile"
_ROLES = ("system", "user", "assistant")
_MARK = "CONTENT"
"""Placeholder for the content of a turn while a template is parsed."""


def read_dialogue(directory: Path) -> Dialogue:
    """Read the conversation format of a model directory from its tokenizer. Raises UserError as `TextTokenizer`."""
    tokenizer = TextTokenizer(directory)
    named = tokenizer.special_tokens
    bos, pad = (tokenizer.token_id(named[key]) if key in named else None for key in ("bos_token", "pad_token"))
    more_ends = sorted(tokenizer.stop_token_ids() - {tokenizer.eos_id})
    eot, eom, *_ = [*more_ends, None, None]
    control = frozenset(tokenizer.token_id(token) for token in ControlTokens(tokenizer).turn_tokens)
    adds_bos = bos is not None and tokenizer.with_special_tokens([])[:1] == [bos]
    return Dialogue(bos, tokenizer.eos_id, pad, eot, eom, adds_bos, control, tokenizer_template(directory))


def modelfile(directory: Path, weights: str, adds_bos: bool) -> str:
    """The Modelfile with which `ollama create` makes a model of a GGUF file.

    Its TEMPLATE is the chat template as a template of Go, with the same text for conversations of system, user and
    assistant. For a chat template that does not render each turn separately there is none, and Ollama looks for a
    similar one of its own.

    Args:
        directory: of the model, with its tokenizer.
        weights: name of the GGUF file in the directory of the Modelfile.
        adds_bos: llama.cpp itself puts the BOS token in front of a sequence.
    """
    tokenizer = TextTokenizer(directory)
    stops = tokenizer.pieces(sorted(tokenizer.stop_token_ids()))
    lines = [f"FROM ./{weights}"]
    if tokenizer_template(directory) is not None:
        turns = parse_template(load_template("tokenizer", directory, tokenizer.special_tokens))
        if turns is None:
            lines.append("# The chat template is not one of single turns; Ollama chooses one that is like it.")
        else:
            if adds_bos and turns.lead == tokenizer.special_tokens.get("bos_token"):
                turns = dataclasses.replace(turns, lead="")
            lines.append(f'TEMPLATE """{turns.as_go()}"""')
            if turns.system:
                lines.append(f'SYSTEM """{turns.system}"""')
    lines += [f'PARAMETER stop "{_quoted(stop)}"' for stop in stops]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class TurnTemplate:
    """A chat template that renders one turn after the other."""

    around: Mapping[str, tuple[str, str]]
    """Text before and after the content of a turn, by its role."""
    answer: str
    """The beginning of an answer."""
    lead: str = ""
    """Text in front of the first turn."""
    system: str = ""
    """The turn of the system in conversations that have none."""

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation and the beginning of its answer, as Ollama renders it."""
        if self.system and messages[0].role != "system":
            messages = [Message("system", self.system), *messages]
        turns = (message.content.join(self.around[message.role]) for message in messages)
        return self.lead + "".join(turns) + self.answer

    def as_go(self) -> str:
        """The template in the language of Go's text/template, with Ollama's names."""
        cases = ["{{ .Content }}".join(self.around[role]) for role in _ROLES]
        tests = [f'{{{{ {word} eq .Role "{role}" }}}}' for word, role in zip(("if", "else if", "else if"), _ROLES)]
        inner = "".join(test + case for test, case in zip(tests, cases))
        return f"{self.lead}{{{{ range .Messages }}}}{inner}{{{{ end }}}}{{{{ end }}}}{self.answer}"


def parse_template(template: ChatTemplate) -> TurnTemplate | None:
    """Parse a chat template; None for one that does not render each turn separately."""
    conversation = [Message(role, f"{_MARK}{number}") for number, role in enumerate((*_ROLES, "user"))]
    try:
        texts = [template.render(conversation[:count]) for count in range(1, len(conversation) + 1)]
        user_turn = template.render(conversation[1:2])
        full = template.render(conversation, add_generation_prompt=True)
        check = template.render(conversation[1:], add_generation_prompt=True)
    except UserError:  # it supports no system turns, or not this order
        return None
    around = {}
    length = 0
    for number, text in enumerate(texts[: len(_ROLES)]):
        before, marker, after = text[length:].partition(f"{_MARK}{number}")
        if not marker:
            return None
        around[_ROLES[number]] = (before, after)
        length = len(text)
    rest = user_turn.removesuffix(f"{_MARK}1".join(around["user"]))
    before, after = around["system"]
    lead = system = ""
    if len(rest) > len(before + after) and rest.startswith(before) and rest.endswith(after):
        system = rest[len(before) : len(rest) - len(after)]
    elif before.startswith(rest):
        lead = rest
        around["system"] = (before[len(rest) :], after)
    turns = TurnTemplate(around, full.removeprefix(texts[-1]), lead, system)
    is_same = (turns.render(conversation), turns.render(conversation[1:])) == (full, check)
    is_plain = not any(sign in full + check for sign in ("{{", '"""'))  # syntax of Go and of a Modelfile
    return turns if is_same and is_plain else None


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
