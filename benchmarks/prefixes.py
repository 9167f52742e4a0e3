"""Seconds to the first token of `llmsuite serve`, with a system prompt that it has read before and with a new one.

    llmsuite serve MODEL --port 8000 &
    python benchmarks/prefixes.py --url http://127.0.0.1:8000 --system_tokens 500

Requests take turns: one whose system prompt was asked with before, and one whose is new from its first word on, of as
many words. The median over `--rounds` counts; the server tells how many tokens it knew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import urllib.request
from typing import Any

WORDS = "answer each question in one short line and say so when it is not known to you or was asked before"


def first_token(url: str, system: str, question: str) -> tuple[float, dict[str, Any]]:
    """Seconds until the first text of an answer, and what the server says of its tokens."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    asked = {"messages": turns, "max_tokens": 4, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    begun = time.perf_counter()
    seconds = None
    usage = {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if seconds is None and any(choice["delta"].get("content") for choice in event["choices"]):
                seconds = time.perf_counter() - begun
            usage = event.get("usage") or usage
    if seconds is None:
        raise SystemExit("an answer has no text; choose another model, or ask something else")
    return seconds, usage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--system_tokens", type=int, default=500, help="words of the system prompt, about a token each")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    draw = random.Random(0)
    words = WORDS.split()

    def system() -> str:
        return " ".join(draw.choice(words) for _ in range(arguments.system_tokens))

    known = system()
    seconds = {"known": list[float](), "new": list[float]()}
    told = dict[str, Any]()
    first_token(arguments.url, known, "Hello?")
    for number in range(arguments.rounds):
        for kind, text in (("known", known), ("new", system())):
            needed, told[kind] = first_token(arguments.url, text, f"What is {number}?")
            seconds[kind].append(needed)
    for kind, values in seconds.items():
        usage = told[kind]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        middle = statistics.median(values)
        print(f"{kind}: {middle:.3f} s to the first token ({min(values):.3f} to {max(values):.3f}), {cached} of "
              f"{usage['prompt_tokens']} tokens known")  # fmt: skip
    ratio = statistics.median(new / old for new, old in zip(seconds["new"], seconds["known"]))
    print(f"a known system prompt is {ratio:.1f} times as fast")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
