"""The command `llmsuite doctor`: checks that this machine can run llmsuite, and says how to fix what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite import __version__
from llmsuite.base.commands import CommandTimeout, Kept, run_command
from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.locks import scratch_directory
from llmsuite.base.memory import available_memory_bytes
from llmsuite.base.safe_files import is_dir
from llmsuite.cli.doctor_checks import CHECKS_FILE, check_device, device_findings
from llmsuite.cli.doctor_kernels import MESSAGES, show_kernels
from llmsuite.cli.first_day import first_day
from llmsuite.cli.tables import JSON_HELP, print_json
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import LaunchSection
from llmsuite.devices.variables import NUM_RANKS, RANK

_OK = "ok"
_WARN = "warn"
_BAD = "BAD"
_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu", "paddlenlp", "tokenizers", "safetensors", "numpy")
_LEAST_DISK = 5e9
_LEAST_SHARED = 0.5e9
_LEAST_FILES = 1024
_LEAST_MEMORY = 2e9
_SLOW_PAIR = 1 / 3
_STALL_SECONDS = 60.0
_CHECK_SECONDS = 300.0
_RESULT = "network: "
_RESHARD = "reshard: "
Finding = tuple[str, str, str]


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import NonNegativeInt, PositiveInt

    parser.add_argument("--device", type=str, default="cpu", help="the device to check; see: llmsuite list devices")
    parser.add_argument(
        "--num_devices",
        type=PositiveInt,
        default=1,
        help="devices of this machine; above 1 their network is checked too",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="only compare every operation with its plain form on the host; above 1 device messages too",
    )
    parser.add_argument(
        "--first-day",
        type=str | None,
        help="train, resume and serve a small model, compare with numbers of a CPU, and write all results to this file",
    )
    parser.add_argument("--size", type=Literal["tiny", "135m"], default="135m", help="with --first-day: its model")
    parser.add_argument("--ops", action="store_true", help="only show the kernel of each operation on this device")
    parser.add_argument(
        "--nnodes", type=PositiveInt, default=1, help="number of machines; start the same command on each"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--master", type=str | None, help="host:port of machine 0, with several machines")
    parser.add_argument("--node_rank", type=NonNegativeInt, default=0, help="number of this machine, from 0")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.launch.launch import is_worker, is_worker_of_others

    if args.nnodes > 1 and args.master is None:
        raise UserError(
            "--master: is required with several machines: host:port of machine 0, to which the others connect"
        )
    section = LaunchSection(
        num_devices=args.num_devices, nnodes=args.nnodes, master=args.master, node_rank=args.node_rank
    )
    for key, message in section.problems():
        raise UserError(f"--{key}: {message}")
    if is_worker() and not is_worker_of_others():
        return _rank(args, registry)
    if CHECKS_FILE in os.environ:
        return check_device(registry.device(args.device).factory(), Path(os.environ[CHECKS_FILE]))
    if args.first_day is not None:
        return first_day(args.first_day, args.size, args.device, registry)
    if args.kernels:
        return show_kernels(args, registry, start_ranks)
    if args.ops:
        return _show_ops(args.device, registry)
    width = 14
    found = []
    for level, what, text in _findings(args, registry):
        found.append({"level": level, "what": what, "text": text})
        if not args.json:
            print(f"{level:4}  {what:{width}}  {text}", flush=True)
    if args.json:
        print_json(found)
    return 2 if any(finding["level"] == _BAD for finding in found) else 0


def _show_ops(name: str, registry: Registry) -> int:
    """Print the kernel of each operation, even for a device that this machine does not have."""
    device = registry.find_device(name)
    if device is None:
        raise UserError(f"--device: {registry.unknown('device', name)}")
    backend = device.factory()
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    absent = backend.unavailable(1)
    if absent is None:
        backend.activate(0)
    for precision in backend.precisions_of(trains=True):
        ops = backend.ops(precision)
        print(f"{name}, {precision}")
        for operation, is_fused, what in _forms(ops, backend.optimizer_ops(precision)):
            print(f"  {operation:14}  {'fused' if is_fused else 'plain'}  {what}")
        speed = "not measured"
        if absent is None:
            speed = f"{_gflops(ops.matmuls.matmul, backend.parameter_dtype(precision)):.0f} GFLOP/s"
        print(f"  {'products':14}  {backend.matmul_backend(precision)}: {speed}")
    print(f"{name}, sums of gradients over data ranks ({backend.collectives})")
    limit = backend.gradient_bucket_bytes
    bucket = "one call for each parameter"
    if limit:
        bucket = f"up to {limit / 2**20:g} MiB in one call"
    print(f"  calls           {bucket}, unless parallel.gradient_bucket_bytes is set")
    overlap = "wait for each call"
    if backend.overlaps_communication:
        overlap = "continue during a call"
    print(f"  passes          {overlap}")
    print(f"{name}, sums of gradients over tensor parallel ranks")
    print(f"  products        of a weight's gradient {overlap}")
    return 0


def _forms(ops: Any, optimizer_ops: Any) -> Iterator[tuple[str, bool, str]]:
    """For each operation: its name, True where a kernel replaces the plain form, and the first paragraph of the
    docstring of the form that is used."""
    from llmsuite.devices.kernel_table import forms
    from llmsuite.devices.ops import Ops
    from llmsuite.devices.optimizer_ops import OptimizerOps

    plain = forms(Ops(), OptimizerOps())
    for operation, form in forms(ops, optimizer_ops).items():
        if form is None:
            yield operation, False, "None: the other operations, one after the other."
        else:
            summary = " ".join((form.__doc__ or form.__name__).split("\n\n")[0].split())
            yield operation, form is not plain[operation], summary


def _findings(args: Any, registry: Registry) -> Iterator[Finding]:
    yield from _machine()
    yield from _rank_variables()
    yield from _packages()
    yield from _pins()
    usable = True
    for finding in _device(args.device, registry):
        usable &= finding[0] != _BAD
        yield finding
    if usable and args.num_devices * args.nnodes > 1:
        yield from _network(args, registry)
    yield from _plugins(registry)


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    if good:
        yield _OK, "python", version
    else:
        yield _BAD, "python", f"{version}; install Python 3.10, 3.11 or 3.12"
    yield _OK, "llmsuite", __version__
    yield _OK, "cores", str(os.cpu_count())
    memory = available_memory_bytes()
    if memory is not None:
        text = f"{memory / 1e9:.1f} GB free"
        yield _level(memory, _LEAST_MEMORY, "memory", text, "end other programs, or take a larger machine")
    compiler = shutil.which("g++")
    if compiler:
        yield _OK, "g++", compiler
    else:
        yield _WARN, "g++", "missing; apt-get install g++ (or your system's package)"
    free = shutil.disk_usage(Path.cwd()).free
    yield _level(free, _LEAST_DISK, "free disk", f"{free / 1e9:.0f} GB here", "free some, or choose another output_dir")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = 4096
    if hard != resource.RLIM_INFINITY:
        reachable = min(4096, hard)
    yield _level(soft, _LEAST_FILES, "open files", str(soft), f"ulimit -n {reachable}")
    if is_dir(Path("/dev/shm")):
        shared = shutil.disk_usage("/dev/shm").total
        fix = "mount -o remount,size=2G /dev/shm; in a container: docker run --shm-size=2g"
        yield _level(shared, _LEAST_SHARED, "shared memory", f"{shared / 1e9:.1f} GB in /dev/shm", fix)


def _rank_variables() -> Iterator[Finding]:
    """Variables of a rank that are still set in this shell."""
    for name in (RANK, NUM_RANKS):
        if name in os.environ:
            text = f"is {os.environ[name]!r} in the environment: a run takes itself for a rank of another launcher"
            yield _WARN, name, f"{text}; unset it if there is none"


def _level(found: float, least: float, what: str, text: str, fix: str) -> Finding:
    if found >= least:
        return _OK, what, text
    return _WARN, what, f"{text}; {fix}"


def _packages() -> Iterator[Finding]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield _OK, name, found[name]
    if "paddlenlp" not in found:
        yield _WARN, "paddlenlp", f"missing, which LoRA needs; {install_command('paddlenlp', alone='paddlenlp')}"
    paddles = [name for name in found if name.startswith("paddlepaddle")]
    if not paddles:
        yield _BAD, "paddle", f"missing; {install_command('cpu')}, or the gpu or xpu build"
    elif len(paddles) > 1:
        yield _BAD, "paddle", f"{' and '.join(paddles)} overwrite each other; uninstall all of them, then install one"


def _pins() -> Iterator[Finding]:
    """Installed packages against the ranges llmsuite was tested with."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # comes with Paddle's packages
        yield _WARN, "pins", "not checked: packaging is missing; pip install packaging"
        return
    wrong = 0
    for text in importlib.metadata.requires("llmsuite") or []:
        pin = Requirement(text)
        extra = pin.marker is not None and not any(pin.marker.evaluate({"extra": e}) for e in ("", "cpu", "data"))
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed; required packages are listed above
        if not extra and not pin.specifier.contains(version, prereleases=True):
            wrong += 1
            yield _WARN, "pins", f"{pin.name} {version} was not tested; pip install '{pin.name}{pin.specifier}'"
    if not wrong:
        yield _OK, "pins", "every package is of a version that was tested"


