"""How near generated texts are to references, character by character as PaddleNLP's run_finetune.py has it, so that
texts of any language count alike."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Sequence

_GAMMA = 1.2
"""Weight of recall in ROUGE-L."""


def scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU-4, ROUGE-1, ROUGE-2, ROUGE-L and the share of texts that are equal to their references.

    The same numbers as of `paddlenlp.metrics`, and 0 where those divide by 0.

    Args:
        texts: that were generated, at least one.
        references: as many.
    """
    pairs = list(zip(texts, references, strict=True))
    return {
        "bleu4": _bleu(pairs, 4),
        "rouge1": _rouge(pairs, 1),
        "rouge2": _rouge(pairs, 2),
        "rougel": math.fsum(_rouge_l(*pair) for pair in pairs) / len(pairs),
        "exact_match": sum(text == reference for text, reference in pairs) / len(pairs),
    }


def _ngrams(text: str, size: int) -> collections.Counter[str]:
    return collections.Counter(text[i : i + size] for i in range(len(text) - size + 1))


def _bleu(pairs: Sequence[tuple[str, str]], longest: int) -> float:
    """BLEU of all texts together (Papineni et al. 2002), without smoothing: next to 0 where an order has no match."""
    length, wanted = (sum(len(pair[i]) for pair in pairs) for i in (0, 1))
    if not length:
        return 0.0
    logs = 0.0
    for size in range(1, longest + 1):
        found = [(_ngrams(text, size), _ngrams(reference, size)) for text, reference in pairs]
        total = sum(sum(own.values()) for own, _ in found)
        matches = sum(sum((own & other).values()) for own, other in found)
        logs += math.log(matches / total if matches else sys.float_info.min) / longest
    return math.exp(min(1 - wanted / length, 0)) * math.exp(logs)


def _rouge(pairs: Sequence[tuple[str, str]], size: int) -> float:
    """ROUGE-N (Lin 2004): the share of the different n-grams of all references that are in their texts."""
    found = [(_ngrams(text, size).keys(), _ngrams(reference, size).keys()) for text, reference in pairs]
    total = sum(len(other) for _, other in found)
    return sum(len(own & other) for own, other in found) / total if total else 0.0


def _rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (Lin 2004): precision and recall of the longest common subsequence."""
    common = common_subsequence(text, reference)
    if not common:
        return 0.0
    precision, recall = common / len(text), common / len(reference)
    return (1 + _GAMMA**2) * precision * recall / (recall + _GAMMA**2 * precision)


def common_subsequence(a: str, b: str) -> int:
    """Length of the longest common subsequence, a column of its table at a time as the bits of a number (Hyyro 2004,
    "Bit-parallel LCS-length computation revisited")."""
    places: dict[str, int] = {}
    for i, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << i
    whole = (1 << len(a)) - 1
    column = whole
    for letter in b:
        matches = column & places.get(letter, 0)
        column = ((column + matches) | (column - matches)) & whole
    return len(a) - column.bit_count()
