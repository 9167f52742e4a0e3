"""What a run says of itself in words: its cards, and its events."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.observe.runs import Record, Run

_RECENT = 10
"""Records whose mean is the speed of now."""
_SILENT_STEPS, _SILENT_SECONDS = 5, 60.0
"""A run that goes on and has recorded nothing for so many records' time, and so long, is asked after."""
_BEGINS, _ENDS = ("started", "resumed"), ("ended", "stopped", "failed", "hung")


@dataclasses.dataclass(frozen=True)
class Card:
    """One thing about a run, for its top."""

    label: str
    value: str
    note: str = ""


def total_steps(run: Run) -> int | None:
    """How many steps a run will have, if it says so."""
    told = [e["of"] for e in run.events if e["event"] in _BEGINS and isinstance(e.get("of"), int)]
    return told[-1] if told else (run.recipe.get("train") or {}).get("max_steps")


def last_step(run: Run) -> int:
    return int(run.steps[-1]["step"]) if run.steps else 0


def duration(run: Run, now: float) -> float | None:
    """Seconds that a run has taken so far, without the time between its end and a resume; None if it says nothing.

    Args:
        run: what is asked about.
        now: in seconds since 1970, for a run that goes on.
    """
    total, begun, before = 0.0, None, None
    for event in run.events:
        at = _seconds(event)
        if at is None:
            continue
        if event["event"] in _BEGINS:
            if begun is not None and before is not None:  # killed: what came after its last event is unknown
                total += before - begun
            begun = at
        elif event["event"] in _ENDS and begun is not None:
            total, begun = total + at - begun, None
        before = at
    if begun is not None:
        total += max(0.0, (now if run.status == "running" else run.heard or begun) - begun)
    return total if before is not None else None


def seconds_left(run: Run) -> float | None:
    """What the steps that are left will take, at the speed of the last ones; None if that is unknown."""
    total, times = total_steps(run), [r["avg_batch_cost"] for r in run.steps[-_RECENT:] if r.get("avg_batch_cost")]
    if run.status != "running" or total is None or not times:
        return None
    return max(0, total - last_step(run)) * sum(times) / len(times)


