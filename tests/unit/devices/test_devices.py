"""Decisions of each device backend, as data: on a machine with no device but the CPU."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
from typing import Any

import paddle
import pytest
from paddle.base.core import get_phi_spmd_rule

from llmsuite.base.errors import UserError
from llmsuite.builtin import llmsuite_register_devices
from llmsuite.devices import paddle_kernels
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.cpu.gloo import GLOO_TIMEOUT
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.kernel_table import forms, ops_of, optimizer_ops_of
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps
from llmsuite.devices.start import start_paddle
from llmsuite.devices.xpu import XpuBackend
from llmsuite.plugins.cpu_kernels import kernels
from llmsuite.plugins.cpu_kernels.cpu import SPLIT, CpuKernels
from llmsuite.plugins.cpu_kernels.processor import multiplies_bf16
from tests.support.devices import cpu_backend

BACKENDS: dict[str, DeviceBackend] = {b.name: b for b in (CpuBackend(), GpuBackend(), XpuBackend())}


def test_the_registered_backends_are_these() -> None:
    made = {spec.name: spec.factory() for spec in llmsuite_register_devices()}
    assert {name: type(backend) for name, backend in made.items()} == {n: type(b) for n, b in BACKENDS.items()}


@pytest.mark.parametrize(
    ("name", "collectives", "precisions"),
    [
        ("cpu", "gloo", ("fp32",)),
        ("gpu", "nccl", ("fp32", "bf16", "fp16")),
        ("xpu", "bkcl", ("fp32", "bf16", "fp16")),
    ],
)
def test_collectives_and_precisions(name: str, collectives: str, precisions: tuple[str, ...]) -> None:
    assert (BACKENDS[name].collectives, BACKENDS[name].precisions) == (collectives, precisions)


@pytest.mark.parametrize("name", BACKENDS)
def test_how_gradients_are_added_up(name: str) -> None:
    backend = BACKENDS[name]
    assert (backend.gradient_bucket_bytes, backend.overlaps_communication) == (25 << 20, name != "cpu")


FLASH = {
    "causal_mask": paddle_kernels.no_mask,
    "document_mask": paddle_kernels.document_ends,
    "attention": paddle_kernels.flash_attention,
}
ROTARY_SWIGLU = {"rotary": paddle_kernels.fused_rotary, "swiglu": paddle_kernels.fused_swiglu}
RMS = {"rms_norm": paddle_kernels.fused_rms_norm}
OF_GRADIENTS = {"square_sum": paddle_kernels.one_read_square_sum, "adamw": paddle_kernels.merged_adamw}
PLAIN = forms(Ops(), OptimizerOps())
KERNELS = {
    **{
        name: getattr(kernels, name)
        for name in (
            *("attention", "rms_norm", "rotary", "swiglu", "cross_entropy", "grouped_matmul", "decoder_for"),
            *("dispatch_rows", "combine_rows"),
            *(
                "joined_swiglu",
                "packed_matmul",
                "packed_grouped_matmul",
                "packed_embedding",
                "write_packed",
                "square_sum",
                "scale",
            ),
            *("adamw", "pack_stack"),
        )
    },
    "pack": kernels.pack_parts,
    "causal_mask": kernels.no_mask,
    "document_mask": kernels.spans,
}


BY_ROUNDING = {
    "matmul": kernels.rounded_matmul,
    "rounded_output_matmul": kernels.rounded_io_matmul,
    "round_activation": kernels.round_to_bf16,
    "rounded_grad_cross_entropy": kernels.bf16_grad_cross_entropy,
    "program_matmul": kernels.rounded_linear,
    "grouped_matmul": kernels.rounded_grouped_matmul,
    "joined_swiglu": kernels.rounded_joined_swiglu,
    "decoder_for": kernels.rounded_decoder_for,
}
BY_INSTRUCTIONS = {
    **BY_ROUNDING,
    "matmul": kernels.bf16_matmul,
    "sum_matmul": kernels.bf16_sum_matmul,
    "rounded_output_matmul": kernels.bf16_rounded_output_matmul,
    "program_matmul": kernels.bf16_linear,
    "grouped_matmul": kernels.bf16_grouped_matmul,
    "attention": kernels.bf16_attention,
    "round_attention_input": kernels.round_to_bf16_in_float32,
    "decoder_for": kernels.bf16_decoder_for,
}


IN_PARTS = {
    "matmul": kernels.split_matmul,
    "sum_matmul": kernels.split_sum_matmul,
    "program_matmul": kernels.split_linear,
}


@pytest.mark.parametrize(
    ("name", "precision", "fused"),
    [
        ("cpu without bf16", "fp32", KERNELS),
        ("cpu with bf16", "fp32", {**KERNELS, **IN_PARTS}),
        ("cpu without bf16", "bf16", {**KERNELS, **BY_ROUNDING}),
        ("cpu with bf16", "bf16", {**KERNELS, **BY_INSTRUCTIONS}),
        ("gpu", "fp32", {**ROTARY_SWIGLU, **RMS, **OF_GRADIENTS}),  # flash attention takes 16-bit inputs only
        ("gpu", "bf16", {**ROTARY_SWIGLU, **RMS, **OF_GRADIENTS, **FLASH}),
        ("gpu", "fp16", {**ROTARY_SWIGLU, **RMS, **OF_GRADIENTS, **FLASH}),
        ("xpu", "fp32", ROTARY_SWIGLU),
        ("xpu", "bf16", {**ROTARY_SWIGLU, **FLASH}),
        ("xpu", "fp16", {**ROTARY_SWIGLU, **FLASH}),
    ],
)
def test_which_operations_are_fused(name: str, precision: str, fused: dict[str, Any]) -> None:
    others = {"cpu without bf16": cpu_backend(False, False), "cpu with bf16": cpu_backend(True, True)}
    backend = others.get(name) or BACKENDS[name]
    assert (backend.ops(precision), backend.optimizer_ops(precision)) == (ops_of(fused), optimizer_ops_of(fused))
    found = forms(backend.ops(precision), backend.optimizer_ops(precision))
    assert {name: form for name, form in found.items() if form is not PLAIN[name]} == fused


RULES = {
    "attention": "flash_attention",
    "rotary": "fused_rotary_position_embedding",
    "swiglu": "swiglu",
    "rms_norm": "rms_norm",
}
"""Paddle's operation in a kernel of GPUs and XPUs, by the name that Paddle looks up how to split it."""


