"""Guesses the meaning of a row's columns: a proposal for `data.columns`, which the user has to confirm.

Columns are guessed by their names and the types of their values. A proposal is made only if the row can be read with
it, so its form is right; only the owner of the file knows if its meaning is.
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

from llmsuite.base.redaction import redacted
from llmsuite.contract.schema.columns import is_template
from llmsuite.contract.specs import DataFormat
from llmsuite.data.rows import ROLES
from llmsuite.data.turns import SHAREGPT_ROLES

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
"""Names of columns by their meaning, the surest first."""
_READ_BY_PROMPTS = (
    *("prompt", "messages", "conversations", "tools", "src", "tgt"),
    *("instruction", "input", "history", "system", "output"),
)
"""Fields of prompt formats: a column for rewards with such a name would be taken for one."""
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "conversation": ("instruction", "output"),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompt": ("prompt",),
}
"""Fields to fill in by hand if nothing can be guessed, by the kind of rows."""
_FORMAT_FIELDS = (
    *("instruction", "input", "output", "history", "system", "messages", "conversations", "tools", "prompt"),
    *("completion", "chosen", "rejected", "label", "kto_tag", "src", "tgt", "response", "sort"),
    *("text", "margin", "responses", "scores", "ranks"),
)
"""All fields of the formats that come with llmsuite."""
FIELD_MEANINGS: Mapping[str, str] = {
    "instruction": "the question or instruction",
    "input": "the context of the question, which follows it on a separate line",
    "output": "the answer",
    "prompt": "the question or prompt",
    "completion": "the answer",
    "chosen": "the better answer",
    "rejected": "the worse answer",
    "label": "true for a desirable answer, else false",
    "messages": "the list of turns with role and content",
    "conversations": "the list of turns with from and value",
    "system": "the system prompt",
    "text": "the text",
}
"""Meaning of a field, for questions to the user."""


_MAX_COLUMNS = 500
_MAX_NAME_CHARS = 100
"""Limits of a guess: number of columns, and length of their names."""


def fields_of(kind: str) -> tuple[str, ...]:
    """Return the required fields of a kind of rows; none for a plugin's kind."""
    return _FIELDS.get(kind, ())


def suggest_columns(row: Row, kind: str, formats: Mapping[str, DataFormat], name: str = "auto") -> Columns | None:
    """Return a proposal of `data.columns` for a row that has other columns; None where it cannot be guessed.

    Args:
        row: the row in its file.
        kind: of rows that the stage needs.
        formats: the registered ones.
        name: of a format, or "auto" for any with this kind.
    """
    if len(row) > _MAX_COLUMNS:
        return None
    fitting = [f for f in formats.values() if f.kind == kind and name in ("auto", f.name)]
    return first_readable_proposal(row, _proposals(kind, _RowColumns(row)), lambda fields: _is_read(fields, fitting))


def suggest_text_column(row: Row) -> str | None:
    """Return the column that is probably the text of a document; None where it cannot be guessed."""
    columns = _RowColumns(row)
    return columns.named("text") or columns.only_text()


def suggest_prompt_columns(row: Row, is_read: Callable[[Row], bool]) -> Columns | None:
    """Return a proposal for prompts of stage `infer`, which have one field; `is_read` tests if a row is a prompt."""
    columns = _RowColumns(row)
    question = columns.named("question") or columns.only_text()
    proposals = [_named(messages=columns.turns or None), _named(prompt=question or None)]
    return first_readable_proposal(row, proposals, is_read)


def first_readable_proposal(row: Row, proposals: Sequence[Columns] | Iterator[Columns], is_read: Any) -> Columns | None:
    """Return the first proposal with which a row can be read; None if there is none."""
    for columns in proposals:
        if columns and is_read({field: row[column] for field, column in columns.items()}):
            return columns
    return None


def correct_columns(columns: Mapping[str, str], row: Row) -> Columns | None:
    """Return `data.columns` without typing errors in names of columns and fields; None if no error is recognised."""
    mended: Columns = {}
    for field, source in columns.items():
        if not is_template(source) and source not in row:
            source = near(source, row) or source
        if field not in _FORMAT_FIELDS:
            field = near(field, _FORMAT_FIELDS) or field
        mended[field] = source
    is_complete = len(mended) == len(columns) and all(is_template(s) or s in row for s in mended.values())
    if mended != dict(columns) and is_complete:
        return mended
    return None


def near(name: str, known: Mapping[str, Any] | Sequence[str]) -> str | None:
    """Return the most similar of the known names, in any case of letters; None if none is similar."""
    short = [each for each in known if len(each) <= _MAX_NAME_CHARS][:_MAX_COLUMNS]
    by_case = {each.casefold(): each for each in short}
    found = get_close_matches(name.casefold(), list(by_case), n=1)
    return by_case[found[0]] if found else None


