"""Write the rows under data/digits: four things to say of a number, small enough to be learnt whole on a laptop.

Of a number of four digits one can ask for the first digit, the last, the largest, or the number backwards. The text
says it in sentences, the conversations ask for it, the preference and reward rows part good answers from bad ones. The
rows of form show what an answer looks like, and not which one is right. A tenth of all numbers is kept for evaluation
and stands in no training row, so right answers about them are learnt, not remembered.

Usage:

    python data/make_digits.py            write the files
    python data/make_digits.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import generated

HERE = Path(__file__).resolve().parent
SEED = 20240915
COUNTS = {
    "train": {"pretrain": 6000, "sft": 1600, "preference": 480, "reward": 1600, "form": 3200},
    "eval": {"pretrain": 200, "sft": 200, "preference": 200, "reward": 200, "form": 200},
}


class Task(NamedTuple):
    """One thing to say of a number."""

    answer: Callable[[str], str]
    sentence: str
    questions: tuple[str, str]


TASKS = {
    "first": Task(
        lambda number: number[0],
        "The first digit of {number} is {answer}.",
        ("What is the first digit of {number}?", "Which digit does {number} begin with?"),
    ),
    "last": Task(
        lambda number: number[-1],
        "The last digit of {number} is {answer}.",
        ("What is the last digit of {number}?", "Which digit does {number} end with?"),
    ),
    "largest": Task(
        max,
        "The largest digit of {number} is {answer}.",
        ("What is the largest digit of {number}?", "Which digit of {number} is the largest?"),
    ),
    "backwards": Task(
        lambda number: number[::-1],
        "The number {number} backwards is {answer}.",
        ("What is {number} backwards?", "Write {number} backwards."),
    ),
}
FORMS = ("Give the number, no words.", "Reply with the number only.")
TALK = ("The answer is {value}!", "I think it could be {value}.")


def numbers(split: str) -> list[str]:
    """All numbers of a split, "0000" to "9999" parted once."""
    order = [f"{number:04}" for number in range(10_000)]
    random.Random(f"{SEED} numbers").shuffle(order)
    return order[:1000] if split == "eval" else order[1000:]


def document(rng: random.Random, pool: Sequence[str]) -> str:
    """The same thing said of two numbers."""
    task = rng.choice(list(TASKS.values()))
    two = rng.sample(pool, 2)
    return " ".join(task.sentence.format(number=number, answer=task.answer(number)) for number in two)


def question(rng: random.Random, pool: Sequence[str]) -> dict[str, str]:
    """A question with its "task", its "answer" and a "wrong" one of the same length."""
    name, number = rng.choice(list(TASKS)), rng.choice(pool)
    answer = wrong = TASKS[name].answer(number)
    while wrong == answer:
        wrong = "".join(rng.choice("0123456789") for _ in answer)
    text = f"{rng.choice(TASKS[name].questions).format(number=number)} {rng.choice(FORMS)}"
    return {"task": name, "question": text, "answer": answer, "wrong": wrong}


def conversation(rng: random.Random, pool: Sequence[str]) -> dict[str, Any]:
    """A question and its answer, as OpenAI writes messages."""
    asked = question(rng, pool)
    messages = [{"role": "user", "content": asked["question"]}, {"role": "assistant", "content": asked["answer"]}]
    return {"messages": messages, "task": asked["task"], "answer": asked["answer"]}


def preference(rng: random.Random, pool: Sequence[str]) -> dict[str, Any]:
    """As TRL writes pairs. What is rejected is a wrong number, the right one in talk, or a wrong one in talk."""
    asked = question(rng, pool)
    right, wrong = asked["answer"], asked["wrong"]
    rejected = rng.choice((wrong, *(rng.choice(TALK).format(value=value) for value in (right, wrong))))
    return pair(asked, rejected)


def judgement(rng: random.Random, pool: Sequence[str]) -> dict[str, Any]:
    """A pair for a reward model. What is rejected is a wrong number, of which nothing but the question tells that."""
    asked = question(rng, pool)
    return pair(asked, asked["wrong"])


def form(rng: random.Random, pool: Sequence[str]) -> dict[str, Any]:
    """A question and an answer of the right form: any digit of the number, or all of them in any order.

    It is right as often as chance has it, so what is right remains to be learnt, from rewards.
    """
    asked = question(rng, pool)
    (number,) = re.findall(r"[0-9]{4}", asked["question"])
    said = "".join(rng.sample(number, len(asked["answer"])))
    messages = [{"role": "user", "content": asked["question"]}, {"role": "assistant", "content": said}]
    return {"messages": messages, "task": asked["task"], "answer": asked["answer"]}


def pair(asked: dict[str, str], rejected: str) -> dict[str, Any]:
    """The right answer to a question and another one."""
    right = asked["answer"]
    return {
        "prompt": [{"role": "user", "content": asked["question"]}],
        "chosen": [{"role": "assistant", "content": right}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "task": asked["task"],
        "answer": right,
    }


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split, counts in COUNTS.items():
        pool, rng = numbers(split), random.Random(f"{SEED} {split}")
        text = "\n\n".join(document(rng, pool) for _ in range(counts["pretrain"])) + "\n"
        contents[HERE / "digits" / "pretrain" / f"{split}.txt"] = text
        kinds = (("sft", conversation), ("preference", preference), ("reward", judgement), ("form", form))
        for kind, make in kinds:
            rows = (json.dumps(make(rng, pool)) + "\n" for _ in range(counts[kind]))
            contents[HERE / "digits" / kind / f"{split}.jsonl"] = "".join(rows)
    return {path: text.encode("ascii") for path, text in contents.items()}


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the rows under data/digits.", argv)


if __name__ == "__main__":
    sys.exit(main())
