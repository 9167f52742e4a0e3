"""Directories that tests read from, wherever the test that reads them is."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
DATA = ROOT / "data"
"""Data that come with the package."""
REFERENCE = ROOT / "tests" / "reference"
"""Models and logits of HF transformers."""
REAL = Path(os.environ.get("LLMSUITE_TEST_DATA", ROOT.parent / "shared" / "data"))
"""Public data sets, where somebody has fetched them."""
