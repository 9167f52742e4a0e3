"""A disk that is really full, one that cannot be written to, a directory that is taken: named, and nothing is lost."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.base.files import broken_file
from tests.multi.conftest import Runner, learnt
from tests.support.interrupted_runs import MESHES, SMALL
from tests.support.paths import ROOT

STEPS = 8
COMMON = (f"--train.max_steps={STEPS}", *SMALL, "--checkpoint.save_steps=2", *MESHES[1])
KEEP = "--checkpoint.keep_last=9"


def in_own_mounts(runner: Runner, script: str) -> str:
    """What a shell script prints where `mount` works for it alone. Skips where the kernel allows nobody that."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if subprocess.run([*inside, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode != 0:
        pytest.skip(
            "needs user namespaces; tests/unit/base/test_committed_directory.py fails every system call instead"
        )
    done = subprocess.run(
        [*inside, script], cwd=ROOT, env=runner.environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(*words: str) -> str:
    return shlex.join([sys.executable, "-m", "llmsuite", *words])


@pytest.fixture(scope="module")
def whole(runner: Runner) -> Path:
    runner.run(*runner.smoke("whole", *COMMON, KEEP))
    return runner.directory / "whole"


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_full_disk_ends_the_run_and_keeps_what_is_there(
    runner: Runner, whole: Path, tmp_path: Path, in_background: str
) -> None:
    size = sum(path.stat().st_size for path in (whole / "checkpoints/step-2").iterdir())
    disk = tmp_path / "disk"
    result = tmp_path / "result"
    disk.mkdir()
    run = command("run", "recipes/llama/dpo.json", "--smoke", f"--output_dir={disk / 'run'}", *COMMON, KEEP)
    run += f" --checkpoint.async_save={in_background}"
    output = in_own_mounts(
        runner,
        f"""
        mount -t tmpfs -o size={int(2.5 * size)} tmpfs {disk}
        code=0; {run} 2>&1 || code=$?
        echo "ended with $code"; ls {disk}/run/checkpoints; cp -r {disk}/run {result}
        mount -o remount,size={20 * size} {disk}
        {run} --resume 2>&1
        cp -r {disk}/run {result}-resumed
        """,
    )
    step = result / "checkpoints"
    assert f"{disk}/run/checkpoints/step-6: cannot be written: No space left on device; nothing was changed" in output
    assert "ended with 2" in output
    assert "Traceback" not in output
    assert sorted(path.name for path in step.iterdir()) == ["latest", "step-2", "step-4"]
    assert broken_file(step / "step-2") is None
    assert broken_file(step / "step-4") is None
    assert f"resuming from {disk}/run/checkpoints/step-4" in output
    resumed = Path(f"{result}-resumed")
    lines = (resumed / "metrics.jsonl").read_text().splitlines()
    assert learnt([r for line in lines if "loss" in (r := json.loads(line))]) == learnt(runner.metrics("whole"))
    last = [
        json.loads((run / f"checkpoints/step-{STEPS}/manifest.json").read_text())["files"] for run in (resumed, whole)
    ]
    assert last[0] == last[1]


def test_a_place_that_cannot_be_written_to(runner: Runner, whole: Path, tmp_path: Path) -> None:
    run = command("run", "recipes/llama/dpo.json", "--smoke", f"--output_dir={tmp_path}/run", *COMMON)
    merge = command("merge", str(whole), "-o", f"{tmp_path}/merged")
    output = in_own_mounts(
        runner,
        f"""
        mount -t tmpfs -o ro tmpfs {tmp_path}
        for command in {shlex.quote(run)} {shlex.quote(merge)}; do
            code=0; sh -c "$command" 2>&1 || code=$?
            echo "ended with $code"
        done
        """,
    )
    assert output.count("ended with 2") == 2
    assert f"{tmp_path}/run: cannot be written to: Read-only file system" in output
    assert f"{tmp_path}/merged" in output.partition("ended with 2")[2]
    assert output.count("Read-only file system") == 2
    assert "Traceback" not in output


def test_a_second_run_in_the_directory_of_one_that_is_running(runner: Runner) -> None:
    words = runner.smoke("shared", *MESHES[1], "--train.max_steps=20000", *SMALL)
    first = runner.start(*words)
    runner.wait_for_step("shared", 1, first)
    output = runner.run(*words, "--resume", expect=2)
    assert f"{runner.directory / 'shared'}: another run is writing there" in output
    assert first.poll() is None
    first.terminate()
    assert first.communicate(timeout=120)[0].count("stopping after this step") == 1
    assert first.returncode == 130


def test_when_no_checkpoint_is_whole_nothing_is_begun_anew(runner: Runner, whole: Path) -> None:
    """Damaged after a flipped bit, a file cut short, and a file that is missing."""
    words = runner.smoke("damaged", *COMMON, "--checkpoint.keep_last=3", "--train.max_steps=6")
    words = [word for word in words if word != f"--train.max_steps={STEPS}"]
    runner.run(*words)
    files = [next((runner.directory / f"damaged/checkpoints/step-{n}").glob("model-*")) for n in (2, 4, 6)]
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    output = runner.run(*words, "--resume", expect=2)
    for file, fault in zip(files, ("does not have the sha256", f"has {len(content) - 1:,} bytes", "is missing")):
        assert f"{file} {fault}" in output
    assert "none of its checkpoints is complete; move them away to start at step 0" in output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_directory_that_is_removed_ends_the_run(runner: Runner, ranks: int) -> None:
    """At the next step, and nothing is made in its place."""
    name = f"removed-{ranks}"
    words = (f"--train.max_steps={STEPS}", *SMALL, "--checkpoint.save_steps=2", *MESHES[ranks])
    process = runner.start_and_hold(name, 3, *runner.smoke(name, *words), saved=2)
    shutil.rmtree(runner.directory / name)
    runner.let_go(name)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert f"{runner.directory / name}: was removed or replaced while it was written to" in output
    assert "Traceback" not in output
    assert not (runner.directory / name).exists()
