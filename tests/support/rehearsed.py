"""The run that tests rehearse: pretraining of a model of true width and few layers."""

from __future__ import annotations

import json

RECIPE = "recipes/llama/pretrain.json"
MODEL = {
    "family": "llama",
    "preset": "llama-3.1-8b",
    "tokenizer": "data/tokenizer",
    "config": {"num_hidden_layers": 4},
}
WORDS = [f"--model={json.dumps(MODEL)}", "--train.global_batch_size=8", "--pretrain.split=700,299,1"]
