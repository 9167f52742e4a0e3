"""The first day on a device: its acts, limits and file. `tests/multi/test_sim_further.py` runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmsuite.base.resources import bundled
from llmsuite.cli import first_day as module
from llmsuite.cli.first_day import EPSILON, STEPS, Act, _acts, _Day, _training, loss_limit, read_reference
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.support.paths import ROOT


class Asked(_Day):
    """A day on which no command is run."""

    def llmsuite(self, words: Sequence[str]) -> tuple[int, str]:
        return 1, f"{words[0]} is not run"


def day(tmp_path: Path, size: module.Size = "tiny") -> Asked:
    return Asked("cpu", size, tmp_path, {"sft": [4.0] * STEPS}, {})


@pytest.mark.parametrize("size", ["tiny", "135m"])
def test_there_are_losses_of_a_cpu(size: module.Size) -> None:
    reference = read_reference(size)
    assert reference.keys() == {"sft", "dpo"}
    assert all(len(losses) == STEPS for losses in reference.values())


@pytest.mark.parametrize("size", ["tiny", "135m"])
@pytest.mark.parametrize("device", ["cpu", "gpu", "xpu", "npu"])
def test_every_act_is_legal_on_every_device(size: module.Size, device: str, tmp_path: Path, registry: Registry) -> None:
    backend = registry.device(device).factory()
    asked = Asked(device, size, tmp_path, {}, {})
    acts = [
        act
        for act, run in _acts(asked, backend.precisions_of(trains=True), True, backend.runs_step_programs)
        if run(act) is None
    ]
    names = [act.name for act in acts]
    assert names[-5:] == ["dpo", "pipeline", "program", "resume", "serve"]
    for act in acts[:-2]:
        _, recipe, _, *words = act.words
        plan = plan_run(ROOT / recipe, words, registry, smoke=True)
        assert plan.parallel.device.name == device
        assert act.problems == ["ends with exit code 1"]
        assert act.output == "run is not run"
        if size == "135m":
            assert plan.model.config.hidden_size == 576
    assert all("sft has left no checkpoint" in act.problems[0] for act in acts[-2:])


def test_a_loss_beyond_rounding_is_named(tmp_path: Path) -> None:
    act = Act("sft", "fp32", losses=[4.0, 4.0, 4.0 * (1 + 1e-4), float("nan")])
    day(tmp_path).compare(act, "sft")
    assert [problem.partition(" is ")[0] for problem in act.problems] == ["loss 4.0004 in step 3", "loss nan in step 4"]
    short = Act("sft", "bf16", losses=[4.0])
    day(tmp_path).compare(short, "sft")
    assert short.problems == [f"has 1 steps instead of {STEPS}"]


@pytest.mark.parametrize("precision", EPSILON)
def test_the_guide_has_the_limits(precision: str) -> None:
    text = (ROOT / "docs" / "guide" / "devices.md").read_text(encoding="utf-8")
    assert f"{loss_limit(precision, 1):.1e}".replace("e-0", "e-") in text
    assert loss_limit(precision, 2) == loss_limit(precision, 1) * (10 if precision == "fp32" else 4)


def test_losses_of_a_run_are_read(tmp_path: Path) -> None:
    class Ran(_Day):
        def llmsuite(self, words: Sequence[str]) -> tuple[int, str]:
            target = Path(words[-1].removeprefix("--output_dir="))
            target.mkdir()
            records = [{"loss": 4.0, "peak_memory_bytes": 5}, {"eval/loss": 3.0}, *[{"loss": 4.0}] * (STEPS - 1)]
            (target / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
            return 0, ""

    act = Act("sft", "fp32")
    _training(Ran("cpu", "tiny", tmp_path, {"sft": [4.0] * STEPS}, {}), "sft")(act)
    assert (act.problems, act.losses) == ([], [4.0] * STEPS)
    assert act.seconds > 0


def test_a_day_that_is_interrupted_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(act: Act) -> None:
        raise KeyboardInterrupt

    acts = [(Act("first", "fp32"), lambda act: act.losses.append(4.0)), (Act("second", "fp32"), interrupt)]
    monkeypatch.setattr(module, "_acts", lambda *given: acts)
    file = tmp_path / "day.json"
    with pytest.raises(KeyboardInterrupt):
        module.first_day(str(file), "tiny", "cpu", registry_with())
    (act,) = json.loads(file.read_text())["acts"]
    assert (act["name"], act["losses"]) == ("first", [4.0])


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("no/such/day.json", "a" * 300):
        assert main(["doctor", f"--first-day={tmp_path / name}"]) == 2
        assert "cannot be written: " in capsys.readouterr().err


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.json").touch()
    assert main(["doctor", f"--first-day={tmp_path / 'there.json'}"]) == 2
    assert "exists; name a new file" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"--first-day={tmp_path / 'new.json'}", "--device=npu"]) == 2
    assert "has no plug-in for device npu" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()


def test_recipes_are_bundled() -> None:
    assert {"sft.json", "dpo.json"} <= {path.name for path in (bundled("recipes") / "llama").iterdir()}
