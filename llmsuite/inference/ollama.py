"""What llama.cpp and Ollama are told of a model's conversations: the tokens that end answers, and the chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmsuite.convert.gguf_export import Dialogue
from llmsuite.data.chat_template import ChatTemplate, load_template, tokenizer_template
from llmsuite.data.control import ControlTokens
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError

MODELFILE = "Modelfile"
_ROLES = ("system", "user", "assistant")
_MARK = "CONTENT"
"""Stands for what a turn says while a template is taken apart."""


def read_dialogue(directory: Path) -> Dialogue:
    """What the tokenizer of a model directory says of conversations. Raises UserError as `TextTokenizer`."""
    tokenizer = TextTokenizer(directory)
    named = tokenizer.special_tokens
    bos, pad = (tokenizer.token_id(named[key]) if key in named else None for key in ("bos_token", "pad_token"))
    further = sorted(tokenizer.ends() - {tokenizer.eos_id})
    eot, eom, *_ = [*further, None, None]
    control = frozenset(tokenizer.token_id(token) for token in ControlTokens(tokenizer).of_turns)
    adds_bos = bos is not None and tokenizer.framed([])[:1] == [bos]
    return Dialogue(bos, tokenizer.eos_id, pad, eot, eom, adds_bos, control, tokenizer_template(directory))


def modelfile(directory: Path, weights: str, adds_bos: bool) -> str:
    """The Modelfile by which `ollama create` makes a model of a GGUF file.

    Args:
        directory: of the model, with its tokenizer.
        weights: name of the GGUF file beside it.
        adds_bos: whether llama.cpp puts the token that begins a sequence in front by itself.

    Its TEMPLATE is the chat template as a template of Go, with the same text for conversations of system, user and
    assistant. A chat template that does not write each turn by itself has none, and Ollama looks for one of its own
    that is like it.
    """
    tokenizer = TextTokenizer(directory)
    stops = tokenizer.pieces(sorted(tokenizer.ends()))
    lines = [f"FROM ./{weights}"]
    if tokenizer_template(directory) is not None:
        turns = take_apart(load_template("tokenizer", directory, tokenizer.special_tokens))
        if turns is None:
            lines.append("# The chat template is not one of single turns; Ollama chooses one that is like it.")
        else:
            given = adds_bos and turns.lead == tokenizer.special_tokens.get("bos_token")
            lines.append(f'TEMPLATE """{(dataclasses.replace(turns, lead="") if given else turns).as_go()}"""')
            if turns.system:
                lines.append(f'SYSTEM """{turns.system}"""')
    lines += [f'PARAMETER stop "{_quoted(stop)}"' for stop in stops]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Turns:
    """A chat template that writes one turn after the other."""

    around: Mapping[str, tuple[str, str]]
    """What is written before and behind a turn, by its role."""
    answer: str
    """The beginning of an answer."""
    lead: str = ""
    """What is in front of everything."""
    system: str = ""
    """The turn of the system in conversations that have none."""

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation and the beginning of its answer, as Ollama renders it."""
        if self.system and messages[0].role != "system":
            messages = [Message("system", self.system), *messages]
        turns = (message.content.join(self.around[message.role]) for message in messages)
        return self.lead + "".join(turns) + self.answer

    def as_go(self) -> str:
        """The same as a template of Go's text/template, with Ollama's names."""
        cases = ["{{ .Content }}".join(self.around[role]) for role in _ROLES]
        tests = [f'{{{{ {word} eq .Role "{role}" }}}}' for word, role in zip(("if", "else if", "else if"), _ROLES)]
        inner = "".join(test + case for test, case in zip(tests, cases))
        return f"{self.lead}{{{{ range .Messages }}}}{inner}{{{{ end }}}}{{{{ end }}}}{self.answer}"


def take_apart(template: ChatTemplate) -> Turns | None:
    """A template as turns; None for one that does not write each turn by itself."""
    talk = [Message(role, f"{_MARK}{number}") for number, role in enumerate((*_ROLES, "user"))]
    try:
        texts = [template.render(talk[:count]) for count in range(1, len(talk) + 1)]
        alone, whole = template.render(talk[1:2]), template.render(talk, add_generation_prompt=True)
        check = template.render(talk[1:], add_generation_prompt=True)
    except UserError:  # it takes no turns of the system, or no such order
        return None
    around = {}
    for number, text in enumerate(texts[: len(_ROLES)]):
        before, mark, behind = text[len(texts[number - 1]) if number else 0 :].partition(f"{_MARK}{number}")
        if not mark:
            return None
        around[_ROLES[number]] = (before, behind)
    rest = alone.removesuffix(f"{_MARK}1".join(around["user"]))
    before, behind = around["system"]
    lead = system = ""
    if len(rest) > len(before + behind) and rest.startswith(before) and rest.endswith(behind):
        system = rest[len(before) : len(rest) - len(behind)]
    elif before.startswith(rest):
        lead, around["system"] = rest, (before[len(rest) :], behind)
    turns = Turns(around, whole.removeprefix(texts[-1]), lead, system)
    is_same = (turns.render(talk), turns.render(talk[1:])) == (whole, check)
    is_plain = not any(sign in whole + check for sign in ("{{", '"""'))  # what Go and a Modelfile would read
    return turns if is_same and is_plain else None


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
