"""What the columns of a row probably are: a proposal for `data.columns`, which somebody has to agree to.

Columns are guessed by their names and by the kinds of their values. A proposal is made only if the row can be read with
it, so that it is right in form; whether it is in content nobody but the owner of the file knows.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from llmsuite.data.rows import ROLES
from llmsuite.data.turns import SHAREGPT_ROLES
from llmsuite.schema.columns import is_template
from llmsuite.shown import redacted
from llmsuite.specs import DataFormat

Row = Mapping[str, Any]
Columns = dict[str, str]

_CALLED: Mapping[str, str] = {
    "question": "instruction question prompt query ask request problem task user human src source q frage anweisung "
    "aufgabe pregunta instruccion consulta pergunta instrucao domanda richiesta demande consigne vraag opdracht вопрос "
    "запрос инструкция 问题 問題 提问 提問 指令 質問 질문 soru سؤال प्रश्न input",
    "answer": "answer response output completion reply target tgt solution assistant bot gpt a antwort ausgabe loesung "
    "lösung respuesta resposta risposta reponse sortie antwoord ответ 回答 答案 回复 回覆 応答 답변 cevap جواب उत्तर",
    "chosen": "chosen better preferred winner win accepted good best positive besser bessere mejor meilleur 较好",
    "rejected": "rejected worse dispreferred loser lose lost declined bad worst negative schlechter schlechtere peor "
    "pire 较差",
    "label": "label kto_tag tag desirable wanted liked like thumbs good ok rating feedback vote upvoted",
    "messages": "messages conversations conversation dialogue dialog chat turns",
    "text": "text content body document article passage story raw texte texto testo tekst текст 文本 正文 内容 本文",
    "input": "input context background passage kontext contexto contexte 上下文 输入",
    "system": "system system_prompt",
}
"""Words that columns are called by, the surest first, for each thing that a column may be."""
_READ_BY_PROMPTS = (
    *("prompt", "messages", "conversations", "tools", "src", "tgt"),
    *("instruction", "input", "history", "system", "output"),
)
"""Fields of prompts: a column for rewards that is called so would be taken for one."""
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "conversation": ("instruction", "output"),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompt": ("prompt",),
}
"""The fields to fill in where nothing can be guessed, by the kind of rows."""
_KNOWN = (
    *("instruction", "input", "output", "history", "system", "messages", "conversations", "tools", "prompt"),
    *("completion", "chosen", "rejected", "label", "kto_tag", "src", "tgt", "response", "sort"),
)
"""All fields of formats that come with llmsuite."""
MEANS: Mapping[str, str] = {
    "instruction": "the question or instruction",
    "input": "what the question is about, behind it on a line of its own",
    "output": "the answer",
    "prompt": "the question or prompt",
    "completion": "the answer",
    "chosen": "the better answer",
    "rejected": "the worse answer",
    "label": "true for an answer that is wanted, else false",
    "messages": "the list of turns with role and content",
    "conversations": "the list of turns with from and value",
    "system": "the system prompt",
    "text": "the text",
}
"""What a field is, for questions."""


_MOST_LOOKED_AT, _LONGEST_NAME = 500, 100
"""Columns that a guess is made of, and characters of their names: of more, nobody would have chosen by hand."""


def fields_of(kind: str) -> tuple[str, ...]:
    """The fields that rows of a kind have at least; none for a kind of somebody else's."""
    return _FIELDS.get(kind, ())


def suggested(row: Row, kind: str, formats: Mapping[str, DataFormat], name: str = "auto") -> Columns | None:
    """What `data.columns` may be for a row that has other columns; None where that cannot be guessed.

    Args:
        row: as the file has it.
        kind: of rows that the stage needs.
        formats: the registered ones.
        name: of a format, or "auto" for any with this kind.
    """
    if len(row) > _MOST_LOOKED_AT:
        return None
    fitting = [f for f in formats.values() if f.kind == kind and name in ("auto", f.name)]
    return first_readable(row, _proposals(kind, _Found(row)), lambda fields: _is_read(fields, fitting))


def suggested_text(row: Row) -> str | None:
    """The column that is probably the text of a document; None where that cannot be guessed."""
    found = _Found(row)
    return found.named("text") or found.only_text()


def suggested_prompt(row: Row, is_read: Callable[[Row], bool]) -> Columns | None:
    """As `suggested`, for prompts of stage `infer`, which have one field; `is_read` says whether a row is one."""
    found = _Found(row)
    question = found.named("question") or found.only_text()
    proposals = [{"messages": found.turns} if found.turns else {}, {"prompt": question} if question else {}]
    return first_readable(row, proposals, is_read)


