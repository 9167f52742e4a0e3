"""The tokens that other suites train on, by a few facts of each.

The facts are those of LLaMA-Factory ff6d4d12 (`data/template.py`, `data/processor`), ms-swift 3602360a
(`template/base.py`, `template/templates`, `loss_scale`), Axolotl 067b021c (`prompt_strategies/chat_template.py`),
and PaddleFormers 1.2.0 (`datasets/template`, `datasets/SFTDataset.py`, `datasets/DPODataset.py`).
The rules here gave the same tokens and supervised positions as their own functions for questions and answers in turn,
with the tokenizers of Qwen3 and Llama 3; for PaddleFormers with the tokenizer below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>",
)  # fmt: skip
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
Turn = tuple[str, str]
"""Role and content."""
Sequence_ = list[tuple[int, bool]]
"""Tokens, each with True if it is supervised."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What is written around turns."""

    prefix: str
    system: str
    user: str
    """With the begin of the answer."""
    end: str


CHATML = Form(
    "",
    "<|im_start|>system\n{}<|im_end|>\n",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|>\n",
)
LLAMA_3 = Form(
    "<|begin_of_text|>",
    "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
)


def tokenizer(directory: Path, eos: str) -> Path:
    """The directory of a tokenizer of bytes that joins line breaks, as those of Qwen and Llama 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "ĊĊ", "ĊĊĊ", "]]", "[["])}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("]", "]"), ("[", "[")]
    made = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+|[^\s]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True)
    made.save(str(directory / "tokenizer.json"))
    config = f'{{"eos_token": "{eos}", "bos_token": "<|begin_of_text|>", "pad_token": "<|endoftext|>"}}'
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return directory


def _apart(parts: Sequence[tuple[str, bool]], encoder: Tokenizer) -> Sequence_:
    """The tokens of texts that are tokenised each for itself."""
    found: Sequence_ = []
    for text, is_supervised in parts:
        found += [(token, is_supervised) for token in encoder.encode(text, add_special_tokens=False).ids]
    return found


def _pairs(turns: Sequence[Turn]) -> tuple[str | None, list[Turn]] | None:
    """The system turn, and (question, answer) of each round; None if the turns are others."""
    system = turns[0][1] if turns[0][0] == "system" else None
    rest = turns[1:] if system is not None else turns
    roles = [role for role, _ in rest]
    if not rest or len(rest) % 2 or roles != ["user", "assistant"] * (len(rest) // 2):
        return None
    return system, [(rest[i][1], rest[i + 1][1]) for i in range(0, len(rest), 2)]


@dataclasses.dataclass(frozen=True)
class LlamaFactory:
    """Prefix and system turn, then for each round the question and the answer, each tokenised for itself. An empty
    system turn is that of the template. Rows with other turns are left out."""

    form: Form
    default: str = ""
    has_thoughts: bool = False

    def tokens(self, turns: Sequence[Turn], encoder: Tokenizer, last_only: bool) -> Sequence_ | None:
        """The row that is trained on; None if it is left out."""
        found = _pairs(turns)
        if found is None:
            return None
        given, rounds = found
        system = given or self.default
        parts = [(self.form.prefix, False)]
        if system:
            parts.append((self.form.system.format(system), False))
        for i, (question, answer) in enumerate(rounds):
            is_last = i == len(rounds) - 1
            is_trained = is_last or not last_only
            parts.append((self.form.user.format(question), False))
            if self.has_thoughts and last_only and not is_last:
                answer = _without_thought(answer)
            elif self.has_thoughts and "<think>" not in answer and "</think>" not in answer:
                parts.append((EMPTY_THOUGHT, is_trained))
            parts.append((answer + self.form.end, is_trained))
        return _apart(parts, encoder)


@dataclasses.dataclass(frozen=True)
class PaddleFormers:
    """As LLaMA-Factory, but earlier answers keep their thoughts, and each without one begins by an empty one."""

    form: Form
    has_thoughts: bool = False

    def tokens(self, turns: Sequence[Turn], encoder: Tokenizer, last_only: bool) -> Sequence_ | None:
        """The row that is trained on; None if it is left out."""
        found = _pairs(turns)
        if found is None:
            return None
        system, rounds = found
        parts = [(self.form.prefix, False)]
        if system:
            parts.append((self.form.system.format(system), False))
        for i, (question, answer) in enumerate(rounds):
            is_trained = i == len(rounds) - 1 or not last_only
            parts.append((self.form.user.format(question), False))
            if self.has_thoughts and "<think>" not in answer and "</think>" not in answer:
                parts.append((EMPTY_THOUGHT, is_trained))
            parts += [(answer, is_trained), (self.form.end, is_trained)]
        return _apart(parts, encoder)


def _without_thought(answer: str) -> str:
    """An earlier answer where only the last one is trained on."""
    while answer.count("<think>\n") and "\n</think>\n\n" in answer.split("<think>\n", 1)[1]:
        before, after = answer.split("<think>\n", 1)
        answer = before + after.split("\n</think>\n\n", 1)[1]
    return answer.lstrip("\n")


@dataclasses.dataclass(frozen=True)
class Swift:
    """Texts that are tokenised each for itself where the supervision changes. An empty system turn is none; a missing
    one is that of the template. Turns of the same role are joined, which no text here does."""

    form: Form
    default: str | None = None
    has_thoughts: bool = False
    ignores_empty_thought: bool = False

    def tokens(self, turns: Sequence[Turn], encoder: Tokenizer, last_only: bool) -> Sequence_ | None:
        """The row that is trained on; None if it is left out."""
        found = _pairs(turns if turns[-1][0] == "assistant" else turns[:-1])
        if found is None:
            return None
        given, rounds = found
        system = self.default if given is None else given
        text = self.form.prefix + (self.form.system.format(system) if system else "")
        parts: list[tuple[str, bool]] = []
        for i, (question, answer) in enumerate(rounds):
            is_last = i == len(rounds) - 1
            text += self.form.user.format(question)
            if self.has_thoughts and last_only and not is_last:
                answer = answer.split("</think>")[-1].strip()
            elif self.has_thoughts and not answer.startswith("<think>"):
                answer = EMPTY_THOUGHT + answer
            if last_only and not is_last:
                parts += [(text, False), (answer, False), (self.form.end, False)]
                text = ""
                continue
            if self.ignores_empty_thought and answer.partition("</think>")[0].strip() == "<think>":
                rest = answer.partition("</think>")[2].lstrip()
                text += answer[: len(answer) - len(rest)]
                answer = rest
            parts += [(text, False), (answer + self.form.end, True)]
            text = ""
        return _apart(_joined(parts), encoder)


def _joined(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours with the same supervision as one text."""
    found: list[tuple[str, bool]] = []
    for text, is_supervised in parts:
        if found and found[-1][1] == is_supervised:
            found[-1] = (found[-1][0] + text, is_supervised)
        else:
            found.append((text, is_supervised))
    return found


