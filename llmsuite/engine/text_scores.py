"""Similarity of generated texts and references, computed on characters as in PaddleNLP's run_finetune.py, so that texts
of all languages are comparable."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Sequence

_GAMMA = 1.2
"""Weight of recall in ROUGE-L."""


def scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compute BLEU-4, ROUGE-1, ROUGE-2, ROUGE-L and the share of texts that are equal to their references.

    The values equal those of `paddlenlp.metrics`, and are 0 where those divide by 0.

    Args:
        texts: generated texts, at least one.
        references: reference of each text.
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
    """Corpus BLEU (Papineni et al. 2002), without smoothing: close to 0 where an n-gram order has no match."""
    length = sum(len(text) for text, _ in pairs)
    reference_length = sum(len(reference) for _, reference in pairs)
    if not length:
        return 0.0
    logs = 0.0
    for size in range(1, longest + 1):
        counts = [(_ngrams(text, size), _ngrams(reference, size)) for text, reference in pairs]
        total = sum(sum(own.values()) for own, _ in counts)
        matches = sum(sum((own & other).values()) for own, other in counts)
        # the smallest float instead of log(0)
        logs += math.log(matches / total if matches else sys.float_info.min) / longest
    return math.exp(min(1 - reference_length / length, 0)) * math.exp(logs)


def _rouge(pairs: Sequence[tuple[str, str]], size: int) -> float:
    """ROUGE-N (Lin 2004): share of the distinct n-grams of all references that occur in their texts."""
    ngrams = [(_ngrams(text, size).keys(), _ngrams(reference, size).keys()) for text, reference in pairs]
    total = sum(len(other) for _, other in ngrams)
    return sum(len(own & other) for own, other in ngrams) / total if total else 0.0


def _rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (Lin 2004): precision and recall of the longest common subsequence."""
    common = common_subsequence(text, reference)
    if not common:
        return 0.0
    precision = common / len(text)
    recall = common / len(reference)
    return (1 + _GAMMA**2) * precision * recall / (recall + _GAMMA**2 * precision)


def common_subsequence(a: str, b: str) -> int:
    """Compute the length of the longest common subsequence. Each column of the table is the bits of one integer (Hyyro
    2004, "Bit-parallel LCS-length computation revisited")."""
    positions: dict[str, int] = {}
    for i, letter in enumerate(a):
        positions[letter] = positions.get(letter, 0) | 1 << i
    all_bits = (1 << len(a)) - 1
    column = all_bits
    for letter in b:
        matches = column & positions.get(letter, 0)
        column = ((column + matches) | (column - matches)) & all_bits
    return len(a) - column.bit_count()
