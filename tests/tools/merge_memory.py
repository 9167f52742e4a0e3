"""A model of some size is merged under a limit of memory, and compared with what a plain merge of it would be.

As a program, of a size of your choice: `python -m tests.tools.merge_memory MEGABYTES`.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from llmsuite.base.files import broken_file
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensor_writer import WriteOptions
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from llmsuite.models.families.llama import LlamaConfig
from tests.support import tiny_llama
from tests.support.paths import ROOT
from tests.support.tiny_llama import FAMILIES, FAMILY, to_paddlenlp

CONSTANT = 16 << 20
"""What a merge takes besides tensors."""


def make(directory: Path, megabytes: int) -> tuple[int, int, str]:
    """Write a Llama of float32 in the HF layout.

    Returns:
        Bytes of all tensors and of the largest; digest of what it has to be in bfloat16 in PaddleNLP's layout.
    """
    hidden = 1024
    middle = 2816
    vocabulary = 4000
    layer = 4 * (4 * hidden * hidden + 3 * hidden * middle)
    ends = 8 * vocabulary * hidden
    layers = max(1, round((megabytes * 1e6 - ends) / layer))
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip
    matrices = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (hidden, hidden))
    matrices |= {"gate_proj": (hidden, middle), "up_proj": (hidden, middle), "down_proj": (middle, hidden)}
    matrices |= {"embed_tokens": (vocabulary, hidden), "lm_head": (hidden, vocabulary)}
    names = FAMILY.names().parameter_names(config)
    specs = [TensorSpec(name, matrices.get(name.split(".")[-2], (hidden,)), "float32") for name in names]
    by_name = {spec.name: spec for spec in specs}
    digests = {}

    def value(name: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        values = np.random.default_rng(seed).standard_normal(by_name[name].shape, dtype="float32")
        digests[to_paddlenlp(name)] = _digest(values.astype(ml_dtypes.bfloat16))
        return values

    directory.mkdir(parents=True)
    write_model(
        directory, FAMILY, config, value, specs, "hf", options=WriteOptions(max_file_bytes=megabytes * 1_000_000 // 4)
    )
    sizes = [spec.num_bytes for spec in specs]
    return sum(sizes), max(sizes), _together(digests)


def merged_digest(directory: Path) -> str:
    """Bytes of the weights in a directory in PaddleNLP's layout."""
    assert broken_file(directory) is None
    files = open_model(directory, FAMILIES).files
    return _together({name: _digest(files.read(name)) for name in files.names})


def merge(source: Path, target: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Run `llmsuite merge` in a process that, once everything is imported, gets no more than `limit` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "tests.tools.merge_memory", str(source), str(target), str(limit)],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "LLMSUITE_PLUGINS": ""},  # each thread has a buffer
        capture_output=True,
        text=True,
        check=False,
    )


def _merge_here(source: Path, target: Path, limit: int) -> int:
    """Merge in this process, with its address space limited to what it has now and `limit` bytes."""
    words = ["--layout", "paddlenlp", "--dtype", "bf16"]
    tiny = target.with_name("tiny")  # the first merge imports Paddle and all else
    tiny_llama.write(tiny)
    assert main(["merge", str(tiny), "-o", f"{tiny}-merged", *words]) == 0
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (now + limit, now + limit))
    try:
        np.ones(limit + (64 << 20), "uint8")  # some more: what was freed may be used again
    except MemoryError:  # as it should be
        return main(["merge", str(source), "-o", str(target), *words])
    raise AssertionError("more than the limit can be had")


def check(directory: Path, megabytes: int) -> str:
    """Make, merge and compare; returns what was shown. Fails by an AssertionError."""
    total, largest, expected = make(directory / "a", megabytes)
    limit = 3 * largest + CONSTANT
    assert total > 3 * limit, "a merge that holds all of it would pass too"
    done = merge(directory / "a", directory / "b", limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert merged_digest(directory / "b") == expected
    return f"{total / 1e6:,.0f} MB are merged in {limit / 1e6:,.0f} MB; the largest tensor has {largest / 1e6:,.0f} MB"


def _digest(values: np.ndarray) -> str:
    found = np.ascontiguousarray(values)
    return f"{found.dtype.name} {found.shape} {hashlib.sha256(found.reshape(-1).view('uint8').data).hexdigest()}"


def _together(digests: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(_merge_here(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
    with tempfile.TemporaryDirectory() as place:
        print(check(Path(place), int(sys.argv[1])))