@dataclasses.dataclass(frozen=True)
class Axolotl:
    """The full text, tokenised at once. Of an answer the tokens are supervised from the first to the last that differ
    from those with "[[dummy_message]]" in its place, and `end` within the next four."""

    form: Form
    end: str | None
    """The end-of-sequence token, or one of `eot_tokens`, if the form has it."""
    default: str | None = None
    trims: bool = False
    has_thoughts: bool = False

    def tokens(self, turns: Sequence[Turn], encoder: Tokenizer, last_only: bool) -> Sequence_ | None:
        """The row that is trained on."""
        ids = self._ids(turns, encoder, len(turns))
        supervised = [False] * len(ids)
        for i, (role, _) in enumerate(turns):
            if role != "assistant":
                continue
            full = self._ids(turns[: i + 1], encoder, len(turns))
            dummy = self._ids([*turns[:i], (role, "[[dummy_message]]")], encoder, len(turns))
            if full == dummy:
                continue
            begin = next(k for k in range(len(full)) if full[k] != dummy[k])
            end = next(len(full) - k for k in range(len(full)) if full[-1 - k] != dummy[-1 - k])
            supervised[begin:end] = [True] * (end - begin)
            token = None if self.end is None else encoder.token_to_id(self.end)
            if token in ids[end : end + 4]:
                supervised[ids.index(token, end)] = True
        return list(zip(ids, supervised))

    def _ids(self, turns: Sequence[Turn], encoder: Tokenizer, count: int) -> list[int]:
        """The tokens of the first turns of a row with `count` turns."""
        text = self.form.prefix
        if self.default is not None and turns[0][0] != "system":
            text += self.form.system.format(self.default)
        for i, (role, content) in enumerate(turns):
            turn = self.form.system.replace("system", role, 1)
            if self.has_thoughts and role == "assistant" and i == count - 1:
                content = EMPTY_THOUGHT + content
            text += turn.format(content.strip() if self.trims else content)
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids


Rule = LlamaFactory | Swift | Axolotl | PaddleFormers
