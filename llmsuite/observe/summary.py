"""A summary of a run in words: its cards, and its events."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.contract.schema.recipe import HELD_OUT
from llmsuite.observe.runs import Record, Run

_RECENT = 10
"""Number of records whose mean is the present speed."""
_SILENT_STEPS = 5
_SILENT_SECONDS = 60.0
"""A running run is reported as silent after this many steps' time and this many seconds without a record."""
_BEGINS = ("started", "resumed")
_ENDS = ("ended", "stopped", "failed", "hung")


@dataclasses.dataclass(frozen=True)
class Card:
    """One fact about a run, shown at the top of the page."""

    label: str
    value: str
    note: str = ""


def total_steps(run: Run) -> int | None:
    """The total number of steps of a run; None where it is unknown."""
    reported = [e["of"] for e in run.events if e["event"] in _BEGINS and isinstance(e.get("of"), int)]
    if reported:
        return reported[-1]
    return (run.recipe.get("train") or {}).get("max_steps")


def last_step(run: Run) -> int:
    if run.steps:
        return int(run.steps[-1]["step"])
    return 0


def duration(run: Run, now: float) -> float | None:
    """Seconds that a run has taken so far, without the time between its end and a resume; None without events.

    Args:
        run: a run.
        now: in seconds since 1970, for a run that is running.
    """
    total = 0.0
    start = None
    before = None
    for event in run.events:
        at = _seconds(event)
        if at is None:
            continue
        if event["event"] in _BEGINS:
            if start is not None and before is not None:  # killed: the time after its last event is unknown
                total += before - start
            start = at
        elif event["event"] in _ENDS and start is not None:
            total = total + at - start
            start = None
        before = at
    if start is not None:
        end = now
        if run.status != "running":
            end = run.last_record_time or start
        total += max(0.0, end - start)
    return total if before is not None else None


def seconds_left(run: Run) -> float | None:
    """Estimated seconds of the remaining steps, at the speed of the last ones; None where that is unknown."""
    total = total_steps(run)
    times = [r["avg_batch_cost"] for r in run.steps[-_RECENT:] if r.get("avg_batch_cost")]
    if run.status != "running" or total is None or not times:
        return None
    return max(0, total - last_step(run)) * sum(times) / len(times)


def format_duration(seconds: float) -> str:
    """A duration as text: 45 s, 12 min 05 s, 3 h 20 min, 2 d 4 h."""
    rounded = round(seconds)
    if rounded < 60:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 2880:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def cards(run: Run, now: float | None = None) -> list[Card]:
    """The cards of a run, of those facts that it has recorded.

    Args:
        run: a run.
        now: in seconds since 1970; None for the present time.
    """
    now = time.time() if now is None else now
    made = (_status(run, now), _progress(run, now), _loss(run), _reward(run), _speed(run), _model(run), _method(run),
            _data(run), _mesh(run), _memory(run))  # fmt: skip
    return [card for card in made if card is not None]


def _status(run: Run, now: float) -> Card:
    if run.status not in ("died", "running"):
        note = ""
        if run.events:
            note = _when(run.events[-1])
        return Card("Status", run.status, note)
    note = ""
    if run.last_record_time:
        note = f"last record {format_duration(now - run.last_record_time)} ago"
    if run.status == "died":
        return Card("Status", "died", note)
    last_record_time = run.last_record_time
    if last_record_time is None or now - last_record_time < _SILENT_SECONDS:
        return Card("Status", "running")
    usual = 0.0
    if run.steps:
        usual = run.steps[-1].get("avg_batch_cost") or 0.0
    if now - last_record_time > max(_SILENT_SECONDS, _SILENT_STEPS * usual):
        note += ": is it still running?"
    return Card("Status", "running", note)


def _progress(run: Run, now: float) -> Card:
    total = total_steps(run)
    took = duration(run, now)
    left = seconds_left(run)
    steps = f"{last_step(run):,}"
    if total:
        steps += f" of {total:,}"
    times = []
    if took:
        so_far = format_duration(took)
        if run.status == "running":
            so_far += " so far"
        times.append(so_far)
    if left:
        times.append(f"about {format_duration(left)} left")
    return Card("Steps", steps, ", ".join(times))


def _loss(run: Run) -> Card | None:
    values = run.series("loss")[1]
    if not values:
        return None
    return Card("Loss", f"{values[-1]:.4g}", _evaluated(run, "loss", ".4g"))


def _evaluated(run: Run, name: str, form: str) -> str:
    """The last values of a metric in evaluations, one for each set of data; empty without one."""
    found = []
    last = 0
    for of_set in ("", *_eval_sets(run)):
        key = f"eval/{name}"
        place = ""
        if of_set:
            key = f"eval/{of_set}/{name}"
            place = f" on {of_set}"
        at, values = run.series(key)
        if at:
            found.append(f"{values[-1]:{form}}{place}")
            last = at[-1]
    if not found:
        return ""
    return f"{', '.join(found)} in the evaluation of step {last}"


def _eval_sets(run: Run) -> list[str]:
    """The names of the evaluation sets of a run; empty for a single one without a name."""
    data = run.recipe.get("data") or {}
    evaluation = data.get("eval")
    if not isinstance(evaluation, dict):
        return []
    if data.get("holdout") is not None:
        return [HELD_OUT, *evaluation]
    return list(evaluation)


def _reward(run: Run) -> Card | None:
    for name, label, form in (("reward", "Reward", ".4g"), ("rewards/accuracy", "Preference accuracy", ".1%")):
        if values := run.series(name)[1]:
            return Card(label, f"{values[-1]:{form}}", _evaluated(run, name, form))
    return None


