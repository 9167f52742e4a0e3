"""Encodes a text that continues another one: an answer after its prompt.

A model receives the tokens of the prompt alone, and generates the next ones. So the tokens of the answer are those of
the full text after the tokens of the prompt. The answer alone may have other tokens: SentencePiece tokenizers, such as
those of Llama 2 and Mistral, begin every text with a space.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from llmsuite.data.tokenizer import TextTokenizer

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Maps texts to token ids, without special tokens."""


def encode_answers(
    texts: Sequence[tuple[str, str]], tokenizer: TextTokenizer, encode: Encode | None = None
) -> list[tuple[list[int], list[int]]]:
    """Encode prompts and the answers that follow them.

    Args:
        texts: for each sample the text before the answer, and that text with the answer.
        tokenizer: of the model.
        encode: a batch encoder of this tokenizer, such as one with a cache.

    Returns:
        For each sample, the ids of the prompt as generation encodes it, and those of the answer.
    """
    encode = encode or tokenizer.encode_batch
    ids = _encode_growing([text for both in texts for text in both], tokenizer, encode)
    prompts = ids[::2]
    full = ids[1::2]
    # a token may span the border, and generation has no such token: then the answer is encoded alone
    spanned = [i for i, prompt in enumerate(prompts) if full[i][: len(prompt)] != prompt]
    alone = encode_continuations([texts[i][1][len(texts[i][0]) :] for i in spanned], tokenizer, encode)
    answers = [sequence[len(prompt) :] for prompt, sequence in zip(prompts, full)]
    for i, answer in zip(spanned, alone):
        answers[i] = answer
    return list(zip(prompts, answers))


def _encode_growing(texts: Sequence[str], tokenizer: TextTokenizer, encode: Encode) -> list[list[int]]:
    """Encode texts of which most begin with the one before them, such as a conversation up to each of its turns.

    A text that continues the one before it is cut at the last border between tokens of that one; what is before this
    place is encoded once.
    """
    borders = tokenizer.borders
    if borders is None:
        return encode(texts)
    numbers: dict[str, int] = {}
    """Number of each part to encode."""
    shared: list[list[int]] = []
    """For each series of texts that continue each other, the parts that they have in common."""
    plan: list[tuple[int, int, int]] = []
    """For each text its series, the number of parts in common, and the part that follows them."""
    before: str | None = None
    done = 0
    for text in texts:
        if before is None or not text.startswith(before):
            shared.append([])
            done = 0
        else:
            begins = [match.start() for match in borders.finditer(before, done + 1)]
            if begins:
                shared[-1].append(numbers.setdefault(before[done : begins[-1]], len(numbers)))
                done = begins[-1]
        plan.append((len(shared) - 1, len(shared[-1]), numbers.setdefault(text[done:], len(numbers))))
        before = text
    parts = encode(list(numbers))
    joined = []
    ends = []
    for series in shared:
        joined.append([token for part in series for token in parts[part]])
        ends.append([0, *itertools.accumulate(len(parts[part]) for part in series)])
    return [joined[series][: ends[series][count]] + parts[rest] for series, count, rest in plan]


def encode_continuations(
    texts: Sequence[str], tokenizer: TextTokenizer, encode: Encode | None = None
) -> list[list[int]]:
    """Encode texts that follow any other text: without the prefix that the tokenizer adds to the start of a text."""
    encode = encode or tokenizer.encode_batch
    found: list[list[int] | None] = [None] * len(texts)
    for anchor in tokenizer.anchors:
        left = [i for i, ids in enumerate(found) if ids is None]
        begin = tokenizer.encode(anchor)
        for i, ids in zip(left, encode([anchor + texts[i] for i in left])):
            # anchor and beginning of a text may merge into one token: then the next anchor is tried
            if ids[: len(begin)] == begin:
                found[i] = ids[len(begin) :]
    left = [i for i, ids in enumerate(found) if ids is None]
    for i, ids in zip(left, encode([texts[i] for i in left])):
        found[i] = ids
    return [ids for ids in found if ids is not None]


def encode_apart(texts: Sequence[str], tokenizer: TextTokenizer, encode: Encode) -> list[list[int]]:
    """Encode texts, each for itself, as transformers 5 does. Its class LlamaTokenizer puts a space in front of a text
    only where it has none, whatever tokenizer.json says."""
    if not tokenizer.prepends_space:
        return encode(texts)
    ids = encode([text.removeprefix(" ") for text in texts])
    for i, text in enumerate(texts):
        if text == " ":
            ids[i] = [tokenizer.token_id("▁")]
    return ids
