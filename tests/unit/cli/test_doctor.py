"""Findings of the doctor, and the fixes that it names."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import types
from typing import Any

import pytest

from llmsuite.base.commands import CommandTimeout, Finished
from llmsuite.cli import doctor
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry

Patch = pytest.MonkeyPatch


def findings_by_name(findings: Any) -> dict[str, tuple[str, str]]:
    return {what: (level, text) for level, what, text in findings}


def test_a_machine_that_meets_all_requirements() -> None:
    assert {level for level, _ in findings_by_name(doctor._machine()).values()} <= {"ok", "warn"}


@pytest.mark.parametrize(
    ("what", "patch", "fix"),
    [
        ("free disk", lambda p: p.setattr(shutil, "disk_usage", lambda path: usage(1e9)), "free some"),
        ("shared memory", lambda p: p.setattr(shutil, "disk_usage", lambda path: usage(6e7)), "--shm-size=2g"),
        ("g++", lambda p: p.setattr(shutil, "which", lambda name: None), "apt-get install g++"),
        ("open files", lambda p: p.setattr(resource, "getrlimit", lambda kind: (256, 2048)), "ulimit -n 2048"),
        ("memory", lambda p: p.setattr(doctor, "available_memory_bytes", lambda: 10**9), "end other programs"),
    ],
)
def test_a_shortage_is_reported_with_its_fix(monkeypatch: Patch, what: str, patch: Any, fix: str) -> None:
    patch(monkeypatch)
    level, text = findings_by_name(doctor._machine())[what]
    assert level == "warn"
    assert fix in text


def usage(size: float) -> Any:
    return types.SimpleNamespace(free=size, total=size)


def test_another_python_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 13, 1))
    level, text = findings_by_name(doctor._machine())["python"]
    assert (level, "install Python 3.10, 3.11 or 3.12" in text) == ("BAD", True)


def test_packages_outside_of_their_pins(monkeypatch: Patch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [
        "numpy<2,>=1.26", "pluggy<1", 'paddlepaddle==9.9.9; extra == "cpu"', 'pytest<1; extra == "test"', "absent>=3",
    ])  # fmt: skip
    found = [text for level, _, text in doctor._pins() if level == "warn"]
    assert len(found) == 2
    assert found[0].endswith("was not tested; pip install 'pluggy<1'")
    assert found[1].endswith("was not tested; pip install 'paddlepaddle==9.9.9'")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=1"])
    assert [level for level, _, _ in doctor._pins()] == ["ok"]


def test_two_paddles_overwrite_each_other(monkeypatch: Patch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.3.1")
    assert findings_by_name(doctor._packages())["paddle"][0] == "BAD"


def test_variables_of_a_rank_in_a_shell_make_it_none(
    monkeypatch: Patch, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setattr(doctor, "_device", lambda name, registry: iter([("ok", "device", "there")]))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name, value in (("PADDLE_TRAINER_ID", "0"), ("PADDLE_TRAINERS_NUM", "2")):
        assert f"warn  {name:14}  is '{value}' in the environment" in printed
    assert "unset it if there is none" in printed


def test_the_speed_of_a_product_is_of_the_fastest_of_five(monkeypatch: Patch) -> None:
    seconds = iter([0, 3, 3, 5, 5, 5.5, 6, 7, 7, 8])
    dtypes = list[Any]()
    monkeypatch.setattr(doctor, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))

    def product(x: Any, y: Any, *transposed: bool) -> Any:
        dtypes.append(x.dtype)
        return x @ y

    assert doctor._gflops(product, "float64") == 2 * 1024**3 / 0.5 / 1e9  # a multiplication and an addition each
    assert {str(dtype) for dtype in dtypes} == {"paddle.float64"}


def test_the_wrong_path_of_mkl(monkeypatch: Patch, registry: Registry) -> None:
    monkeypatch.setattr("llmsuite.devices.cpu.mkl_path", lambda: "5")
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "4")
    level, text = findings_by_name(doctor._device("cpu", registry))["MKL path"]
    assert (level, text.endswith("unset MKL_DEBUG_CPU_TYPE")) == ("warn", True)
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "5")
    found = findings_by_name(doctor._device("cpu", registry))
    assert "MKL path" not in found
    assert float(found["matrix product"][1].split()[0]) > 0


def test_a_device_that_is_not_there(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings_by_name(doctor._device("gpux", registry))["device"][0] == "BAD"
    assert main(["doctor", "--device=gpu", "--num_devices=2"]) == 2
    out = capsys.readouterr().out
    assert "BAD   device gpu" in out
    assert "network" not in out, "nothing to check without a device"


@pytest.mark.parametrize(
    ("code", "out", "error", "finding"),
    [
        (0, "works well on 1 CPU.\ninstalled successfully!", "", ("ok", "run_check", "works well on 1 CPU.")),
        (
            0, "works well on 1 GPU.\nONLY for single GPU!", "meets some problem\n Original Error is: no NCCL",
            ("warn", "run_check", "works well on 1 GPU. Not on more: Original Error is: no NCCL"),
        ),
        (-6, "Running verify", "a\nb\nAborted", ("BAD", "run_check", "fails with exit code -6: a; b; Aborted")),
        (0, "", "", ("BAD", "run_check", "fails with exit code 0: ")),
    ],
)  # fmt: skip
def test_the_check_of_paddle(monkeypatch: Patch, code: int, out: str, error: str, finding: doctor.Finding) -> None:
    monkeypatch.setattr(doctor, "run_command", lambda *args: Finished(code, out, error))
    level, what, text = doctor.run_check({})
    assert (level, what) == finding[:2]
    assert text.endswith(finding[2])


def test_a_check_that_hangs(monkeypatch: Patch) -> None:
    def hang(*args: object) -> None:
        raise CommandTimeout("it takes too long")

    monkeypatch.setattr(doctor, "run_command", hang)
    assert doctor.run_check({})[0] == "BAD"


def test_a_slow_pair_is_named() -> None:
    found = {"right": True, "call_seconds": 3e-4, "bandwidth": 1e9, "pairs": {"0-1": 9e8, "1-2": 1e8, "2-3": 1e9}}
    by_name = findings_by_name(doctor.network_findings(found, 4))
    assert by_name["network"] == ("ok", "all-reduce over 4 ranks: 1.00 GB/s a rank at 16 MiB, 0.30 ms at 4 KiB")
    assert {what: level for what, (level, _) in by_name.items() if what.startswith("ranks")} == {
        "ranks 0-1": "ok",
        "ranks 1-2": "warn",
        "ranks 2-3": "ok",
    }
    assert "others 0.90" in by_name["ranks 1-2"][1]


def test_wrong_sums_are_bad() -> None:
    found = {"right": False, "call_seconds": 1.0, "bandwidth": 1.0, "pairs": {}}
    assert next(iter(doctor.network_findings(found, 2)))[0] == "BAD"


def test_several_machines_need_a_master_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nnodes=2"]) == 2
    assert "--master: is required with several machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--nnodes=2", "--master=localhost"], "--master: is 'localhost'; it has to be host:port"),
        (["--nnodes=2", "--master=localhost:1", "--node_rank=2"], "--node_rank: is 2; with nnodes 2 it is at most 1"),
        (["--num_devices=0"], "--num_devices: expected a whole number above 0, found '0'"),
    ],
)
def test_an_impossible_address_is_refused(words: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert output in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "gpu", "xpu"])
def test_the_kernel_of_each_operation(name: str, registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of devices that are not here."""
    assert main(["doctor", "--ops", f"--device={name}"]) == 0
    backend = registry.devices[name].factory()
    fused = dict[str, set[str]]()
    precision = ""
    output, _, rest = capsys.readouterr().out.partition(f"{name}, sums of gradients over data ranks ")
    assert "partial(" not in output, "each is described by its own words"
    for line in output.splitlines():
        words = line.split()
        if not line.startswith(" "):
            assert words[0] == f"{name},"
            precision = words[1]
            fused[precision] = set()
        elif words[0] == "products":
            speed = line.rpartition(": ")[2]
            assert float(speed.removesuffix(" GFLOP/s")) > 0 if name == "cpu" else speed == "not measured"
        elif words[1] == "fused":
            fused[precision].add(words[0])
        else:
            assert words[1] == "plain"
    assert tuple(fused) == backend.precisions_of(trains=True)
    for precision, operations in fused.items():
        assert operations - {"causal_mask", "document_mask"} == backend.fused(precision)
    assert [" ".join(line.split()) for line in rest.splitlines()] == SUMS[name]


UNLESS = "unless parallel.gradient_bucket_bytes is set"


def sums(name: str, library: str, meanwhile: str) -> list[str]:
    """The lines about sums of gradients."""
    over_tensor_ranks = [
        f"{name}, sums of gradients over tensor parallel ranks",
        f"products of a weight's gradient {meanwhile}",
    ]
    return [f"({library})", f"calls up to 25 MiB in one call, {UNLESS}", f"passes {meanwhile}", *over_tensor_ranks]


SUMS = {
    "cpu": sums("cpu", "gloo", "wait for each call"),
    "gpu": sums("gpu", "nccl", "continue during a call"),
    "xpu": sums("xpu", "bkcl", "continue during a call"),
}


def test_the_kernels_of_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ops", "--device=xpuu"]) == 2
    assert "did you mean 'xpu'" in capsys.readouterr().err
