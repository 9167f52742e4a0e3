"""The charts of a run's metrics: the well-known ones, and one for each other metric."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterator, Sequence

from llmsuite.observe.runs import Record, Run

_MAX_POINTS = 2000
"""Most points of a plotted curve; of more, the minimum and the maximum of each interval are kept."""
_MAX_RANKS = 16
"""Most ranks with a curve each; of more, the least busy, the median and the busiest are shown."""
_DIGITS = 6
_NO_CHART = (
    *("schema", "step", "epoch", "batch", "tokens", "supervised_tokens", "speed", "ips", "model_flops"),
    *("straggler/*", "completions/length_min", "completions/length_max", "skipped"),
)
"""Metrics that locate a record, or that are shown elsewhere."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """Metrics over steps that are plotted together."""

    name: str
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """(metric or pattern, label) of each curve; the curves of a pattern are labelled by the text that matches its
    star."""
    section: str
    scale: float = 1.0
    """Factor that values are multiplied by."""
    log: bool = False
    """True for an axis of values that is logarithmic by default."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of one metric of one run."""

    label: str
    steps: list[int]
    values: list[float]
    colour: int
    dashed: bool
    """True for a curve of evaluations."""


@dataclasses.dataclass(frozen=True)
class PlottedChart:
    """A chart with its curves."""

    chart: Chart
    curves: list[Curve]

    def data(self) -> Record:
        """The data of the chart for the page, as JSON."""
        chart = self.chart
        curves = [dataclasses.asdict(_thinned(curve)) for curve in self.curves]
        return {"name": chart.name, "title": chart.title, "unit": chart.unit, "section": chart.section,
                "log": chart.log, "curves": curves}  # fmt: skip


_LEARNING = "Learning"
_POLICY = "Rewards and policy"
_UPDATE = "Updates"
_SPEED = "Speed and memory"
_MORE = "More"

CHARTS = (
    Chart("loss", "Loss", "", (("loss", ""),), _LEARNING),
    Chart("accuracy", "Preference accuracy", "share", (("rewards/accuracy", ""),), _LEARNING),
    Chart("margin", "Margin of rewards", "", (("rewards/margin", ""),), _LEARNING),
    Chart("pairs", "Rewards of chosen and rejected", "",
          (("rewards/chosen", "chosen"), ("rewards/rejected", "rejected")), _LEARNING),
    Chart("desirable", "Rewards of desirable and undesirable", "",
          (("rewards/desirable", "desirable"), ("rewards/undesirable", "undesirable")), _LEARNING),
    Chart("logps", "Log-probabilities of answers", "nats",
          (("logps/chosen", "chosen"), ("logps/rejected", "rejected")), _LEARNING),
    Chart("tokens", "Token accuracy", "share",
          (("tokens/likely", "p > 0.5"), ("tokens/accuracy", "greedy")), _LEARNING),
    Chart("answers", "Answers against references", "", (("bleu4", "BLEU-4"), ("rougel", "ROUGE-L")), _LEARNING),
    Chart("reward", "Reward", "", (("reward", ""),), _POLICY),
    Chart("passes", "Prompts solved", "share", (("pass@*", ""),), _POLICY),
    Chart("components", "Rewards by function", "", (("rewards/*", ""),), _POLICY),
    Chart("spread", "Spread of rewards", "", (("reward/std", "all"), ("rewards/*/std", "")), _POLICY),
    Chart("kl", "KL from the reference", "nats", (("kl", ""), ("kl/completion", "of a completion")), _POLICY),
    Chart("entropy", "Entropy of a token", "nats", (("entropy", "sampled"), ("entropy/exact", "exact")), _POLICY),
    Chart("completions", "Length of completions", "tokens",
          (("completions/length", ""), ("completions/length_ended", "of those that ended")), _POLICY),
    Chart("without_signal", "Zero-variance groups, truncated completions", "share",
          (("groups/without_signal", "groups"), ("completions/truncated", "completions"),
           ("rewards/missing", "rewards missing")), _POLICY),
    Chart("clipped", "Tokens whose ratio is clipped", "share",
          (("clip_ratio/low", "low"), ("clip_ratio/high", "high")), _POLICY),
    Chart("ratio", "Importance ratio (π / π_old)", "", (("ratio", ""),), _POLICY),
    Chart("logprob_gap", "Log-probability gap between sampler and trainer", "nats",
          (("logprob_gap", "mean"), ("logprob_gap/max", "most")), _POLICY, log=True),
    Chart("learning_rate", "Learning rate", "", (("learning_rate", ""),), _UPDATE),
    Chart("grad_norm", "Gradient norm", "", (("grad_norm", ""),), _UPDATE, log=True),
    Chart("throughput", "Throughput", "tokens/s", (("ips_total", ""),), _SPEED),
    Chart("model_tflops", "Model FLOPs of a device", "TFLOP/s", (("model_tflops", ""),), _SPEED),
    Chart("mfu", "Model FLOPs utilization", "share", (("mfu", ""),), _SPEED),
    Chart("memory", "Peak memory of rank 0", "GB", (("peak_memory_bytes", ""),), _SPEED, scale=1e-9),
    Chart("data_wait", "Time of a step", "s", (("avg_batch_cost", "total"), ("avg_reader_cost", "reading data"),
                                              ("avg_rollout_cost", "sampling completions")), _SPEED),
)  # fmt: skip
_RANKS = Chart("ranks", "Time each rank does not wait for others", "s per step", (), _SPEED)
SECTIONS = (_LEARNING, _POLICY, _UPDATE, _SPEED, _MORE)