def _device(name: str, registry: Registry) -> Iterator[Finding]:
    device = registry.find_device(name)
    if device is None:
        yield _BAD, "device", registry.unknown("device", name)
        return
    backend = device.factory()
    for key, value in backend.environment(1).items():
        yours = os.environ.get(key)
        shown = f"{value} (set by llmsuite)" if yours is None else f"{yours} (set by you)"
        yield _OK, f"env {key}", shown
    mkl = os.environ.get("MKL_DEBUG_CPU_TYPE")
    fastest = backend.environment(1).get("MKL_DEBUG_CPU_TYPE")
    if fastest is not None and mkl not in (None, fastest):
        yield (
            _WARN,
            "MKL path",
            f"MKL_DEBUG_CPU_TYPE is {mkl}, {fastest} is this processor's fastest path; unset MKL_DEBUG_CPU_TYPE",
        )
    from llmsuite.devices.start import start_paddle

    try:
        start_paddle(backend, 1)
    except ImportError as error:
        yield _BAD, "device", f"Paddle does not import: {error}; {backend.install}"
        return
    reason = backend.unavailable(1)
    known = f"usable; precisions {', '.join(backend.precisions)}"
    if backend.training_precisions:
        known += f", and {', '.join(backend.training_precisions)} in training"
    if reason:
        yield _BAD, f"device {name}", reason
    else:
        yield _OK, f"device {name}", known
    for precision in backend.training_precisions:
        if precision_warning := backend.precision_warning(precision):
            yield _WARN, precision, precision_warning
    if reason is None:
        from llmsuite.devices.matmul_ops import matmul

        backend.activate(0)
        yield _OK, "matrix product", f"{_gflops(matmul, 'float32'):.0f} GFLOP/s in float32"
        yield from device_findings(backend)
        yield run_check({**os.environ, **backend.environment(1)})


