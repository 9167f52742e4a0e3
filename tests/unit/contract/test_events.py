"""Events of a run reach every plugin that wants them; one that fails is silenced, not the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmsuite
from llmsuite.contract import hookspecs
from llmsuite.contract.hookspecs import RunView
from llmsuite.contract.registry import PluginInfo
from tests.conftest import STAGE_PLUGIN, PluginSite, registry_with

RUN = RunView(Path("runs/x"), {"seed": 1}, num_ranks=2, total_steps=5)


class Follower:
    """Records the events that it receives."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    @llmsuite.hookimpl
    def llmsuite_run_start(self) -> None:
        self.received.append("start")

    @llmsuite.hookimpl
    def llmsuite_step_end(self, step: int) -> None:
        self.received.append(step)

    @llmsuite.hookimpl
    def llmsuite_checkpoint_saved(self, path: Path, run: RunView) -> None:
        self.received.append((path, run.total_steps))

    @llmsuite.hookimpl
    def llmsuite_run_end(self, run: RunView, step: int) -> None:
        self.received.append((run, step))


class Failing(Follower):
    """Fails at every step."""

    llmsuite_critical = False

    @llmsuite.hookimpl
    def llmsuite_step_end(self, step: int) -> None:
        self.received.append(step)
        raise RuntimeError(f"server gone at step {step}")


class Critical(Failing):
    llmsuite_critical = True


def test_only_the_arguments_a_plugin_wants_are_passed() -> None:
    follower = Follower()
    registry = registry_with(follower=follower)
    registry.emit("llmsuite_run_start", run=RUN)
    registry.emit("llmsuite_step_end", run=RUN, step=3, metrics={"loss": 1.0})
    registry.emit("llmsuite_checkpoint_saved", run=RUN, step=3, path=Path("p"))
    registry.emit("llmsuite_run_error", run=RUN, error=ValueError())  # this plugin does not follow it
    registry.emit("llmsuite_run_end", run=RUN, step=5)
    assert follower.received == ["start", 3, (Path("p"), 5), (RUN, 5)]


def test_failing_plugin_is_reported_once_and_hears_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    first = Follower()
    failing = Failing()
    last = Follower()
    registry = registry_with(first=first, failing=failing, last=last)
    for step in (1, 2, 3):
        registry.emit("llmsuite_step_end", run=RUN, step=step, metrics={})
    registry.emit("llmsuite_run_end", run=RUN, step=3)
    assert failing.received == [1]  # nor the events it would have survived
    assert first.received == last.received == [1, 2, 3, (RUN, 3)]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("plugin failing failed in llmsuite_step_end and gets no more events") == 1
    assert err.count("RuntimeError: server gone at step 1") == 1
    assert "test_events.py" in err  # with the traceback its author needs


def test_critical_plugin_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    registry = registry_with(critical=Critical())
    for step in (1, 2):  # every time: it is not silenced
        with pytest.raises(RuntimeError, match=f"server gone at step {step}"):
            registry.emit("llmsuite_step_end", run=RUN, step=step, metrics={})
        said = "failed in llmsuite_step_end, which ends the run because the plugin sets llmsuite_critical\n"
        assert capsys.readouterr() == ("", f"llmsuite: plugin critical {said}")


def test_interrupt_is_not_a_plugin_failing() -> None:
    class Interrupted:
        @llmsuite.hookimpl
        def llmsuite_step_end(self) -> None:
            raise KeyboardInterrupt

    registry = registry_with(interrupted=Interrupted())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            registry.emit("llmsuite_step_end", run=RUN, step=1, metrics={})


def test_exit_in_an_event_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Exits:
        @llmsuite.hookimpl
        def llmsuite_step_end(self) -> None:
            raise SystemExit(3)

    registry_with(exits=Exits()).emit("llmsuite_step_end", run=RUN, step=1, metrics={})
    said = capsys.readouterr().err
    assert said.startswith("llmsuite: plugin exits failed in llmsuite_step_end and gets no more events:")
    assert said.rstrip().endswith("SystemExit: 3")


def test_two_objects_of_one_class_both_follow() -> None:
    registry = registry_with()
    followers = [Follower(), Follower()]
    for follower in followers:
        registry.require(PluginInfo("Follower", "this program", "Follower", plugin=follower))
    registry.emit("llmsuite_step_end", run=RUN, step=3, metrics={})
    assert [follower.received for follower in followers] == [[3], [3]]


def test_events_of_a_package(site: PluginSite, capsys: pytest.CaptureFixture[str]) -> None:
    from llmsuite.contract.registry import load_plugins

    event = "\n@llmsuite.hookimpl\ndef llmsuite_run_end(step):\n    print('ended at', step)\n"
    site.install("third-party", STAGE_PLUGIN + event)
    registry = load_plugins()
    registry.emit("llmsuite_run_end", run=RUN, step=9)
    assert capsys.readouterr().out == "ended at 9\n"


def test_every_event_of_the_contract_can_be_followed() -> None:
    events = [name for name in hookspecs.hook_names() if not name.startswith("llmsuite_register_")]
    assert len(events) == 6
    registry = registry_with()
    for name in events:
        wanted = getattr(registry.pm.hook, name).spec.argnames
        assert wanted[0] == "run"
        registry.emit(name, **dict.fromkeys(wanted))
