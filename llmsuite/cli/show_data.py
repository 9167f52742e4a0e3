"""The output of `llmsuite data explain` and `llmsuite data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.cli.model_paths import print_status
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import DataSection, TrainSection
from llmsuite.recipe.plans import DataPlan
from llmsuite.recipe.resolve import RunPlan, plan_run

if TYPE_CHECKING:
    from llmsuite.engine.stage import Stage
    from llmsuite.stages.explain import Explained
    from llmsuite.stages.stats import FileStats

_COLOURS = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "white", "text": "white"}


def prepare(args: Any, registry: Registry) -> tuple[RunPlan, Stage[Any]]:
    """Plan the recipe, check that its files exist, fetch remote ones, and start Paddle on the CPU, as stages need it;
    open the stage.

    Args:
        args: arguments of the command.
        registry: registered stages and model families.

    Returns:
        The plan with local files, and its stage.
    """
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.devices.start import start_paddle
    from llmsuite.recipe.fetch import fetch_names

    plan = plan_run(args.inputs[0], args.overrides, registry, args.smoke)
    plan.check_trains(f"data {args.action}")
    plan.check_files(loads_model=False)
    plan = fetch_names(plan.loaded, registry, print_status, loads_model=False)
    start_paddle(CpuBackend(), 1)
    plan = plan.fetched(print_status)
    from llmsuite.stages.explain import open_stage

    return plan, open_stage(plan.model, plan.data, plan.parallel, plan.train, registry)


def explain(stage: Stage[Any], path: Path, row: int) -> int:
    from rich.console import Console
    from rich.text import Text

    from llmsuite.stages.explain import explain, made_of, use_of

    place, dropped, found = explain(stage, path, row)
    use = use_of(stage, path, row)
    if use is not None:
        print(f"{place}: {use}")
    for field, source, value in made_of(stage, path, place):
        print(f"{place}: {field} is made of {source!r}: {value!r}")
    if dropped is not None:
        print(f"{place}: is dropped: {dropped}")
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for sequence in found:
        _print_sequence(console, Text, place, sequence, stage.context.tokenizer)
    return 0


def _print_sequence(console: Any, text: Any, place: str, found: Explained, tokenizer: Any) -> None:
    sequence = found.sequence
    supervised = sequence.weights > 0
    ends = bool((sequence.ids[supervised] == tokenizer.eos_id).any())
    name = f" ({found.name})" if found.name else ""
    counts = f"{len(sequence.ids)} tokens, {int(supervised.sum())} supervised"
    console.print(f"{place}{name}: {counts}", style="bold", markup=False)
    if ends:
        console.print("the end of the sequence is supervised")
    else:
        console.print("the end of the sequence is NOT supervised", style="bold red")
    if found.prompt_length is not None:
        comparison = "the same that precede the answer here"
        style = ""
        if not found.prompt_matches:
            comparison = f"NOT {comparison}"
            style = "bold red"
        console.print(f"generation is prompted with {found.prompt_length} tokens: {comparison}", style=style)
    if found.has_default_system:
        console.print("the system turn is that of data.system")
    if found.given:
        given = "; ".join(found.given)
        console.print(f"besides roles and contents, the chat template is given: {given}", markup=False)
    if found.changed is not None:
        console.print(f"the tokens are not the rendered text: {found.changed}", style="bold red", markup=False)
    console.print(f"{'position':>8}  {'id':>7}  {'role':9}  {'document':>8}  {'label':>7}  {'weight':>6}  token")
    for at, piece in enumerate(tokenizer.pieces(sequence.ids)):
        is_supervised = bool(supervised[at])
        role = found.roles[at]
        line = (
            f"{at:>8}  {sequence.ids[at]:>7}  {role:9}  {sequence.documents[at]:>8}  "
            f"{sequence.ids[at] if is_supervised else '-':>7}  {sequence.weights[at]:>6.4g}  "
        )
        style = "bold green" if is_supervised else _COLOURS.get(role, "white")
        console.print(text(line + repr(piece)[1:-1], style=style))


def stats(stage: Stage[Any], data_plan: DataPlan, is_padding_free: bool, plot: str | None) -> int:
    from llmsuite.stages.stats import data_stats, plot_lengths

    found = data_stats(stage, data_plan, is_padding_free)
    data = stage.context.data
    for each in found:
        _print_stats(each, data, stage.context.train)
    if plot is not None:
        plot_lengths(found, data.max_length, Path(plot))
        print(f"wrote {plot}")
    return 0


def _print_stats(stats: FileStats, data: DataSection, train: TrainSection) -> None:
    import numpy as np

    from llmsuite.stages.stats import histogram

    counts = stats.counts
    lengths = stats.lengths
    print(stats.path)
    if counts is not None:
        print(f"  rows       {counts.total:,} read, {counts.total - counts.lost:,} used, {counts.lost:,} dropped")
        for reason in counts.reasons():
            print(f"             dropped: {reason}")
        if (ranked := counts.of_ranked()) is not None:
            print(f"  ranked     {ranked}")
    if counts is not None and stats.padding is not None:
        print(f"  truncated  {counts.cut:,} rows are cut to data.max_length {data.max_length}")
    print(
        f"  tokens     {stats.num_tokens:,} in {len(lengths):,} {stats.what}, {stats.num_samples:,} samples; "
        f"{stats.num_supervised:,} supervised ({stats.num_supervised / stats.num_tokens:.1%})"
    )
    if stats.padding is not None:
        print(f"  ends       supervised in {stats.num_ends:,} of {stats.num_samples:,} samples")
        size = f"_size {train.micro_batch_size}"
        if train.micro_batch_tokens:
            size = f"_tokens {train.micro_batch_tokens}"
        print(f"  padding    {stats.padding:.1%} with train.micro_batch{size}")
    if stats.packed is not None:
        is_packed = data.packing != "none"
        how = "with data.packing best_fit"
        if is_packed:
            how = "as configured"
        print(f"  packing    {stats.packed[0]:,} samples that are {stats.packed[1]:.1%} full, {how}")
    quantiles = zip(("least", "median", "90%", "99%", "most"), np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1]))
    print(f"  lengths    mean {lengths.mean():.1f}, " + ", ".join(f"{name} {value:.0f}" for name, value in quantiles))
    for line in histogram(lengths):
        print(f"    {line}")