def run_check(environment: Mapping[str, str]) -> Finding:
    """The finding of `paddle.utils.run_check()`: a small network is trained in dynamic and in static mode, on one
    device, then on all of the kind that Paddle was built for. It runs in a separate process, as it starts others and
    may abort."""
    command = [sys.executable, "-c", "import paddle; paddle.utils.run_check()"]
    try:
        done = run_command(command, environment, _CHECK_SECONDS)
    except CommandTimeout:
        return _BAD, "run_check", f"paddle.utils.run_check() does not end within {_CHECK_SECONDS:.0f} s; run it by hand"
    lines = [line.strip() for line in f"{done.output}\n{done.errors}".splitlines()]
    works = [line for line in lines if "works well" in line]
    if done.code != 0 or not works:
        tail = "; ".join(line for line in lines[-3:] if line)
        return _BAD, "run_check", f"paddle.utils.run_check() fails with exit code {done.code}: {tail}"
    error = next((line for line in lines if "Original Error" in line), None)
    if error is not None:
        return _WARN, "run_check", f"{works[-1]} Not on more: {error}"
    return _OK, "run_check", works[-1]


def _gflops(matmul: Callable[[Any, Any, bool, bool], Any], dtype: str) -> float:
    """The speed of a product of two square matrices in GFLOP/s, the fastest of five."""
    import paddle

    size = 1024
    x = paddle.ones([size, size], dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        float(matmul(x, x, False, False)[0, 0])  # reading a value waits for the result
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def start_ranks(args: Any, registry: Registry, *words: str) -> tuple[int, list[str]]:
    """Start a rank of this command for each device, on all machines. Returns the exit code, and the lines that were
    printed.

    Raises:
        UserError: the ranks cannot be started.
    """
    from llmsuite.launch.launch import launch
    from llmsuite.launch.machines import Machines

    backend = registry.device(args.device).factory()
    output = Kept()
    command = [sys.executable, "-m", "llmsuite", "doctor", f"--device={args.device}", *words]
    command += [f"--num_devices={args.num_devices}", f"--nnodes={args.nnodes}", f"--node_rank={args.node_rank}"]
    if args.master:
        command.append(f"--master={args.master}")
    machines = Machines(args.node_rank, args.nnodes, args.master or "", f"doctor {args.num_devices}")
    with scratch_directory() as logs:
        backend.prepare_ranks()
        code = launch(
            command,
            args.num_devices,
            logs,
            lambda rank: backend.variables(args.num_devices, rank),
            lambda text: output.add(text.encode()),
            machines,
            _STALL_SECONDS,
        )
    return code, output.text().splitlines()


def _network(args: Any, registry: Registry) -> Iterator[Finding]:
    """Start a rank for each device, on all machines, and measure all-reduces between them."""
    try:
        code, lines = start_ranks(args, registry)
    except UserError as error:
        yield _BAD, "network", str(error)
        return
    if code != 0:
        yield _BAD, "network", f"the ranks ended with exit code {code}:\n" + "\n".join(lines[-20:])
        return
    if args.node_rank:
        yield _OK, "network", "checked; machine 0 prints the measurements"
        return
    (result,) = (line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT))
    yield from network_findings(json.loads(result), args.num_devices * args.nnodes)
    for line in lines:
        if line.startswith(_RESHARD):
            yield _reshard_finding(json.loads(line.removeprefix(_RESHARD)))