@pytest.mark.parametrize("name", ["gpu", "xpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_paddle_splits_what_does_not_run_on_parts(name: str, precision: str) -> None:
    """Without an SPMD rule for an operation, every rank would gather the full input and compute the full output."""
    # gradients are summed on each rank's shards
    for operation in BACKENDS[name].fused(precision) - OF_GRADIENTS.keys():
        try:
            get_phi_spmd_rule(RULES[operation])
            has_rule = True
        except RuntimeError:
            has_rule = False
        assert has_rule == (operation not in BACKENDS[name].operations_of_local_shards), operation


def test_a_cpu_without_a_compiler_has_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert BACKENDS["cpu"].fused("fp32") == frozenset()
    assert BACKENDS["cpu"].ops("fp32") == Ops()


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_parameters_have_the_precision(backend: DeviceBackend) -> None:
    bf16 = "float32" if backend.name == "cpu" else "bfloat16"  # the products alone are in bfloat16
    assert [backend.parameter_dtype(p) for p in ("fp32", "bf16", "fp16")] == ["float32", bf16, "float16"]


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_cpu_has_a_precision_for_training_alone(backend: DeviceBackend) -> None:
    assert backend.precisions_of(trains=False) == backend.precisions
    more = ("bf16",) if backend.name == "cpu" else ()
    assert backend.precisions_of(trains=True) == (*backend.precisions, *more)


WIDE = "avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(
    ("vendor", "flags", "multiplies", "splits"),
    [
        ("AuthenticAMD", f"{WIDE} avx512_bf16", True, False),
        ("GenuineIntel", f"{WIDE} avx512_bf16", False, False),  # slower than float32 there
        ("GenuineIntel", f"{WIDE} avx512_bf16 amx_bf16 amx_tile", True, True),
        ("AuthenticAMD", WIDE, False, False),
        ("AuthenticAMD", "avx512_bf16", False, False),
        ("AuthenticAMD", "avx2", False, False),
        ("GenuineIntel", "avx2 avx512_bf16 amx_bf16 amx_tile", False, False),  # of which a virtual machine shows a part
    ],
)
def test_which_processors_multiply_in_bfloat16(
    vendor: str, flags: str, multiplies: bool, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"vendor_id": vendor, "flags": flags}
    monkeypatch.setattr("llmsuite.plugins.cpu_kernels.processor.processor_facts", lambda: facts)
    monkeypatch.setattr("llmsuite.plugins.cpu_kernels.processor.processor_flags", lambda: set(flags.split()))
    assert multiplies_bf16() is multiplies
    assert CpuKernels().kernels("bf16")["matmul"] == ("bf16_matmul" if multiplies else "rounded_matmul")
    assert (CpuBackend().precision_warning("bf16") is None) is multiplies
    monkeypatch.setenv(SPLIT, "no")
    with pytest.raises(UserError, match="is 'no' in the environment; unset it, or set it to 0"):
        CpuKernels().kernels("fp32")
    monkeypatch.setenv(SPLIT, "0")
    assert "matmul" not in CpuKernels().kernels("fp32")
    monkeypatch.delenv(SPLIT)
    assert CpuKernels().kernels("fp32").get("matmul") == ("split_matmul" if splits else None)
    assert CpuBackend().matmul_backend("fp32").startswith("float32 in three") is splits


@pytest.mark.parametrize(("name", "what"), [("gpu", "CUDA"), ("xpu", "XPU")])
def test_a_paddle_for_the_cpu_alone_is_named_with_the_line_that_installs_another(name: str, what: str) -> None:
    reason = BACKENDS[name].unavailable(1)
    assert reason is not None
    assert f"({paddle.__version__}) is built without {what}" in reason
    assert f"install one with: {BACKENDS[name].install}" in reason
    assert f"pip install paddlepaddle-{name}==3.3.1 -i https://" in reason


@pytest.mark.parametrize(("name", "module"), [("gpu", "cuda"), ("xpu", "xpu")])
def test_fewer_devices_than_asked_for(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, f"is_compiled_with_{module}", lambda: True)
    monkeypatch.setattr(getattr(paddle.device, module), "device_count", lambda: 2)
    assert BACKENDS[name].unavailable(2) is None
    reason = BACKENDS[name].unavailable(3)
    assert reason is not None
    assert reason.startswith("3 ")
    assert "2 are visible; lower launch.num_devices" in reason


def test_the_cpu_is_always_there() -> None:
    assert BACKENDS["cpu"].unavailable(64) is None
    BACKENDS["cpu"].activate(3)
    assert paddle.get_device() == "cpu"


@pytest.mark.parametrize("name", ["gpu", "xpu"])
def test_each_rank_takes_the_device_of_its_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(paddle, "set_device", taken.append)
    monkeypatch.delenv(f"FLAGS_selected_{name}s", raising=False)
    BACKENDS[name].activate(3)
    # as of paddle.distributed.launch --gpus 4,5,6,7, which Paddle itself turns to when the ranks meet
    monkeypatch.setenv(f"FLAGS_selected_{name}s", "7")
    BACKENDS[name].activate(3)
    assert taken == [f"{name}:3", f"{name}:7"]


TAKES_MEMORY_AGAIN = """
import ctypes, resource
from llmsuite.devices.cpu import keep_freed_memory
keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    taken = [c.malloc(100 << 20) for _ in range(3)]
    for each in taken:
        c.memset(each, 1, 100 << 20)
    for each in taken:
        c.free(each)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="says how glibc's malloc behaves")
@pytest.mark.parametrize("user", [{}, {"MALLOC_TRIM_THRESHOLD_": "1000"}], ids=["alone", "tuned"])
def test_freed_memory_is_kept_unless_the_user_tunes_malloc(user: dict[str, str]) -> None:
    command = [sys.executable, "-c", TAKES_MEMORY_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **user})
    assert (int(done.stdout) < 1000) == (not user), "of 76,800 pages"


def test_peak_memory_is_that_of_this_process() -> None:
    assert 10 << 20 < BACKENDS["cpu"].peak_memory_bytes() < 1 << 40


CPUINFO = """processor : 0
vendor_id : {}
model name : AuthenticAMD is not named here
flags : fpu {}

processor : 1
vendor_id : Other
"""
AVX2 = "avx2 fma"
AVX512 = "avx2 fma avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16"


@pytest.mark.parametrize(
    ("vendor", "flags", "path"),
    [
        ("AuthenticAMD", AVX2, {"MKL_DEBUG_CPU_TYPE": "5"}),
        ("AuthenticAMD", AVX512, {"MKL_DEBUG_CPU_TYPE": "7"}),
        ("AuthenticAMD", "avx2 fma avx512f avx512cd", {"MKL_DEBUG_CPU_TYPE": "5"}),
        ("AuthenticAMD", "avx fma fma4", {}),  # of 2012; instructions of AVX2 would end the process
        ("GenuineIntel", AVX512, {}),
    ],
)
def test_the_cpu_environment(vendor: str, flags: str, path: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = CPUINFO.format(vendor, flags)
    monkeypatch.setattr("llmsuite.base.processor.open", lambda path: io.StringIO(text), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    expected = {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "KMP_BLOCKTIME": "0",
        "PADDLE_DISTRI_BACKEND": "gloo",
        **path,
    }
    assert CpuBackend().environment(2) == expected
    alone = CpuBackend().environment(1)
    assert (alone["OMP_NUM_THREADS"], alone["KMP_BLOCKTIME"]) == ("6", "1")
    assert CpuBackend().environment(1, inference_only=True) == {**alone, "KMP_BLOCKTIME": "0"}
    assert CpuBackend().environment(2, inference_only=True) == expected
    assert CpuBackend().environment(9)["OMP_NUM_THREADS"] == "1", "never none"


def test_the_path_of_mkl_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr("llmsuite.base.processor.open", absent, raising=False)
    for processor, path in (("AMD64 Family 25", "5"), ("arm", None)):
        monkeypatch.setattr("platform.processor", lambda processor=processor: processor)
        assert CpuBackend().environment(1).get("MKL_DEBUG_CPU_TYPE") == path


def test_the_environment_of_the_others() -> None:
    assert BACKENDS["gpu"].environment(8) == {"NVIDIA_TF32_OVERRIDE": "0"}
    assert BACKENDS["xpu"].environment(8) == {}
    assert BACKENDS["cpu"].rank_environment(3) == {}
    assert BACKENDS["gpu"].rank_environment(3) == {"FLAGS_selected_gpus": "3"}
    assert BACKENDS["xpu"].rank_environment(3) == {"FLAGS_selected_xpus": "3"}


def test_which_devices_repeat_themselves_to_the_last_bit() -> None:
    flags = {"FLAGS_cudnn_deterministic": "1", "FLAGS_embedding_deterministic": "1"}
    assert {name: b.deterministic_flags for name, b in BACKENDS.items()} == {"cpu": {}, "gpu": flags, "xpu": None}


def test_the_number_of_a_rank_wins_over_what_the_shell_has_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else FLAGS_selected_gpus=0 in a shell's profile puts all ranks on one device."""
    monkeypatch.setenv("FLAGS_selected_gpus", "0")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert BACKENDS["gpu"].variables(8, 3) == {"FLAGS_selected_gpus": "3", "NVIDIA_TF32_OVERRIDE": "1"}


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    start_paddle(CpuBackend(), 1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["KMP_BLOCKTIME"]) == ("17", "1")
    start_paddle(CpuBackend(), 1, inference_only=True)
    assert os.environ["KMP_BLOCKTIME"] == "1", "set already"
    monkeypatch.delenv("KMP_BLOCKTIME")
    start_paddle(CpuBackend(), 1, inference_only=True)
    assert os.environ["KMP_BLOCKTIME"] == "0"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    start_paddle(GpuBackend(), 1)
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"


@pytest.mark.parametrize(
    ("name", "user", "expected"),
    [
        ("gpu", {}, {"CUDA_VISIBLE_DEVICES": "6,4"}),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "4,5,6"}, {"CUDA_VISIBLE_DEVICES": "6,4"}),
        ("xpu", {}, {"XPULINK_VISIBLE_DEVICES": "6,4"}),
        ("xpu", {"XPU_VISIBLE_DEVICES": "4,6"}, {"XPU_VISIBLE_DEVICES": "6,4"}),
    ],
)
def test_ranks_get_the_devices_that_are_named(
    name: str, user: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in BACKENDS[name].visible_devices:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in user.items():
        monkeypatch.setenv(variable, value)
    assert BACKENDS[name].select([6, 4]) == expected


def test_a_hidden_device_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"launch\.devices: 4 is not among CUDA_VISIBLE_DEVICES=0,1; unset"):
        BACKENDS["gpu"].select([0, 4])