def did_you_mean(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: a similar one; "" if there is none."""
    found = near(name, known)
    if found is None:
        return ""
    return f"; did you mean {found!r}?"


def columns_option(columns: Mapping[str, str]) -> str:
    """Return the command-line option that sets `data.columns`."""
    return f"--data.columns={_escape_invisible(json.dumps(columns, ensure_ascii=False, separators=(',', ':')))}"


def ignore_option(names: Sequence[str]) -> str:
    """Return the command-line option that sets `data.ignore_columns`."""
    return f"--data.ignore_columns={_escape_invisible(json.dumps(list(names), ensure_ascii=False))}"


def key_option(key: str, name: str) -> str:
    """Return the command-line option that sets a key to a text, which is JSON if the bare text would be ambiguous."""
    is_bare = name.isprintable() and not name.startswith('"') and name != "null"
    value = name if is_bare else _escape_invisible(json.dumps(name, ensure_ascii=False))
    return f"--{key}={value}"


def shell_quoted(word: str) -> str:
    """Quote a word such as `--key=value` for a shell."""
    key, _, value = word.partition("=")
    return f"{key}={shlex.quote(value)}"


def advice(row: Row, columns: Columns | None, kind: str) -> str:
    """Return advice about a row whose columns fit no format: the option to add, filled in as far as possible."""
    if columns is not None:
        what = ", ".join(f"{column!r} as {field}" for field, column in columns.items() if field in FIELD_MEANINGS)
        return f"to read {what}, add {shell_quoted(columns_option(columns))}"
    fields = fields_of(kind)
    if not fields:
        return "say in data.columns which columns they are"
    template = shell_quoted(columns_option(dict.fromkeys(fields, "…")))
    return f"say in data.columns which columns they are: {template}, with one of {column_names(row)} for each …"


def column_names(row: Row) -> str:
    """Return the columns of a row, for a sentence."""
    return ", ".join(map(repr, row)) or "none"


def _escape_invisible(text: str) -> str:
    """Return JSON with its unprintable characters as escapes."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _is_read(fields: Row, formats: Sequence[DataFormat]) -> bool:
    """Return True if the first of the formats that fits can convert a row."""
    for each in formats:
        try:
            if each.matches(fields):
                return each.convert(fields) is not None
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
    return False


def _proposals(kind: str, columns: _RowColumns) -> Iterator[Columns]:
    """Yield proposals for a kind of rows, the best first. {} stands for none."""
    if kind not in _FIELDS:
        return
    question, answer = columns.question_and_answer()
    extra = _named(input=columns.named("input", question, answer), system=columns.named("system"))
    rest = columns.rest if kind == "prompt" else lambda *used: {}
    tools = {"tools": "tools"} if "tools" in columns.row else {}
    label = columns.label()
    if columns.turns:
        own = {**_named(system=extra.get("system")), **tools, **rest(columns.turns)}
        for field in ("messages", "conversations"):
            yield from _of_kind(kind, {field: columns.turns, **own}, columns, label)
    if kind == "prompt" and question is None:
        question = columns.only_text()
    if kind in ("conversation", "unpaired"):
        question, answer = columns.infer_other_column(question, answer)
    if question is None:
        if kind == "preference":
            yield from _of_kind(kind, {}, columns, label)
        return
    if kind in ("conversation", "unpaired") and answer is None:
        return
    prompt = {"instruction": question, **extra} if extra else {"prompt": question}
    used = (question, *extra.values())
    if kind == "prompt":
        yield {**prompt, **rest(*used)}
        yield {"prompt": question, **rest(question)}
    elif kind == "preference":
        yield from _of_kind(kind, prompt, columns, label)
        yield from _of_kind(kind, {"prompt": question}, columns, label)
    else:
        answer = answer or ""
        label_field = _named(label=label) if kind == "unpaired" else {}
        if kind == "unpaired" and not label_field:
            return
        if kind == "conversation" or extra:
            yield {"instruction": question, **extra, "output": answer, **label_field}
        yield {"prompt": question, "completion": answer, **label_field}
        yield {"src": question, "tgt": answer, **label_field}


def _of_kind(kind: str, prompt: Columns, columns: _RowColumns, label: str | None) -> Iterator[Columns]:
    """Yield the fields of a prompt, completed by the other fields of a kind of rows."""
    if kind in ("conversation", "prompt"):
        yield prompt
    elif kind == "unpaired" and label is not None:
        yield {**prompt, "label": label}
    elif kind == "preference":
        taken = tuple(prompt.values())
        chosen = columns.named("chosen", *taken)
        rejected = columns.named("rejected", *taken)
        if chosen is not None and rejected is not None:
            yield {**prompt, "chosen": chosen, "rejected": rejected}


def _named(**fields: str | None) -> Columns:
    return {field: column for field, column in fields.items() if column is not None}


class _RowColumns:
    """Columns of a row, searched by name and type of value."""

    def __init__(self, row: Row):
        self.row = row
        # a name with braces would be a template, and addresses are not shown, as they may have secrets
        self._names = [name for name in row if not is_template(name) and redacted(name) == name]
        self._texts = [name for name in self._names if isinstance(row[name], str)]
        self.turns = next((name for name in self._names if _are_turns(row[name])), None)

    def named(self, what: str, *but: str | None) -> str | None:
        """Return the column whose name fits a meaning best, except the columns of `but`; None if there is none."""
        if what == "input" and (not but or but[0] is None):  # an input needs a question, the first of `but`
            return None
        names = [name for name in self._names if name not in but]
        if what in ("text", "input", "system"):
            names = [name for name in names if isinstance(self.row[name], str)]
        return self._best(names, what)

    def _best(self, names: Sequence[str], what: str) -> str | None:
        """Return the first of the names with the lowest rank for a meaning; None if none has a rank."""
        best: tuple[tuple[int, int], str] | None = None
        for name in names:
            rank = _rank(name, what)
            if rank is not None and (best is None or rank < best[0]):
                best = rank, name
        return None if best is None else best[1]

    def question_and_answer(self) -> tuple[str | None, str | None]:
        """Return the columns of question and answer. A name that fits both has the meaning with the lower rank."""
        question = self.named("question")
        answer = self.named("answer")
        if question is not None and question == answer:
            asks = _rank(question, "question")
            answers = _rank(question, "answer")
            if asks is not None and answers is not None and answers < asks:
                question = self.named("question", answer)
            else:
                answer = self.named("answer", question)
        return question, answer

    def label(self) -> str | None:
        """Return the column of labels: one with true or false and a fitting name, or the only one with such values."""
        flags = [name for name in self._names if _is_flag(self.row[name])]
        named = self._best(sorted(flags), "label")
        if named is not None:
            return named
        return flags[0] if len(flags) == 1 else None

    def only_text(self) -> str | None:
        """Return the column of text; None unless there is exactly one."""
        if len(self._texts) == 1:
            return self._texts[0]
        return None

    def infer_other_column(self, question: str | None, answer: str | None) -> tuple[str | None, str | None]:
        """Return question and answer; a missing one is the other column of text, if there is exactly one."""
        if (question is None) == (answer is None):
            return question, answer
        others = [name for name in self._texts if name not in (question, answer) and not _is_flag(self.row[name])]
        if len(others) == 1:
            return question or others[0], answer or others[0]
        return question, answer

    def rest(self, *used: str | None) -> Columns:
        """Return the unused columns, for rewards, under their own names; an answer becomes "answer"."""
        left = {name: name for name in self._names if name not in used and name not in _READ_BY_PROMPTS}
        answer = self.named("answer", *used)
        if answer is not None and "answer" not in self.row:
            left.pop(answer, None)
            left["answer"] = answer
        return left


def _rank(name: str, what: str) -> tuple[int, int] | None:
    """Rank of a column's name for a meaning, the lowest the surest; None if it does not fit."""
    words = _words(what)
    plain = _folded(name)
    parts = _folded(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)).split()
    if plain.replace(" ", "_") in words:
        return (0, words.index(plain.replace(" ", "_")))
    if what in ("input", "system"):  # part of too many names
        return None
    # the last word of a name decides: an `answer_to_question` ranks by its distance from the end
    ranks = [(len(parts) - i, words.index(part)) for i, part in enumerate(parts) if part in words and len(part) > 1]
    return min(ranks) if ranks else None


@functools.cache
def _words(what: str) -> list[str]:
    return [_folded(word).replace(" ", "_") for word in _CALLED[what].split()]


def _folded(name: str) -> str:
    """Return a name in lower case without accents, its words separated by spaces."""
    split = unicodedata.normalize("NFKD", name.casefold())
    without_accents = "".join(char for char in split if not unicodedata.combining(char))
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFC", without_accents).replace("_", " ")))


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    speaker = None
    if isinstance(value, Mapping):
        speaker = value.get("role", value.get("from"))
    return isinstance(speaker, str) and speaker in (*ROLES, *SHAREGPT_ROLES)


def _is_flag(value: Any) -> bool:
    if isinstance(value, str):
        return value.casefold() in ("true", "false", "0", "1")
    return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
