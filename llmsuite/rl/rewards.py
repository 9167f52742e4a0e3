"""The rewards of a recipe: scores of completions by one or several functions, and the limit for missing ones."""

from __future__ import annotations

import itertools
import pickle
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llmsuite.base.errors import AgreedError, UserError
from llmsuite.base.python_files import python_function
from llmsuite.base.redaction import redacted
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.section import Section, value_at
from llmsuite.contract.specs import RewardSpec, Score
from llmsuite.rl.checks import LARGEST
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_services import RewardServices
from llmsuite.rl.reward_worker import RewardSource, scored
from llmsuite.rl.worker_pool import Call, Limits, Outcome, WorkerPool


class Rewards:
    """Scores completions with the rewards of the section `reward`. Every rank makes one."""

    def __init__(
        self, section: RewardSection, registered: Mapping[str, RewardSpec], services: RewardServices | None = None
    ):
        """
        Args:
            section: of the recipe. Its keys are read here.
            registered: rewards by name.
            services: of the run, for rewards that need them.
        """
        self._services = services
        self._max_failed = section.max_failed
        names = section.names()
        self._specs = [None if python_function(key) else registered[key] for key in section.functions]
        self._options = [_options(spec, section) for spec in self._specs]
        self._sources = [
            _source(key, spec, options) for key, spec, options in zip(section.functions, self._specs, self._options)
        ]
        sizes = [1 + len(source.parts) for source in self._sources]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        components: list[str] = []
        for source in self._sources:
            name = names[source.key]
            components += [name, *(f"{name}/{part}" for part in source.parts)]
        self.names = tuple(components)
        """Names of the components: each reward, followed by its parts."""
        self._weights = np.zeros(len(self.names))
        self._weights[self._offsets[:-1]] = list(section.functions.values())
        self._loaded: dict[int, Score] = {}
        limits = Limits("reward", section.workers, section.time_limit, section.memory_limit)
        self._pool = WorkerPool(self._sources, limits)
        weakref.finalize(self, self._pool.close)
        self.first_failure = ""
        """The reason for the first missing reward; empty when none is."""

    def load(self) -> None:
        """Load the rewards now instead of at the first call of `score`, except those that need services of the run.

        Raises:
            UserError: a reward cannot be loaded.
        """
        for which, spec in enumerate(self._specs):
            if spec is not None and spec.runs == "main" and not spec.needs_services:
                self._in_main(which, spec)
        self._pool.load()

    def score(self, completions: Sequence[Completion], total: int | None = None) -> np.ndarray:
        """The components of each completion, [C, components] float64, NaN for a missing one.

        Args:
            completions: of full groups.
            total: the number of completions of the step on all ranks; None where these are all.

        Raises:
            UserError: a reward cannot be loaded, or more of the step's rewards are missing than `reward.max_failed`.
        """
        found = np.full([len(completions), len(self.names)], np.nan)
        total = len(completions) if total is None else total
        failed: set[int] = set()
        for rows, which, outcome in self._outcomes(completions):
            first = self._offsets[which]
            found[rows, first : self._offsets[which + 1]] = np.array(outcome.values, "float64")
            missing = [row for row in rows if np.isnan(found[row, first])]
            if missing and not self.first_failure:
                text = completions[missing[0]].text
                failure = f"{self._sources[which].key}: {outcome.why}; the completion: {text!r:.200}"
                self.first_failure = redacted(failure)
                print(f"warning: a reward is missing: {self.first_failure}", file=sys.stderr, flush=True)
            if self._weights[first]:
                failed.update(missing)
                self._check_missing(len(failed), total)
        return found

    def total(self, scores: np.ndarray) -> np.ndarray:
        """The weighted sum of the components: [..., components] to [...]. NaN where a reward with a weight is missing,
        or the sum is too large for float32."""
        counted = self._weights != 0
        found: np.ndarray = scores[..., counted] @ self._weights[counted]
        too_large = np.abs(found) > LARGEST
        if too_large.any() and not self.first_failure:
            self.first_failure = (
                f"a weighted sum of rewards is {found[too_large][0]:.3g}; float32 ends at {LARGEST:.3g}"
            )
        return np.where(too_large, np.nan, found)

    def check(self, scores: np.ndarray) -> None:
        """Raise AgreedError when more rewards are missing than `reward.max_failed` allows.

        Args:
            scores: [..., components], of all completions of a step, the same on all ranks.
        """
        missing = np.isnan(self.total(scores))
        try:
            self._check_missing(int(missing.sum()), missing.size)
        except UserError as error:
            raise AgreedError(str(error)) from error

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()

    def _outcomes(self, completions: Sequence[Completion]) -> Iterator[tuple[list[int], int, Outcome]]:
        """For each call: the indices of its completions, the index of the reward, and its outcome."""
        calls = list[Call]()
        rows_by_call = list[list[int]]()
        for which, (source, spec) in enumerate(zip(self._sources, self._specs)):
            if spec is not None and spec.runs == "main":
                values, why = scored(self._in_main(which, spec), source.parts, completions)
                yield list(range(len(completions))), which, Outcome(values, why)
                continue
            parts = [[row] for row in range(len(completions))]
            if spec is not None and spec.level == "group":
                parts = _groups(completions)
            rows_by_call += parts
            for rows in parts:
                calls.append(Call(which, [completions[row] for row in rows]))
        for number, outcome in self._pool.run(calls):
            yield rows_by_call[number], calls[number].which, outcome

    def _in_main(self, which: int, spec: RewardSpec) -> Score:
        """The function of a reward that is computed in this process; it is loaded once."""
        if which not in self._loaded:
            services = []
            if spec.needs_services:
                services = [self._services]
            self._loaded[which] = spec.factory(self._options[which], *services)
        return self._loaded[which]

    def _check_missing(self, missing: int, total: int) -> None:
        if missing > self._max_failed * total:
            why = self.first_failure or "see the warnings of the other ranks"
            raise UserError(
                f"reward.max_failed: of {total} completions {missing} or more have no reward, which is more than "
                f"{self._max_failed:g} of them. The first failure: {why}"
            )


def _groups(completions: Sequence[Completion]) -> list[list[int]]:
    """Indices of the completions of each prompt, in the order of first appearance."""
    found: dict[int, list[int]] = {}
    for row, completion in enumerate(completions):
        found.setdefault(completion.group, []).append(row)
    return list(found.values())


def _options(spec: RewardSpec | None, section: RewardSection) -> Section | None:
    """The section of a reward's own keys."""
    if spec is None or spec.config_cls is None:
        return None
    options: Section = value_at(section, spec.name)
    return options


def _source(key: str, spec: RewardSpec | None, options: Section | None) -> RewardSource:
    """The source of a reward, from which another process can load it."""
    if spec is None:
        return RewardSource(key)
    if spec.runs == "main":
        return RewardSource(key, parts=spec.parts, in_main=True)
    try:
        factory = pickle.dumps((spec.factory, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"reward {key}: its factory cannot be sent to another process ({error}); make it a function of a module"
        ) from error
    return RewardSource(key, factory, spec.parts)