def _speed(run: Run) -> Card | None:
    speeds = [r["ips_total"] for r in run.steps[-_RECENT:] if r.get("ips_total")]
    if not speeds:
        return None
    speed = sum(speeds) / len(speeds)
    devices = run.environment.get("ranks")
    cost = ""
    if isinstance(devices, int):
        cost = f"{devices * 1000 / speed:.3g} device seconds per 1,000 tokens"
    if use := [r["mfu"] for r in run.steps[-_RECENT:] if r.get("mfu")]:
        cost += f"{', ' if cost else ''}{sum(use) / len(use):.1%} MFU"
    shown = f"{speed:,.4g}" if speed < 1000 else f"{speed:,.0f}"
    return Card("Tokens per second", shown, cost)


def _model(run: Run) -> Card | None:
    model = run.recipe.get("model") or {}
    if not model.get("family"):
        return None
    config = model.get("config") or {}
    note = ""
    if model.get("weights"):
        note = f"weights {model['weights']}"
    elif "num_hidden_layers" in config:
        note = f"{config['num_hidden_layers']} layers of {config.get('hidden_size')}"
    return Card("Model", model.get("preset") or model["family"], note)


def _method(run: Run) -> Card | None:
    lora = run.recipe.get("lora") or {}
    engine = run.recipe.get("engine") or {}
    train = run.recipe.get("train") or {}
    if not run.recipe.get("stage"):
        return None
    rank = lora.get("rank")
    words = []
    if rank is not None:
        words.append(f"{lora.get('method', 'lora')} of rank {rank}")
    words += [str(engine[key]) for key in ("mode", "precision") if engine.get(key)]
    if train.get("global_batch_size"):
        words.append(f"batches of {train['global_batch_size']}")
    return Card("Stage", str(run.recipe["stage"]), ", ".join(words))


def _data(run: Run) -> Card | None:
    data = run.recipe.get("data") or {}
    train = data.get("train")
    if not train:
        return None
    files = train if isinstance(train, list) else [train]
    shown = "/".join(Path(str(files[0])).parts[-2:])
    if len(files) > 1:
        shown += f" and {len(files) - 1} more"
    evaluation = data.get("eval")
    sources: list[Any] = []
    if data.get("holdout") is not None:
        sources.append(f"held-out rows ({data['holdout']})")
    if isinstance(evaluation, str):
        sources.append(evaluation)
    elif evaluation:
        sources += evaluation.values()
    note = ""
    if sources:
        note = f"evaluated on {', '.join(map(str, sources))}"
    return Card("Data", shown, note)


def _mesh(run: Run) -> Card | None:
    found = run.environment
    if not found.get("mesh"):
        return None
    parts = []
    if "ranks" in found:
        parts.append(f"{found['ranks']} rank{'s' * (found['ranks'] != 1)} on {found.get('device', '')}")
    if found.get("host"):
        parts.append(str(found["host"]))
    return Card("Mesh", str(found["mesh"]), " ".join(parts))


def _memory(run: Run) -> Card | None:
    peaks = run.series("peak_memory_bytes")[1]
    if peaks:
        return Card("Peak memory", f"{max(peaks) * 1e-9:.3g} GB", "of rank 0")
    return None


def _seconds(event: Record) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(event.get("time", ""))).timestamp()
    except ValueError:
        return None


def _when(event: Record) -> str:
    seconds = _seconds(event)
    if seconds is None:
        return str(event.get("time", ""))
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


_EVENT_TEXT: dict[str, Callable[[Record], str]] = {
    "started": lambda e: f"Started, {e['of']:,} steps to go" if e.get("of") else "Started",
    "resumed": lambda e: f"Resumed after step {e.get('step')}",
    "saved": lambda e: f"Saved a checkpoint after step {e.get('step')}",
    "ended": lambda e: f"{'Ended' if e.get('why') else 'Finished'} after step {e.get('step')}{_reason(e)}",
    "stopped": lambda e: f"Stopped after step {e['step']}, with a checkpoint" if "step" in e else "Stopped on request",
    "skipped": lambda e: f"Skipped the bad step {e.get('step')}{_numbers(e)}",
    "rolled back": lambda e: f"Rolled back from step {e.get('step')} to the checkpoint of step {e.get('to')}",
    "restarting": lambda e: f"Restart {e.get('restart')} of {e.get('of')} from step {e.get('step')}: {e.get('why')}",
    "hung": lambda e: f"Hung: no rank made progress for too long{_code(e)}; the end of the log names the call",
    "failed": lambda e: f"Failed{_code(e)}{_error(e)}",
}  # fmt: skip


def event_line(event: Record) -> tuple[str, str]:
    """The time of an event, and its description in words."""
    describe = _EVENT_TEXT.get(str(event["event"]))
    if describe is not None:
        return _when(event), describe(event)
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
    text = str(event["event"])
    if rest:
        text += f": {rest}"
    return _when(event), text


def _numbers(event: Record) -> str:
    known: list[tuple[str, Any]] = [("loss", event.get("loss")), ("gradient norm", event.get("grad_norm"))]
    text = ", ".join(f"{name} {value:.4g}" for name, value in known if isinstance(value, (int, float)))
    return f" ({text})" if text else ""


def _reason(event: Record) -> str:
    return f": {event['why']}" if event.get("why") else ""


def _error(event: Record) -> str:
    if event.get("error"):
        return f": {event['error']}"
    return "; see logs/workerlog.0"


def _code(event: Record) -> str:
    if event.get("exit_code") is not None:
        return f" with exit code {event['exit_code']}"
    return ""
