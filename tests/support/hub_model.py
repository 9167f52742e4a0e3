"""The files of a model on a hub."""

from __future__ import annotations

import os

WEIGHTS = os.urandom(400_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"t": 1}',
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"p" * 5000,
    "README.md": b"read me",
    "onnx/model.onnx": b"o" * 5000,
    "original/consolidated.00.pth": b"c" * 5000,
}
NEEDED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
