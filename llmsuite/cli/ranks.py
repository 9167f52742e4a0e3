"""Commands that run a model on several ranks of this machine."""

from __future__ import annotations

import re
import sys
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.locks import scratch_directory
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees


def add_degrees(parser: Any) -> None:
    """Add the options for splitting a model over ranks."""
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "--tensor_parallel_degree",
        type=PositiveInt | None,
        default=None,
        help="ranks that share each matrix (default: all)",
    )
    parser.add_argument(
        "--pipeline_parallel_degree", type=PositiveInt, default=1, help="pipeline stages that the layers are split into"
    )


def settle_degrees(args: Any) -> Degrees:
    """The parallel degrees of a command line. Sets `num_devices` and `tensor_parallel_degree` where they are not given.

    Raises:
        UserError: the options contradict each other.
    """
    pp = args.pipeline_parallel_degree
    count = args.num_devices
    tp = args.tensor_parallel_degree or max(1, count // pp)
    if count not in (1, tp * pp):
        raise UserError(
            f"--num_devices: is {count}, and tensor parallel x pipeline parallel is {tp} x {pp}; leave out one of them"
        )
    args.num_devices = tp * pp
    args.tensor_parallel_degree = tp
    return Degrees(pp, 1, 1, tp)


def launch_ranks(args: Any, registry: Registry) -> int:
    """Start this command once per rank, and wait for the end."""
    backend = registry.device(args.device).factory()
    from llmsuite.launch.launch import launch

    backend.prepare_ranks()

    def environment(local_rank: int) -> dict[str, str]:
        return dict(backend.variables(args.num_devices, local_rank, inference_only=True))

    with scratch_directory() as logs:
        log = re.compile(rf"; its log: {re.escape(str(logs))}\S*")

        def write(text: str) -> None:
            print(log.sub("", text), end="", flush=True)  # the logs are deleted at the end

        command = [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
        return launch(command, args.num_devices, logs, environment, write)
