"""The command `llmsuite recipe tune RECIPE`: the fastest layout of a recipe on given devices, searched by arithmetic,
then rehearsed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.locks import scratch_directory
from llmsuite.contract.registry import Registry
from llmsuite.plugins.rehearse.command import (
    figures_of,
    is_rank,
    plan_to_rehearse,
    ranks_to_rehearse,
    rehearse_ranks,
    run_rank_of,
)
from llmsuite.plugins.rehearse.tuned_recipe import check_output, output_tuned, tuned_text
from llmsuite.recipe.fetch import fetch_names
from llmsuite.recipe.resolve import plan_run

if TYPE_CHECKING:
    from llmsuite.planning.search import Candidates, Fitting, Rejected, Strategy
    from llmsuite.plugins.rehearse.show_tuned import Rehearsed

_WORDS = "LLMSUITE_REHEARSE_OVERRIDES"
"""Environment variable with the overrides of the layout that the process of a rank rehearses, as JSON."""
_NOTHING_FITS = 3


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import NonNegativeInt

    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("--hardware", type=str, help="h100, h800, h200, a100 or a800", required=True)
    parser.add_argument("--devices", type=int, default=None, help="number of devices, instead of the recipe's")
    parser.add_argument("-o", "--output", type=str | None, default=None, help="file to write (default: print it)")
    parser.add_argument(
        "--rehearse", type=NonNegativeInt, default=3, help="layouts to rehearse; 0 to go by arithmetic alone"
    )
    parser.epilog = "Any key of the recipe can be overridden, as with `llmsuite run`, and is written too."


def run(args: Any, registry: Registry) -> int:
    if is_rank():
        plan = plan_to_rehearse(args.recipe, json.loads(os.environ[_WORDS]), registry)
        return run_rank_of(plan, registry, "balanced", args.hardware)
    check_output(args.recipe, args.output)
    from llmsuite.planning.cost import MEMORY_LEFT
    from llmsuite.planning.search import Fitting, candidates_of, device_words, plan_for_search, refine, search_all
    from llmsuite.plugins.rehearse.show_tuned import Result, recommended, show_changes, show_results, show_ruled_out

    device = figures_of(args.hardware)
    given = [*device_words(args.devices), *args.overrides]
    plan = plan_for_search(args.recipe, given, registry)
    plan.check_trains("recipe tune")
    limit = device.memory - MEMORY_LEFT
    candidates = candidates_of(plan.loaded, plan.model, plan.data, plan.parallel, plan.train, limit, device)
    own = _own_layout(args.recipe, given, registry, candidates)
    _say("searching layouts")
    fitting, rejected = search_all(candidates)
    ranked = refine(candidates, fitting, rejected)
    if not ranked:
        print(f"recipe tune: {_nearest(rejected, limit)}", file=sys.stderr)
        return _NOTHING_FITS
    best = different(ranked, max(args.rehearse, 1))
    rehearsed: list[Rehearsed | None] = [None] * len(best)
    own_rehearsed = None
    if args.rehearse:
        count = len(best) + isinstance(own, Fitting)
        if isinstance(own, Fitting):
            _say(f"rehearsing 1 of {count}: the recipe as it is")
            own_rehearsed = _rehearse(args, given, registry)
        for at, found in enumerate(best):
            _say(f"rehearsing {count - len(best) + at + 1} of {count}: {found.strategy}")
            rehearsed[at] = _rehearse(args, words_of(found.strategy, given), registry)
    results = sorted(
        (Result(found, after) for found, after in zip(best, rehearsed, strict=True)), key=lambda r: r.rank_key(limit)
    )
    as_it_is = Result(own, own_rehearsed)
    chosen = recommended(as_it_is, results, limit)
    if not chosen.is_possible(limit):
        for line in show_results(as_it_is, results, limit, device):
            print(line, file=sys.stderr)
        print("recipe tune: no layout that was rehearsed runs; nothing is written", file=sys.stderr)
        return _NOTHING_FITS
    words = given if chosen is as_it_is else words_of(chosen.found.strategy, given)
    text = tuned_text(args.recipe, words, registry)
    output_tuned(text, args.output)
    stream = sys.stdout if args.output is not None else sys.stderr
    for line in show_results(as_it_is, results, limit, device):
        print(line, file=stream)
    for line in (*show_changes(own, chosen.found, candidates), *show_ruled_out(len(ranked), rejected)):
        print(line, file=stream)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _own_layout(
    recipe: str, words: Sequence[str], registry: Registry, candidates: Candidates
) -> Fitting | Rejected | str:
    """The layout of the recipe itself; a text with the reason where it cannot have it on these devices."""
    from llmsuite.planning.estimate import estimate
    from llmsuite.planning.search import Strategy

    try:
        plan = plan_run(recipe, words, registry)
    except RecipeError as error:
        return "; ".join(f"{problem.key} {problem.message}" for problem in error.problems)
    degrees = plan.parallel.degrees
    strategy = Strategy(
        tp=degrees.tp,
        pp=degrees.pp,
        sharding=plan.parallel.section.sharding,
        ep=degrees.ep,
        recompute=plan.parallel.engine.recompute,
        chunks=plan.parallel.num_chunks,
    )
    return candidates.judge(strategy, estimate(plan.model, plan.data, plan.parallel, plan.train))


def different(ranked: Sequence[Fitting], count: int) -> list[Fitting]:
    """The best layouts that differ in more than their micro-batches, recompute or offload, in their order."""
    found: dict[object, Fitting] = {}
    for each in ranked:
        s = each.strategy
        found.setdefault((s.tp, s.pp, s.sharding, s.ep, s.chunks > 1), each)
    return list(found.values())[:count]


def words_of(strategy: Strategy, given: Sequence[str]) -> list[str]:
    """Overrides of a recipe that choose a layout, after those of the user that it does not replace."""
    parallel: dict[str, Any] = {}
    if strategy.tp > 1:
        parallel |= {"tensor_parallel_degree": strategy.tp, "sequence_parallel": True}
    if strategy.pp > 1:
        schedule = "interleaved" if strategy.chunks > 1 else "1F1B"
        parallel |= {"pipeline_parallel_degree": strategy.pp, "pipeline_schedule": schedule}
    if strategy.chunks > 1:
        parallel |= {"virtual_pipeline_degree": strategy.chunks}
    if strategy.sharding != "none":
        parallel |= {"sharding": strategy.sharding}
    if strategy.ep > 1:
        parallel |= {"expert_parallel_degree": strategy.ep}
    own = {
        "--parallel": json.dumps(parallel),
        "--engine.recompute": strategy.recompute,
        "--engine.recompute_every": "1",
    }
    if strategy.offload is not None:
        own["--engine.offload_optimizer"] = json.dumps(strategy.offload)
    if strategy.micro_batch is not None:
        own["--train.micro_batch_size"] = str(strategy.micro_batch)
    kept = [word for word in given if word.partition("=")[0] not in own and not word.startswith("--parallel.")]
    return [*kept, *(f"{key}={value}" for key, value in own.items())]


def _rehearse(args: Any, words: Sequence[str], registry: Registry) -> Rehearsed:
    """Rehearse one layout: a rank of each of the stages that `llmsuite rehearse` takes."""
    from llmsuite.plugins.rehearse.predictions import predict
    from llmsuite.plugins.rehearse.show_tuned import Rehearsed

    plan = plan_to_rehearse(args.recipe, words, registry)
    plan = fetch_names(plan.loaded, registry, _say, loads_model=False)
    plan.check_files(loads_model=False)
    plan.parallel.device.factory().rank_environment(0)  # builds the device once, and says so
    device = figures_of(args.hardware)
    ranks = ranks_to_rehearse(None, plan.parallel.degrees)
    with scratch_directory("llmsuite-tune-") as scratch:
        try:
            reports = rehearse_ranks(
                plan.parallel, ranks, scratch, int(device.memory), {_WORDS: json.dumps(list(words))}
            )
        except UserError as error:  # a first stage that fails sends nothing to the others
            return Rehearsed(error=str(error))
    predict(reports, plan.model, plan.data, plan.parallel, plan.train, device)
    return Rehearsed.from_reports(reports)


def _nearest(rejected: Sequence[Rejected], limit: float) -> str:
    """The message that nothing fits."""
    from llmsuite.planning.cost import MEMORY_LEFT

    nearest = min(rejected, key=lambda other: other.peak, default=None)
    gib = 2.0**30
    if nearest is None or nearest.peak == float("inf"):
        reasons = sorted({other.reason for other in rejected})
        return f"no layout is possible: {'; '.join(reasons[:3])}"
    return (
        f"no layout fits in {limit / gib:.1f} GiB ({MEMORY_LEFT >> 30} GiB are left to the driver and NCCL), even with "
        f"the optimizer's state in host memory; nearest is {nearest.strategy}, which takes {nearest.peak / gib:.1f} "
        f"GiB, {(nearest.peak - limit) / gib:.1f} GiB too much; give more --devices, or shorten data.max_length"
    )
