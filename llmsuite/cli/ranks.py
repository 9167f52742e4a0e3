"""Commands that run a model on several ranks of this machine."""

from __future__ import annotations

import re
import sys
from typing import Any

from llmsuite.errors import UserError
from llmsuite.locks import scratch_directory
from llmsuite.plugins.manager import Registry
from llmsuite.schema.degrees import Degrees


def add_degrees(parser: Any) -> None:
    """Add the options that say how a model is cut over ranks."""
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "--tensor_parallel_degree",
        type=PositiveInt | None,
        default=None,
        help="ranks that share each matrix (default: all)",
    )
    parser.add_argument(
        "--pipeline_parallel_degree", type=PositiveInt, default=1, help="parts that the layers are cut into"
    )


def settle_degrees(args: Any) -> Degrees:
    """The ranks that a command line asks for; sets what it leaves open: `num_devices` is their number afterwards.

    Raises:
        UserError: the options contradict each other.
    """
    pp, count = args.pipeline_parallel_degree, args.num_devices
    tp = args.tensor_parallel_degree or max(1, count // pp)
    if count not in (1, tp * pp):
        raise UserError(
            f"--num_devices: is {count}, and tensor parallel x pipeline parallel is {tp} x {pp}; leave out one of them"
        )
    args.num_devices, args.tensor_parallel_degree = tp * pp, tp
    return Degrees(pp, 1, 1, tp)


def launch_ranks(args: Any, registry: Registry) -> int:
    """Start this command once per rank, and wait for the end."""
    if args.device not in registry.devices:
        raise UserError(registry.unknown("device", args.device))
    backend = registry.devices[args.device].factory()
    from llmsuite.launch.launch import launch

    backend.prepare_ranks()

    def environment(local_rank: int) -> dict[str, str]:
        return dict(backend.variables(args.num_devices, local_rank, answers=True))

    with scratch_directory() as logs:
        log = re.compile(rf"; its log: {re.escape(str(logs))}\S*")

        def write(text: str) -> None:
            print(log.sub("", text), end="", flush=True)  # the logs are gone when somebody reads this

        command = [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
        return launch(command, args.num_devices, logs, environment, write)
