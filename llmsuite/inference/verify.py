"""Comparison of an exported model with the trained one: files, logits and greedy tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import MANIFEST, broken_file, read_json_object, sha256_of
from llmsuite.base.safe_files import is_file
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.export_manifest import read_manifest
from llmsuite.inference.generate import generate
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.sampling import Sampling

TOLERANCE = {"fp32": 3e-5, "bf16": 3e-2, "fp16": 3e-3, "int8": 1e-1}
"""Largest difference of logits, as a fraction of the largest logit, by precision.

Where inputs of matmuls are rounded to bfloat16, a last bit of float32 can flip a number that lies halfway between two
bfloat16 values. After a few layers two programs round independently of each other. One rounding has an error of
2^-8 / √6 (root mean square), two differ by 2^-8 / √3, and with random signs so do outputs of a matmul, relative to
their size. After 2 L matmuls that is √(2 L) 2^-8 / √3: 1.7e-2 for the 30 layers of SmolLM2-135M, where 7e-3 are
measured.
"""
_PROMPTS = 4
_LENGTHS = (1, 24)
_TOKENS = 24


class LogitsMismatch(UserError):
    """An exported model has other logits than the trained one."""


def check_files(directory: Path, source: Path, adapter: Path | None = None) -> int:
    """Compare the sha256 of an exported model's files and of its source files with the manifests.

    Args:
        directory: of the exported model.
        source: the model directory that it was exported from, at its present location.
        adapter: directory of the adapter that was added; None for none.

    Returns:
        Number of files.

    Raises:
        UserError: a file is missing or has changed; names the first one.
    """
    exported = read_manifest(directory)
    if broken := broken_file(directory):
        raise UserError(f"{broken}; export the model again")
    directories = [source, *source.parents[:2]]
    if adapter:
        directories.append(adapter)
    for name, digest in exported.source_sha256.items():
        path = next((path / name for path in directories if is_file(path / name)), None)
        if path is None:
            option = "--source" if adapter is None else "--source, or the model of the adapter with --base"
            raise UserError(f"{source / name}: is missing, so nothing can be compared with it; name it with {option}")
        if sha256_of(path) != digest:
            raise UserError(f"{path}: is not what {directory} was exported from; export the model again")
    return len(exported.source_sha256) + len(read_json_object(directory / MANIFEST)["files"])


def compare_loop(exported: Predictor, trained: Decoder, precision: str = "fp32", seed: int = 0) -> int:
    """Compare greedy answers of the program with the decoding loop, to padded prompts and with a stop token, with those
    of the model.

    Returns:
        Number of equal tokens.

    Raises:
        UserError: answers differ.
    """
    random = np.random.default_rng(seed)
    count = 0
    longest = min(_LENGTHS[1], exported.max_length // 2)
    lengths = [longest, *random.integers(_LENGTHS[0], longest + 1, _PROMPTS - 1)]
    prompts: list[list[int]] = [random.integers(0, exported.vocab_size, n).tolist() for n in lengths]
    greedy = Sampling(max_new_tokens=min(_TOKENS, exported.max_length - longest))
    answers = exported.greedy(prompts, greedy.max_new_tokens)
    for prompt, answer in zip(prompts, answers):
        count += _count_equal_tokens(answer, trained, prompt, precision)
    stop = answers[0][len(answers[0]) // 2]
    expected = []
    for answer in answers:
        expected.append(list(itertools.takewhile(lambda token: token != stop, answer)))
    found = exported.greedy(prompts, greedy.max_new_tokens, {stop})
    if found != expected:
        raise UserError(f"the decoding loop does not end at token {stop}: {found} for {answers}")
    return count + sum(len(answer) for answer in found)


def _count_equal_tokens(answer: list[int], trained: Decoder, prompt: list[int], precision: str) -> int:
    """Feed the greedy tokens of an exported model to the trained one; returns the number of those that the trained
    model would choose too. In float32 that is all of them; in a lower precision rounding may flip the choice between
    logits that differ by less than twice the tolerance.

    Raises:
        UserError: a token differs by more than rounding explains.
    """
    # each of the two logits may be off by the tolerance
    margin = 0.0 if precision == "fp32" else 2 * TOLERANCE[precision]
    count = 0
    cache = None
    new = prompt
    for position, token in enumerate(answer):
        logits, cache = trained.forward(np.asarray([new], "int64"), np.zeros(1, "int64"), cache)
        best = int(logits[0].argmax())
        if not logits[0, best] - logits[0, token] <= margin * np.abs(logits).max():
            raise UserError(f"greedy tokens differ after {answer[:position]}: {token} exported, {best} trained")
        count = count + (token == best)
        new = [token]
    return count


def compare(exported: Decoder, trained: Decoder, precision: str, seed: int = 0) -> tuple[int, float, int]:
    """Compare logits of padded prompts and of the passes that follow, then greedy answers; random tokens, from the
    seed.

    Returns:
        Number of compared logits, their largest difference as a fraction of the largest logit, and number of equal
        greedy tokens.

    Raises:
        LogitsMismatch: logits differ by more than the precision explains.
        UserError: greedy tokens do.
    """
    random = np.random.default_rng(seed)
    longest = min(_LENGTHS[1], exported.max_length // 2)
    lengths = [longest, *random.integers(_LENGTHS[0], longest + 1, _PROMPTS - 1)]
    padding = np.asarray([longest - n for n in lengths], "int64")
    ids = random.integers(0, exported.vocab_size, [_PROMPTS, longest])
    ids[np.arange(longest) < padding[:, None]] = 0
    caches = [None, None]
    count = 0
    difference = 0.0
    for step in range(4):
        new = ids if step == 0 else random.integers(0, exported.vocab_size, [_PROMPTS, 1])
        results = [d.forward(new, padding, c) for d, c in zip((exported, trained), caches)]
        caches = [cache for _, cache in results]  # type: ignore[misc]
        ours, theirs = (logits for logits, _ in results)
        difference = max(difference, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
        count += ours.size
    if not difference <= TOLERANCE[precision]:  # true for NaN too
        raise LogitsMismatch(
            f"FAILED: exported logits are off by {100 * difference:.3g}% of the largest ({precision} tolerance "
            f"{100 * TOLERANCE[precision]:.3g}%)"
        )
    num_tokens = 0
    greedy = Sampling(max_new_tokens=min(_TOKENS, exported.max_length - longest))
    for row, start in zip(ids, padding):
        prompt = [int(i) for i in row[start:]]
        num_tokens += _count_equal_tokens(list(generate(exported, prompt, set(), greedy)), trained, prompt, precision)
    return count, difference, num_tokens
