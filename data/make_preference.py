"""Write the preference rows under data/preference: short questions whose answer a program can check.

Every question also says what form the answer must have. The chosen answer is right in value and form; the
rejected one fails in form (half of the rows), in value, or in both.

Usage:

    python data/make_preference.py            write the files
    python data/make_preference.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, cycle, permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import generated

HERE = Path(__file__).resolve().parent
SOURCE: dict[str, Any] = json.loads((HERE / "preference_source.json").read_text(encoding="ascii"))
"""The templates of every task and the words they are filled with."""

SEED = 20240607
TRAIN_PER_TASK = 35
EVAL_PER_TASK = 6
PER_TASK = TRAIN_PER_TASK + EVAL_PER_TASK

Row = dict[str, Any]
Fact = dict[str, str]
"""What one question is about: the fields of its templates, the right "answer" and a "wrong" one."""


class Flaw(NamedTuple):
    """How a rejected answer fails."""

    chatty: bool
    """Whether the value is wrapped in talk instead of having the form asked for."""
    value: str
    """Which field of the fact is given as the value."""


FLAWS = (Flaw(True, "answer"), Flaw(False, "wrong"), Flaw(True, "answer"), Flaw(True, "wrong"))


def is_right(row: Row, answer_text: str) -> bool:
    """Whether a text is the answer of the row and nothing else, save for case and one final full stop."""
    answer: str = row["answer"]
    return answer_text.strip().removesuffix(".").lower() == answer.lower()


def _sums(rng: random.Random) -> list[Fact]:
    facts = []
    for pair in rng.sample(list(combinations(range(2, 60), 2)), PER_TASK):
        a, b = rng.sample(pair, 2)
        wrong = a + b + rng.choice((-2, -1, 1, 2, 10))
        facts.append({"a": str(a), "b": str(b), "answer": str(a + b), "wrong": str(wrong)})
    return facts


def _differences(rng: random.Random) -> list[Fact]:
    # With a = 2b the right answer is an operand, and would stand in a rejected answer meant to be wrong.
    pairs = [(a, b) for b, a in combinations(range(2, 60), 2) if a != 2 * b]
    facts = []
    for a, b in rng.sample(pairs, PER_TASK):
        wrong = a - b + rng.choice((-1, 1, 2, 10))
        facts.append({"a": str(a), "b": str(b), "answer": str(a - b), "wrong": str(wrong)})
    return facts


def _comparisons(rng: random.Random) -> list[Fact]:
    facts = []
    for index, (low, high) in enumerate(rng.sample(list(combinations(range(2, 100), 2)), PER_TASK)):
        relation = rng.choice(("greater", "smaller"))
        # Taking turns keeps both splits balanced: always saying yes must not pay.
        answer, wrong = ("yes", "no") if index % 2 == 0 else ("no", "yes")
        a, b = (high, low) if (relation == "greater") == (answer == "yes") else (low, high)
        facts.append({"a": str(a), "b": str(b), "relation": relation, "answer": answer, "wrong": wrong})
    return facts


def _letters(rng: random.Random) -> list[Fact]:
    facts = []
    for word in rng.sample(SOURCE["words"], PER_TASK):
        wrong = len(word) + rng.choice((-1, 1, 2))
        facts.append({"word": word, "answer": str(len(word)), "wrong": str(wrong)})
    return facts


def _sorts(rng: random.Random) -> list[Fact]:
    # Different first letters keep the question within reach of a small model.
    words = sorted(SOURCE["words"])
    trios = [trio for trio in combinations(words, 3) if len({word[0] for word in trio}) == 3]
    facts = []
    for trio in rng.sample(trios, PER_TASK):
        right, *others = (", ".join(order) for order in permutations(trio))
        given, wrong = rng.choices(others, k=2)
        facts.append({"words": given, "answer": right, "wrong": wrong})
    return facts


def _last_words(rng: random.Random) -> list[Fact]:
    sentences = list(product(SOURCE["subjects"], SOURCE["verbs"], SOURCE["places"]))
    facts = []
    for subject, verb, place in rng.sample(sentences, PER_TASK):
        wrong = rng.choice((subject, verb.split()[0]))
        facts.append({"sentence": f"The {subject} {verb} the {place}", "answer": place, "wrong": wrong})
    return facts


def _opposites(rng: random.Random) -> list[Fact]:
    return _looked_up(SOURCE["opposites"], rng)


def _capitals(rng: random.Random) -> list[Fact]:
    return _looked_up(SOURCE["capitals"], rng)


def _looked_up(table: list[list[str]], rng: random.Random) -> list[Fact]:
    entries = rng.sample(table, PER_TASK)
    return [{"key": key, "answer": right, "wrong": wrong} for key, right, wrong in entries]


FACTS: dict[str, Callable[[random.Random], list[Fact]]] = {
    "sum": _sums,
    "difference": _differences,
    "compare": _comparisons,
    "letters": _letters,
    "sort": _sorts,
    "last_word": _last_words,
    "opposite": _opposites,
    "capital": _capitals,
}


def _row(task: str, fact: Fact, flaw: Flaw, rng: random.Random) -> Row:
    templates = SOURCE["tasks"][task]
    question = rng.choice(templates["questions"]).format(**fact)
    form = rng.choice(SOURCE["forms"][templates["form"]])
    rejected = fact[flaw.value]
    if flaw.chatty:
        rejected = rng.choice(templates["chatty"]).format(value=rejected, **fact)
    return {
        "prompt": [{"role": "user", "content": f"{question} {form}"}],
        "chosen": [{"role": "assistant", "content": fact["answer"]}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "task": task,
        "answer": fact["answer"],
    }


def build() -> dict[str, list[Row]]:
    """The rows of both splits. The splits share no fact, so no question of one is rephrased in the other."""
    drafts: dict[str, list[tuple[str, Fact]]] = {"train": [], "eval": []}
    for task, make_facts in FACTS.items():
        # A generator of its own for each task: changing one task leaves the facts of the others as they are.
        facts = make_facts(random.Random(f"{SEED} {task}"))
        drafts["train"] += [(task, fact) for fact in facts[:TRAIN_PER_TASK]]
        drafts["eval"] += [(task, fact) for fact in facts[TRAIN_PER_TASK:]]
    splits = {}
    for split, pairs in drafts.items():
        rng = random.Random(f"{SEED} {split}")
        rng.shuffle(pairs)
        splits[split] = [_row(task, fact, flaw, rng) for (task, fact), flaw in zip(pairs, cycle(FLAWS))]
    return splits


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split, rows in build().items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        contents[HERE / "preference" / f"{split}.jsonl"] = lines.encode("ascii")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the preference rows under data/preference.", argv)


if __name__ == "__main__":
    sys.exit(main())