def plotted_charts(runs: Sequence[Run]) -> Iterator[PlottedChart]:
    """Every chart that has data, in the order of the page; the curves of all runs are in the same charts."""
    found = _metrics(runs)
    pattern_of = _match_patterns(found)
    more = [name for name in found if name not in pattern_of and not _is_hidden(name)]
    rest = (Chart(re.sub(r"[^a-z0-9_]+", "-", name.lower()), name, "", ((name, ""),), _MORE) for name in more)
    for chart in sorted((*CHARTS, *rest), key=lambda c: SECTIONS.index(c.section)):
        labels = {name: _label(chart, name, pattern_of) for name in found}
        names = [(name, label) for name, label in labels.items() if label is not None]
        names.sort(key=lambda pair: _order(chart, pair[0]))
        curves = _curves(runs, chart, names)
        if curves:
            yield PlottedChart(chart, curves)
        if chart.name == "data_wait" and runs[0].ranks:
            yield PlottedChart(_RANKS, _rank_curves(runs[0].ranks))


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The metrics of runs, without the "eval/" of evaluations."""
    records = (r for run in runs for r in (*run.steps, *run.evaluations))
    return list(dict.fromkeys(name.removeprefix("eval/") for record in records for name in record))


def _is_hidden(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_NO_CHART, "*/std"))


def _match_patterns(names: Sequence[str]) -> dict[str, str]:
    """The pattern of a chart that each metric belongs to: its own name, else the longest that matches."""
    patterns = sorted((pattern for chart in CHARTS for pattern, _ in chart.metrics), key=lambda p: ("*" in p, -len(p)))
    taken = {}
    for name in names:
        found = next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        if found is not None:
            taken[name] = found
    return taken


def _label(chart: Chart, name: str, pattern_of: dict[str, str]) -> str | None:
    """The label of a metric in a chart; None if it belongs to another chart."""
    if chart.section == _MORE:
        return "" if chart.metrics[0][0] == name else None
    for pattern, label in chart.metrics:
        if pattern_of.get(name) == pattern:
            start, _, end = pattern.partition("*")
            if "*" in pattern:
                return name[len(start) : len(name) - len(end)]
            return label
    return None


def _order(chart: Chart, name: str) -> int:
    exact = [pattern for pattern, _ in chart.metrics]
    return exact.index(name) if name in exact else len(exact)


def _curves(runs: Sequence[Run], chart: Chart, names: Sequence[tuple[str, str]]) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        for at, (name, label) in enumerate(names):
            both = [(kind, *_finite(run, kind + name)) for kind in ("", "eval/")]
            has_both = all(steps for _, steps, _ in both)
            for kind, steps, values in both:
                if not steps:
                    continue
                source = ""
                if has_both or (kind and not label):
                    source = "eval" if kind else "train"
                name_of_run = ""
                if len(runs) > 1:
                    name_of_run = run.directory.name
                parts = (name_of_run, label, source)
                words = " ".join(part for part in parts if part) or chart.title.lower()
                scaled = [value * chart.scale for value in values]
                curves.append(Curve(words, steps, scaled, number * len(names) + at, bool(kind)))
    return curves


def _finite(run: Run, name: str) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(*run.series(name)) if math.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _rank_curves(records: Sequence[Record]) -> list[Curve]:
    steps = [int(r["step"]) for r in records]
    numbers = [r["busy_seconds"] for r in records]
    count = min(map(len, numbers))
    if count <= _MAX_RANKS:
        columns = [(f"rank {rank}", rank) for rank in range(count)]
    else:
        numbers = [sorted(values) for values in numbers]
        columns = [("least busy", 0), ("median", count // 2), ("busiest", count - 1)]
    curves = []
    for colour, (label, at) in enumerate(columns):
        curves.append(Curve(label, steps, [values[at] for values in numbers], colour, False))
    return curves


def _thinned(curve: Curve) -> Curve:
    """A curve reduced to a visible number of points, without losing a peak, and to a readable number of digits."""
    steps = curve.steps
    values = curve.values
    if len(steps) > _MAX_POINTS:
        size = math.ceil(2 * len(steps) / _MAX_POINTS)
        kept: list[int] = []
        for start in range(0, len(steps), size):
            interval = range(start, min(start + size, len(steps)))
            kept += sorted({min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)})
        if kept[-1] != len(steps) - 1:
            kept.append(len(steps) - 1)
        steps = [steps[i] for i in kept]
        values = [values[i] for i in kept]
    return dataclasses.replace(curve, steps=steps, values=[float(f"{value:.{_DIGITS}g}") for value in values])
