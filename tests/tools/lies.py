"""Feeds the readers of models and adapters directories in which one thing is a lie: no traceback, no hang, nothing
written.

python -m tests.tools.lies [--count N] [--seed SEED]

A directory of each layout is made once. A lie is another value of a key of one of its JSON files, a key twice, a number
that is none, damage to the bytes, or a tensor of another dtype or shape. What fails is made small by hypothesis.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.convert.adapter import add_adapter
from llmsuite.data.chat_template import tokenizer_template
from llmsuite.data.special_tokens import ids_of_roles
from llmsuite.errors import UserError
from llmsuite.files import read_manifest
from llmsuite.inference.defaults import read_defaults
from tests.tools.damage import damaged, damages, values
from tests.tools.fuzz import limited
from tests.unit import tiny_llama
from tests.unit.checkpoint.test_gptq import publish
from tests.unit.tiny_llama import FAMILIES

_RANK, _MODULE = 4, "base_model.model.model.layers.0.mlp.up_proj"
_DTYPES = ["float32", "float16", "int32", "int64", "int8", "uint8", "bool"]
Read = Callable[[Path], Any]


def read_model(directory: Path) -> None:
    """Read all tensors of a model directory."""
    model = open_model(directory, FAMILIES)
    for name in model.names:
        model.read(name)


def read_adapter(directory: Path) -> None:
    """Merge an adapter into its base, which lies beside it."""
    merged = add_adapter(open_model(directory.parent / "base", FAMILIES), directory)
    for name in merged.names:
        merged.read(name)


BESIDE: tuple[Read, ...] = (read_manifest, tokenizer_template, ids_of_roles, lambda path: read_defaults([path]))
"""What else reads a model directory."""


def make_layouts(place: Path) -> dict[str, tuple[Path, Sequence[Read]]]:
    """A directory of each layout, with what reads it."""
    config = tiny_llama.CONFIG
    tiny_llama.write(place / "base")
    shutil.copytree(place / "base", place / "plain")
    files = {
        "generation_config.json": {"do_sample": True, "temperature": 0.5, "top_k": 5, "eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"0": {"content": "</s>"}}},
        "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "additional_special_tokens": ["<x>"]},
        "tokenizer.json": {"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 0, "content": "</s>"}]},
        "manifest.json": {"files": {"config.json": {"size": 1, "sha256": "0"}}, "tensors": {}},
    }
    for name, content in files.items():
        (place / "plain" / name).write_text(json.dumps(content))
    publish(place / "gptq", group_size=32)
    (place / "lora").mkdir()
    sizes = config.hidden_size, config.intermediate_size
    factors = {
        f"{_MODULE}.lora_A.weight": np.ones((_RANK, sizes[0]), "float32"),
        f"{_MODULE}.lora_B.weight": np.ones((sizes[1], _RANK), "float32"),
    }
    safetensors.numpy.save_file(factors, place / "lora" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8, "target_modules": ["up_proj"], "use_dora": False}
    told |= {"rank_pattern": {"up_proj": _RANK}, "alpha_pattern": {}, "base_model_name_or_path": "base"}
    (place / "lora" / "adapter_config.json").write_text(json.dumps(told))
    stored = {"dtype": "nf4", "block": 4}
    (place / "lora" / "base.json").write_text(json.dumps({"path": "base", "sha256": "0" * 64, "stored_as": stored}))
    return {
        "plain": (place / "plain", (read_model, *BESIDE)),
        "gptq": (place / "gptq", (read_model,)),
        "lora": (place / "lora", (read_adapter,)),
    }


def _keys(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*above, key)
        yield from _keys(value, (*above, key))


def lie_in_json(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a JSON file."""
    tree = json.loads(path.read_text())
    kind = data.draw(st.sampled_from(["value", "value", "value", "root", "new", "twice", "damage"]))
    if kind == "root":
        tree = data.draw(values)
    elif kind == "new":
        tree[data.draw(st.sampled_from(["rope_scaling", "quantization_config", "use_dora", "alpha_pattern", "x"]))] = (
            data.draw(values)
        )
    elif kind == "value":
        *above, last = data.draw(st.sampled_from(list(_keys(tree))))
        node = tree
        for key in above:
            node = node[key]
        node[last] = data.draw(values)
    text = json.dumps(tree)
    if kind == "twice" and tree:
        text = text[:-1] + f", {json.dumps(next(iter(tree)))}: 1}}"
    content = text.encode()
    path.write_bytes(damaged(content, data.draw(damages)) if kind == "damage" else content)


def lie_in_tensors(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a safetensors file."""
    if data.draw(st.booleans()):
        path.write_bytes(damaged(path.read_bytes(), data.draw(damages)))
        return
    tensors = safetensors.numpy.load_file(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 70), max_size=4))
    tensors[name] = np.full(shape, data.draw(st.integers(0, 1)), data.draw(st.sampled_from(_DTYPES)))
    if data.draw(st.booleans()):
        del tensors[name]
    safetensors.numpy.save_file(tensors, path)


def feed(count: int, seed: int) -> None:
    """Tell some lies. Raises what a reader raises that is no UserError, and AssertionError where it has written."""
    with tempfile.TemporaryDirectory() as made:
        layouts = make_layouts(Path(made))
        for good, reads in layouts.values():
            for read in reads:
                read(good)  # so that what is refused later is refused for a lie

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, deadline=None, database=None, derandomize=False, report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(st.sampled_from(sorted(layouts)), st.data())
        def one(name: str, data: st.DataObject) -> None:
            good, reads = layouts[name]
            path = data.draw(st.sampled_from(sorted(good.iterdir())))
            before = path.read_bytes()
            try:
                (lie_in_json if path.suffix == ".json" else lie_in_tensors)(path, data)
                files = {file: file.stat().st_mtime_ns for file in Path(made).rglob("*")}
                for read in reads:
                    with limited(), contextlib.suppress(UserError):
                        read(good)
                assert {file: file.stat().st_mtime_ns for file in Path(made).rglob("*")} == files, "nothing is written"
            finally:
                path.write_bytes(before)

        one()
    print(f"seed {seed}: {count} lies, and nothing failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    feed(given.count, given.seed)
