"""While a rank waits inside `dist.reshard`, its other threads go on: those that send a pipeline's messages have to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.launch.launch import launch
from tests.conftest import PluginSite
from tests.support.paths import ROOT

PLUGIN = """
import threading, time
from pathlib import Path
import llmsuite
from llmsuite.contract.hookspecs import Command

def run(arguments, registry):
    from llmsuite.devices.start import start_paddle

    start_paddle(registry.devices["cpu"].factory(), 2, join=True)
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.api import dtensor_from_local
    from llmsuite.parallel import collective
    from llmsuite.contract.schema.degrees import Degrees

    mesh, sign = collective.start(Degrees(1, 1, 1, 2)), Path(arguments.file)
    part = dtensor_from_local(paddle.ones([4]), mesh.tensor, [dist.Partial()])

    def give_sign():
        time.sleep(1)  # by now the main thread is inside
        sign.touch()

    if mesh.rank == 0:
        threading.Thread(target=give_sign).start()
    else:
        deadline = time.monotonic() + 25
        while not sign.exists():
            assert time.monotonic() < deadline, "rank 0 stands still while it waits"
            time.sleep(0.01)
    whole = dist.reshard(part, mesh.tensor, [dist.Replicate()])
    assert whole._local_value().tolist() == [2, 2, 2, 2]
    return 0

@llmsuite.hookimpl
def llmsuite_register_commands():
    add = lambda parser: parser.add_argument("file", type=str)
    return [Command(name="reshard-lock", help="wait", add_arguments=add, run=run)]
"""


def test_threads_go_on_while_a_rank_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PluginSite(tmp_path).install("reshard_lock", PLUGIN)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("LLMSUITE_PLUGINS", "reshard_lock")
    backend = CpuBackend()
    said = list[str]()
    backend.prepare_ranks()

    def environment(rank: int) -> dict[str, str]:
        return backend.variables(2, rank)

    words = [sys.executable, "-m", "llmsuite", "reshard-lock", str(tmp_path / "sign")]
    code = launch(words, 2, tmp_path / "logs", environment, said.append)
    assert code == 0, "".join(said)
