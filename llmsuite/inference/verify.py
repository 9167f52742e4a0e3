"""Compares an exported model with the trained one: files, logits and greedy tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from llmsuite.errors import UserError
from llmsuite.files import MANIFEST, broken_file, read_json_object, sha256_of
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.exported import read_manifest
from llmsuite.inference.generate import generate
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.sampling import Sampling
from llmsuite.regular import is_file

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-3, "int8": 1e-1}
"""Largest difference of logits, as a share of the largest logit, by precision.

Where inputs of products are rounded to bfloat16, a last bit of float32 turns a number that lies between two of them to
the other one. After a few layers two programs round independently of each other. One rounding is off by 2^-8 / √6 (root
of the mean square), two differ by 2^-8 / √3, and with signs at random so do outputs of a product, relative to their
size. Behind 2 L of them that is √(2 L) 2^-8 / √3: 1.7e-2 for the 30 layers of SmolLM2-135M, where 7e-3 are measured.
"""
_PROMPTS, _LENGTHS, _TOKENS = 4, (1, 24), 24


class OtherLogits(UserError):
    """An exported model has other logits than the trained one."""


def check_files(directory: Path, source: Path, adapter: Path | None = None) -> int:
    """Compare the sha256 of an exported model's files, and of those it was made of; returns how many.

    `source` is where these lie now: a model directory, with the directory of the `adapter` that was added to it.

    Raises:
        UserError: naming the first that is not as it was.
    """
    exported = read_manifest(directory)
    if broken := broken_file(directory):
        raise UserError(f"{broken}; export the model again")
    places = [source, *source.parents[:2], *([adapter] if adapter else [])]
    for name, digest in exported.source_sha256.items():
        path = next((place / name for place in places if is_file(place / name)), None)
        if path is None:
            way = "--source" if adapter is None else "--source, or the model of the adapter with --base"
            raise UserError(f"{source / name}: is missing, so nothing can be compared with it; name it with {way}")
        if sha256_of(path) != digest:
            raise UserError(f"{path}: is not what {directory} was exported from; export the model again")
    return len(exported.source_sha256) + len(read_json_object(directory / MANIFEST)["files"])


def compare_loop(exported: Predictor, trained: Decoder, precision: str = "fp32", seed: int = 0) -> int:
    """Greedy answers of the program with the decoding loop, to padded prompts and with a stop token, beside those of
    the model; returns how many tokens are the same.

    Raises:
        UserError: they differ.
    """
    random, count = np.random.default_rng(seed), 0
    longest = min(_LENGTHS[1], exported.max_length // 2)
    lengths = [longest, *random.integers(_LENGTHS[0], longest + 1, _PROMPTS - 1)]
    prompts = [[int(i) for i in random.integers(0, exported.vocab_size, n)] for n in lengths]
    greedy = Sampling(max_new_tokens=min(_TOKENS, exported.max_length - longest))
    whole = exported.greedy(prompts, greedy.max_new_tokens)
    for prompt, answer in zip(prompts, whole):
        count += _follow(answer, trained, prompt, precision)
    stop = whole[0][len(whole[0]) // 2]
    expected = [list(itertools.takewhile(lambda token: token != stop, answer)) for answer in whole]
    found = exported.greedy(prompts, greedy.max_new_tokens, {stop})
    if found != expected:
        raise UserError(f"the decoding loop does not end at token {stop}: {found} for {whole}")
    return count + sum(len(answer) for answer in found)


def _follow(answer: list[int], trained: Decoder, prompt: list[int], precision: str) -> int:
    """Walk a trained model along the greedy tokens of an exported one; returns at how many it would choose the same. In
    float32 that is all of them; in a lower precision rounding may turn a choice between logits that differ by less than
    twice what the precision explains.

    Raises:
        UserError: it would not choose one of them.
    """
    margin = 0.0 if precision == "fp32" else 2 * TOLERANCE[precision]
    count, cache, new = 0, None, prompt
    for place, token in enumerate(answer):
        logits, cache = trained.forward(np.asarray([new], "int64"), np.zeros(1, "int64"), cache)
        best = int(logits[0].argmax())
        if not logits[0, best] - logits[0, token] <= margin * np.abs(logits).max():
            raise UserError(f"greedy tokens differ behind {answer[:place]}: {token} exported, {best} trained")
        count, new = count + (token == best), [token]
    return count


def compare(exported: Decoder, trained: Decoder, precision: str, seed: int = 0) -> tuple[int, float, int]:
    """Logits of padded prompts and of the passes that follow, then greedy answers; random tokens, from the seed.

    Returns:
        How many logits were compared, their largest difference as a share of the largest, and how many greedy tokens
        are the same.

    Raises:
        OtherLogits: they differ by more than the precision explains.
        UserError: greedy tokens do.
    """
    random = np.random.default_rng(seed)
    longest = min(_LENGTHS[1], exported.max_length // 2)
    lengths = [longest, *random.integers(_LENGTHS[0], longest + 1, _PROMPTS - 1)]
    padding = np.asarray([longest - n for n in lengths], "int64")
    ids = random.integers(0, exported.vocab_size, [_PROMPTS, longest])
    ids[np.arange(longest) < padding[:, None]] = 0
    caches, count, difference = [None, None], 0, 0.0
    for step in range(4):
        new = ids if step == 0 else random.integers(0, exported.vocab_size, [_PROMPTS, 1])
        results = [d.forward(new, padding, c) for d, c in zip((exported, trained), caches)]
        caches = [cache for _, cache in results]  # type: ignore[misc]
        ours, theirs = (logits for logits, _ in results)
        difference = max(difference, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
        count += ours.size
    if not difference <= TOLERANCE[precision]:  # also when it is no number
        raise OtherLogits(
            f"FAILED: exported logits are off by {100 * difference:.3g}% of the largest ({precision} tolerance "
            f"{100 * TOLERANCE[precision]:.3g}%)"
        )
    num_tokens, greedy = 0, Sampling(max_new_tokens=min(_TOKENS, exported.max_length - longest))
    for row, start in zip(ids, padding):
        prompt = [int(i) for i in row[start:]]
        num_tokens += _follow(list(generate(exported, prompt, set(), greedy)), trained, prompt, precision)
    return count, difference, num_tokens
