"""Teaches a model the style of 50 rows, and shows its answers to questions that are not among them, before and after.

    python examples/style/demo.py models/smollm2-135m-instruct

`make demo` downloads the model and runs this.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import llmsuite

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "llama" / "smollm2-style.json"
QUESTIONS = (
    "What is the capital of Italy?",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Who wrote Romeo and Juliet?",
    "Write a sentence about the rain.",
    "Good morning!",
)
"""Questions to the model, none of which is in data/style/harbour.csv."""
MAX_NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model to train, such as models/smollm2-135m-instruct")
    parser.add_argument("--output_dir", default="runs/demo", help="directory of the run (default: %(default)s)")
    args = parser.parse_args()

    times = {}
    started = time.monotonic()
    before = llmsuite.generate(args.model, QUESTIONS, max_new_tokens=MAX_NEW_TOKENS)
    times["answers before"] = time.monotonic() - started

    started = time.monotonic()
    run = llmsuite.train(RECIPE, {"model.weights": args.model, "output_dir": args.output_dir})
    times["training"] = time.monotonic() - started

    started = time.monotonic()
    after = llmsuite.generate(run.output_dir, QUESTIONS, max_new_tokens=MAX_NEW_TOKENS)
    times["answers after"] = time.monotonic() - started

    table = Table("question", "before", "after", show_lines=True)
    for row in zip(QUESTIONS, before, after):
        table.add_row(*(text.replace("\n", " ") for text in row))
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(", ".join(f"{what}: {seconds:.0f} s" for what, seconds in times.items()))


if __name__ == "__main__":
    main()