def first_readable(row: Row, proposals: Sequence[Columns] | Iterator[Columns], is_read: Any) -> Columns | None:
    """The first proposal with which a row can be read."""
    for columns in proposals:
        if columns and is_read({field: row[column] for field, column in columns.items()}):
            return columns
    return None


def corrected(columns: Mapping[str, str], row: Row) -> Columns | None:
    """`data.columns` without typing errors in names of columns and of fields; None where there is none to be seen."""
    mended: Columns = {}
    for field, source in columns.items():
        if not is_template(source) and source not in row:
            source = near(source, row) or source
        mended[field if field in _KNOWN else near(field, _KNOWN) or field] = source
    is_whole = len(mended) == len(columns) and all(is_template(s) or s in row for s in mended.values())
    return mended if mended != dict(columns) and is_whole else None


def near(name: str, known: Mapping[str, Any] | Sequence[str]) -> str | None:
    """The name among known ones that somebody may have meant, whatever the case of its letters."""
    short = [each for each in known if len(each) <= _LONGEST_NAME][:_MOST_LOOKED_AT]
    by_case = {each.casefold(): each for each in short}
    found = get_close_matches(name.casefold(), list(by_case), n=1)
    return by_case[found[0]] if found else None


def did_you_mean(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """The end of a sentence about a name that is not known; "" where none is like it."""
    found = near(name, known)
    return "" if found is None else f"; did you mean {found!r}?"


def columns_word(columns: Mapping[str, str]) -> str:
    """The word of a command line that sets `data.columns`."""
    return f"--data.columns={_plain(json.dumps(columns, ensure_ascii=False, separators=(',', ':')))}"


def key_word(key: str, name: str) -> str:
    """The word of a command line that sets a key to a text: as it is, unless it would be read as something else."""
    is_bare = name.isprintable() and not name.startswith('"') and name != "null"
    return f"--{key}={name if is_bare else _plain(json.dumps(name, ensure_ascii=False))}"


def typed(word: str) -> str:
    """A word such as `--key=value` as it is typed in a shell."""
    key, _, value = word.partition("=")
    return f"{key}={shlex.quote(value)}"


def advice(row: Row, columns: Columns | None, kind: str) -> str:
    """What to do about a row whose columns fit no format: with the word to add, filled in as far as it can be."""
    if columns is not None:
        what = ", ".join(f"{column!r} as {field}" for field, column in columns.items() if field in MEANS)
        return f"to read {what}, add {typed(columns_word(columns))}"
    if not (fields := fields_of(kind)):
        return "say in data.columns which columns they are"
    template = typed(columns_word(dict.fromkeys(fields, "…")))
    return f"say in data.columns which columns they are: {template}, with one of {names_of(row)} for each …"


def names_of(row: Row) -> str:
    """The columns of a row, for a sentence."""
    return ", ".join(map(repr, row)) or "none"


def _plain(text: str) -> str:
    """JSON whose characters that cannot be seen are written as escapes."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _is_read(fields: Row, formats: Sequence[DataFormat]) -> bool:
    """Whether the first of the formats that fits can convert a row."""
    for each in formats:
        try:
            if each.matches(fields):
                return each.convert(fields) is not None
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
    return False


def _proposals(kind: str, found: _Found) -> Iterator[Columns]:
    """What may be proposed for a kind of rows, the best first. {} stands for none."""
    if kind not in _FIELDS:
        return
    question, answer = found.asked_and_answered()
    further = _named(input=found.named("input", question, answer), system=found.named("system"))
    rest = found.rest if kind == "prompt" else lambda *used: {}
    tools = {"tools": "tools"} if "tools" in found.row else {}
    label = found.label()
    for field in ("messages", "conversations") if found.turns else ():
        own = {**({"system": further["system"]} if "system" in further else {}), **tools, **rest(found.turns)}
        yield from _of_kind(kind, {field: found.turns or "", **own}, found, label)
    if kind == "prompt" and question is None:
        question = found.only_text()
    if kind in ("conversation", "unpaired"):
        question, answer = found.the_other(question, answer)
    if question is None:
        if kind == "preference":
            yield from _of_kind(kind, {}, found, label)
        return
    if kind in ("conversation", "unpaired") and answer is None:
        return
    asked = {"instruction": question, **further} if further else {"prompt": question}
    used = (question, *further.values())
    if kind == "prompt":
        yield {**asked, **rest(*used)}
        yield {"prompt": question, **rest(question)}
    elif kind == "preference":
        yield from _of_kind(kind, asked, found, label)
        yield from _of_kind(kind, {"prompt": question}, found, label)
    else:
        answered = answer or ""
        of_label = _named(label=label) if kind == "unpaired" else {}
        if kind == "unpaired" and not of_label:
            return
        if kind == "conversation" or further:
            yield {"instruction": question, **further, "output": answered, **of_label}
        yield {"prompt": question, "completion": answered, **of_label}
        yield {"src": question, "tgt": answered, **of_label}


def _of_kind(kind: str, asked: Columns, found: _Found, label: str | None) -> Iterator[Columns]:
    """What is asked with what a kind of rows has beside it."""
    if kind in ("conversation", "prompt"):
        yield asked
    elif kind == "unpaired" and label is not None:
        yield {**asked, "label": label}
    elif kind == "preference":
        taken = tuple(asked.values())
        chosen, rejected = found.named("chosen", *taken), found.named("rejected", *taken)
        if chosen is not None and rejected is not None:
            yield {**asked, "chosen": chosen, "rejected": rejected}


def _named(**found: str | None) -> Columns:
    return {field: column for field, column in found.items() if column is not None}


class _Found:
    """What the columns of a row look like."""

    def __init__(self, row: Row):
        self.row = row
        # a name with braces would be a template, and an address is shown without its secrets
        self._names = [name for name in row if not is_template(name) and redacted(name) == name]
        self._texts = [name for name in self._names if isinstance(row[name], str)]
        self.turns = next((name for name in self._names if _are_turns(row[name])), None)

    def named(self, what: str, *but: str | None) -> str | None:
        """The column that is most surely called by a word for it; None where there is none."""
        ranked = [(rank, name) for name in self._names if name not in but and (rank := _rank(name, what)) is not None]
        if what in ("text", "input", "system"):
            ranked = [(rank, name) for rank, name in ranked if isinstance(self.row[name], str)]
        if what == "input":  # beside a question, which has gone before
            ranked = [(rank, name) for rank, name in ranked if but and but[0] is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def asked_and_answered(self) -> tuple[str | None, str | None]:
        """The columns of question and answer; one that is called by words for both is what the surer word says."""
        question, answer = self.named("question"), self.named("answer")
        if question is not None and question == answer:
            asks, answers = _rank(question, "question"), _rank(question, "answer")
            if asks is not None and answers is not None and answers < asks:
                question = self.named("question", answer)
            else:
                answer = self.named("answer", question)
        return question, answer

    def label(self) -> str | None:
        """The column that says whether an answer is wanted: true or false, or called so."""
        marks = [name for name in self._names if _is_mark(self.row[name])]
        called = sorted((rank, name) for name in marks if (rank := _rank(name, "label")) is not None)
        return called[0][1] if called else marks[0] if len(marks) == 1 else None

    def only_text(self) -> str | None:
        """The one column of text."""
        return self._texts[0] if len(self._texts) == 1 else None

    def the_other(self, question: str | None, answer: str | None) -> tuple[str | None, str | None]:
        """Question and answer, where one of them is known and there is one more column of text."""
        if (question is None) == (answer is None):
            return question, answer
        others = [name for name in self._texts if name not in (question, answer) and not _is_mark(self.row[name])]
        if len(others) == 1:
            return question or others[0], answer or others[0]
        return question, answer

    def rest(self, *used: str | None) -> Columns:
        """The columns that are left, for rewards, under their own names; an answer is called so."""
        left = {name: name for name in self._names if name not in used and name not in _READ_BY_PROMPTS}
        answer = self.named("answer", *used)
        if answer is not None and "answer" not in self.row:
            left.pop(answer, None)
            left["answer"] = answer
        return left


def _rank(name: str, what: str) -> tuple[int, int] | None:
    """How surely a column is something by its name, the smallest the surest; None if it is not."""
    words, plain = _words(what), _folded(name)
    parts = _folded(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)).split()
    if plain.replace(" ", "_") in words:
        return (0, words.index(plain.replace(" ", "_")))
    if what in ("input", "system"):  # part of too many names
        return None
    # what a name ends with says what it is: the answer to a question is an answer
    places = [(len(parts) - i, words.index(part)) for i, part in enumerate(parts) if part in words and len(part) > 1]
    return min(places) if places else None


@functools.cache
def _words(what: str) -> list[str]:
    return [_folded(word).replace(" ", "_") for word in _CALLED[what].split()]


def _folded(name: str) -> str:
    """A name in small letters without accents and marks, its words with spaces between them."""
    split = unicodedata.normalize("NFKD", name.casefold())
    bare = "".join(char for char in split if not unicodedata.combining(char))
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFC", bare).replace("_", " ")))


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    speaker = value.get("role", value.get("from")) if isinstance(value, Mapping) else None
    return isinstance(speaker, str) and speaker in (*ROLES, *SHAREGPT_ROLES)


def _is_mark(value: Any) -> bool:
    if isinstance(value, str):
        return value.casefold() in ("true", "false", "0", "1")
    return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