def network_findings(found: Any, num_ranks: int) -> Iterator[Finding]:
    """The findings from a measured `llmsuite.parallel.network.Network`."""
    if not found["right"]:
        yield (
            _BAD,
            "network",
            "ranks get wrong sums; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the right interface",
        )
    speed = found["bandwidth"] / 1e9
    call = found["call_seconds"] * 1e3
    yield (
        _OK,
        "network",
        f"all-reduce over {num_ranks} ranks: {speed:.2f} GB/s a rank at 16 MiB, {call:.2f} ms at 4 KiB",
    )
    if found["pairs"]:
        usual = statistics.median(found["pairs"].values())
        for pair, bandwidth in found["pairs"].items():
            text = f"{bandwidth / 1e9:.2f} GB/s"
            if bandwidth < _SLOW_PAIR * usual:
                fix = f"others {usual / 1e9:.2f}; look at the cable, switch or interface between their machines"
                yield _WARN, f"ranks {pair}", f"{text}, {fix}"
            else:
                yield _OK, f"ranks {pair}", text


def _rank(args: Any, registry: Registry) -> int:
    """Measure the network, or with --kernels check messages, in one of the ranks."""
    from llmsuite.devices.start import start_paddle

    backend = registry.device(args.device).factory()
    start_paddle(backend, args.num_devices, join=True)
    from llmsuite.parallel import collective
    from llmsuite.parallel.message_checks import check_messages
    from llmsuite.parallel.network import measure
    from llmsuite.parallel.reshard_check import find_wrong_reshard

    backend.activate(collective.local_rank())
    if args.kernels:
        dtypes = [backend.parameter_dtype(precision) for precision in backend.precisions_of(trains=True)]
        results = check_messages(args.num_devices * args.nnodes, list(dict.fromkeys(dtypes)))
        if collective.rank() == 0:
            print(MESSAGES + json.dumps([dataclasses.asdict(result) for result in results]), flush=True)
        return 0
    found = measure(args.num_devices * args.nnodes)
    if collective.rank() == 0:
        print(_RESULT + json.dumps(dataclasses.asdict(found)), flush=True)
    wrong = find_wrong_reshard(args.num_devices * args.nnodes)
    if collective.rank() == 0:
        print(_RESHARD + json.dumps(wrong), flush=True)
    return 0


def _reshard_finding(wrong: str | None) -> Finding:
    """The finding from the placements of distributed tensors."""
    if wrong is None:
        return _OK, "reshard", "distributed tensors get every placement, and their gradients are added"
    return _WARN, "reshard", f"{wrong}; tensor parallelism would fail or be wrong on this device"


def _plugins(registry: Registry) -> Iterator[Finding]:
    for info in registry.plugins:
        if info.error:
            yield _WARN, f"plugin {info.name}", f"{info.error.splitlines()[-1]}; see: llmsuite plugins info {info.name}"