def test_paddle_starts_silently_in_a_fresh_process() -> None:
    script = (
        "import os, sys\n"
        "from llmsuite.devices.cpu import CpuBackend\n"
        "from llmsuite.devices.start import start_paddle\n"
        "assert 'paddle' not in sys.modules\n"
        "start_paddle(CpuBackend(), 1)\n"
        "assert 'paddle' in sys.modules\n"
        "caught = next(line for line in open('/proc/self/status') if line.startswith('SigCgt'))\n"
        "assert not int(caught.split()[1], 16) >> 14 & 1, 'Paddle takes SIGTERM'\n"
        "print(os.environ['OMP_NUM_THREADS'])\n"
    )
    # 3 threads are what Paddle would warn about
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize(("stall", "least"), [(None, 10**7), (600.0, 1801), (5.0, 1800), (3600.0, 10801)])
def test_ranks_wait_longer_than_the_launcher_watches(
    monkeypatch: pytest.MonkeyPatch, stall: float | None, least: int
) -> None:
    """Or the rank that waits would fail first, and be blamed for the one it waits for. At the start of a run the
    launcher watches for three times as long."""
    monkeypatch.delenv(GLOO_TIMEOUT, raising=False)
    assert int(CpuBackend().timeout_variables(stall)[GLOO_TIMEOUT]) >= least
    monkeypatch.setenv(GLOO_TIMEOUT, "7")
    assert CpuBackend().timeout_variables(stall) == {GLOO_TIMEOUT: "7"}