def in_words(seconds: float) -> str:
    """A time for people: 45 s, 12 min 05 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60:02} min"
        if minutes < 2880
        else f"{minutes // 1440} d {minutes % 1440 // 60} h"
    )


def cards(run: Run, now: float | None = None) -> list[Card]:
    """The cards of a run; what it does not say has none.

    Args:
        run: what is shown.
        now: in seconds since 1970; None for this moment.
    """
    now = time.time() if now is None else now
    made = (_status(run, now), _progress(run, now), _loss(run), _reward(run), _speed(run), _model(run), _method(run),
            _data(run), _mesh(run), _memory(run))  # fmt: skip
    return [card for card in made if card is not None]


def _status(run: Run, now: float) -> Card:
    if run.status == "died":
        return Card("Status", "died", f"last record {in_words(now - run.heard)} ago" if run.heard else "")
    if run.status != "running":
        return Card("Status", run.status, _when(run.events[-1]) if run.events else "")
    heard = run.heard
    if heard is None or now - heard < _SILENT_SECONDS:
        return Card("Status", "running")
    usual = run.steps[-1].get("avg_batch_cost") or 0.0 if run.steps else 0.0
    silent = now - heard > max(_SILENT_SECONDS, _SILENT_STEPS * usual)
    said = f"last record {in_words(now - heard)} ago"
    return Card("Status", "running", f"{said}: is it still there?" if silent else said)


def _progress(run: Run, now: float) -> Card:
    total, took, left = total_steps(run), duration(run, now), seconds_left(run)
    steps = f"{last_step(run):,}" + (f" of {total:,}" if total else "")
    times = [f"{in_words(took)} so far" if run.status == "running" else in_words(took)] if took else []
    times += [f"about {in_words(left)} left"] if left else []
    return Card("Steps", steps, ", ".join(times))


def _loss(run: Run) -> Card | None:
    values = run.series("loss")[1]
    if not values:
        return None
    at, evaluated = run.series("eval/loss")
    return Card("Loss", f"{values[-1]:.4g}", f"{evaluated[-1]:.4g} in the evaluation of step {at[-1]}" if at else "")


def _reward(run: Run) -> Card | None:
    for name, label in (("reward", "Reward"), ("rewards/accuracy", "Preferred rightly")):
        if values := run.series(name)[1]:
            at, evaluated = run.series(f"eval/{name}")
            form = ".1%" if name == "rewards/accuracy" else ".4g"
            note = f"{evaluated[-1]:{form}} in the evaluation of step {at[-1]}" if at else ""
            return Card(label, f"{values[-1]:{form}}", note)
    return None


def _speed(run: Run) -> Card | None:
    speeds = [r["ips_total"] for r in run.steps[-_RECENT:] if r.get("ips_total")]
    if not speeds:
        return None
    speed = sum(speeds) / len(speeds)
    devices = run.environment.get("ranks")
    cost = f"{devices * 1000 / speed:.3g} seconds of a device for 1,000 tokens" if isinstance(devices, int) else ""
    return Card("Tokens a second", f"{speed:,.4g}" if speed < 1000 else f"{speed:,.0f}", cost)


def _model(run: Run) -> Card | None:
    model = run.recipe.get("model") or {}
    if not model.get("family"):
        return None
    config = model.get("config") or {}
    shape = (
        f"{config['num_hidden_layers']} layers of {config.get('hidden_size')}" if "num_hidden_layers" in config else ""
    )
    weights = model.get("weights")
    return Card("Model", model.get("preset") or model["family"], f"weights {weights}" if weights else shape)


def _method(run: Run) -> Card | None:
    lora, engine, train = (run.recipe.get(name) or {} for name in ("lora", "engine", "train"))
    if not run.recipe.get("stage"):
        return None
    rank = lora.get("rank")
    words = [f"{lora.get('method', 'lora')} of rank {rank}"] if rank is not None else []
    words += [str(engine[key]) for key in ("mode", "precision") if engine.get(key)]
    words += [f"batches of {train['global_batch_size']}"] if train.get("global_batch_size") else []
    return Card("Stage", str(run.recipe["stage"]), ", ".join(words))


def _data(run: Run) -> Card | None:
    data = run.recipe.get("data") or {}
    train = data.get("train")
    if not train:
        return None
    names = [str(name) for name in (train if isinstance(train, list) else [train])]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    shown = data.get("eval")
    return Card("Data", "/".join(Path(names[0]).parts[-2:]) + more, f"evaluated on {shown}" if shown else "")


def _mesh(run: Run) -> Card | None:
    found = run.environment
    if not found.get("mesh"):
        return None
    ranks = (
        f"{found['ranks']} rank{'s' * (found['ranks'] != 1)} on {found.get('device', '')}" if "ranks" in found else ""
    )
    return Card("Mesh", str(found["mesh"]), " ".join(part for part in (ranks, str(found.get("host", ""))) if part))


def _memory(run: Run) -> Card | None:
    peaks = run.series("peak_memory_bytes")[1]
    return Card("Peak memory", f"{max(peaks) * 1e-9:.3g} GB", "of rank 0") if peaks else None


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


_SAID: dict[str, Callable[[Record], str]] = {
    "started": lambda e: "Started" + (f", {e['of']:,} steps to go" if e.get("of") else ""),
    "resumed": lambda e: f"Resumed after step {e.get('step')}",
    "saved": lambda e: f"Saved a checkpoint after step {e.get('step')}",
    "ended": lambda e: f"Ended after step {e.get('step')}, as planned",
    "stopped": lambda e: "Stopped" + (f" after step {e['step']}, with a checkpoint" if "step" in e else ", as asked"),
    "skipped": lambda e: f"Left out the bad step {e.get('step')}{_numbers(e)}",
    "rolled back": lambda e: f"Went back from step {e.get('step')} to the checkpoint of step {e.get('to')}",
    "restarting": lambda e: f"Restart {e.get('restart')} of {e.get('of')} from step {e.get('step')}: {e.get('why')}",
    "hung": lambda e: f"Hung: no rank did anything for too long{_code(e)}; the end of the log names the call",
    "failed": lambda e: f"Failed{_code(e)}" + (f": {e['error']}" if e.get("error") else "; see logs/workerlog.0"),
}  # fmt: skip


def event_line(event: Record) -> tuple[str, str]:
    """When an event was, and what it was, in words."""
    say = _SAID.get(str(event["event"]))
    if say is not None:
        return _when(event), say(event)
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
    return _when(event), f"{event['event']}: {rest}" if rest else str(event["event"])


def _numbers(event: Record) -> str:
    known: list[tuple[str, Any]] = [("loss", event.get("loss")), ("gradient norm", event.get("grad_norm"))]
    said = ", ".join(f"{name} {value:.4g}" for name, value in known if isinstance(value, (int, float)))
    return f" ({said})" if said else ""


def _code(event: Record) -> str:
    return f" with exit code {event['exit_code']}" if event.get("exit_code") is not None else ""
