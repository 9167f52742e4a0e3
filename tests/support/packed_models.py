"""Models with packed matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.plain_decoder import unsupported_reason
from tests.support.families import CASES, FAMILIES

COVERED = [case for case in CASES if case.startswith(("llama/", "qwen/", "ernie/")) and "bias" not in case]


def stored(path: Path, precision: str, base: Path | None = None, cache_dtype: str | None = None) -> Any:
    """A model as `generate --precision` has it, except for its cache, which is float32 by default."""
    model = load_model(open_any(path, FAMILIES, base, runs=True), CpuBackend(), packed=precision)
    is_covered = unsupported_reason(model) is None
    fuse(model, CpuBackend().ops("fp32"), cache_dtype)
    assert (model.decoding.next_logits is not None) == is_covered
    return model
