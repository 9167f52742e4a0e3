"""What is compared: for each task a recipe of llmsuite's, and the same rows, in the same order, for its peers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SEED = 42
LENGTH = 512
LORA = {"rank": 16, "alpha": 32}
BETA = 0.1
RANDOM_MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
    "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
REWARD = Path(__file__).with_name("reward.py")
ENVIRONMENTS = {
    "transformers": "torch", "trl": "torch", "trl-as-is": "torch", "trl-precomputed": "torch",
    "paddlenlp": "paddlenlp", "paddlenlp-as-is": "paddlenlp",
}  # fmt: skip
"""Peers, and the virtual environment each runs in (`venvs.py`)."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of step."""

    name: str
    title: str
    stage: str
    batch: int
    """Rows, pairs or prompts of a step."""
    learning_rate: float
    peers: tuple[str, ...]
    rows: str = ""
    """File of LLaMA-Factory's `data/`, or an absolute path."""
    has_adapter: bool = False
    base_dtype: str | None = None
    """`lora.base_dtype`: how the frozen matrices are kept, by peers with bitsandbytes."""
    group: int = 0
    """Completions of a prompt, where a step draws some."""
    drawn: int = 0
    """Their tokens, at most."""
    length: int = LENGTH
    recompute: str = "none"
    """`engine.recompute` of ours; of the peers, `trl-as-is` does what `full` does whatever is said here."""

    @property
    def draws(self) -> bool:
        """Whether a step learns from what the model writes: no two engines write the same."""
        return self.stage == "grpo"


ALPACA, PAIRS = INSTRUCTIONS_AND_PAIRS = ("alpaca_en_demo.json", "dpo_en_demo.json")
TRL = ("trl", "trl-as-is")
DIGITS = str(ROOT / "data" / "digits" / "sft" / "train.jsonl")
GRPO_LORA = Task("grpo-lora", "GRPO, LoRA", "grpo", 4, 1e-5, TRL, ALPACA, True, group=4, drawn=64)
PLAIN = {
    task.name: task
    for task in (
        Task("pretrain", "pretraining", "pretrain", 4, 1e-4, ("transformers", "paddlenlp", "paddlenlp-as-is")),
        Task("sft", "SFT", "sft", 4, 1e-5, (*TRL, "paddlenlp"), ALPACA),
        Task("lora", "LoRA", "lora", 4, 1e-4, (*TRL, "paddlenlp"), ALPACA, has_adapter=True),
        Task("qlora", "LoRA on nf4", "lora", 4, 1e-4, TRL, ALPACA, has_adapter=True, base_dtype="nf4"),
        Task("dpo", "DPO", "dpo", 2, 1e-5, (*TRL, "trl-precomputed", "paddlenlp"), PAIRS),
        Task("grpo", "GRPO", "grpo", 4, 1e-6, TRL, ALPACA, group=4, drawn=64),
        GRPO_LORA,
        Task("grpo-digits", "GRPO, digits", "grpo", 64, 2e-4, TRL, DIGITS, group=8, drawn=12, length=128),
    )
}
TASKS = PLAIN | {
    f"{name}-recompute": dataclasses.replace(
        PLAIN[name],
        name=f"{name}-recompute",
        title=f"{PLAIN[name].title}, recompute",
        peers=("trl-as-is",),
        recompute="full",
    )
    for name in ("sft", "lora", "dpo", "grpo-lora")
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A task on disk."""

    recipe: Path
    asked: Path
    """The same for the peers."""


def prepare(task: Task, place: Path, model: Path, data: Path, steps: int, threads: int, precision: str) -> Prepared:
    """Write the files of a task into a directory.

    Args:
        place: the directory.
        model: SmolLM2-135M in the HF layout, with its tokenizer.
        data: directory with the files of `ROWS`.
        steps: that may be asked for.
        threads: of each engine.
        precision: `engine.precision`.
    """
    from llmsuite.contract.registry import load_plugins
    from llmsuite.data.tokenizer import TextTokenizer

    place.mkdir()
    train = data / task.rows
    if task.stage == "pretrain":
        model = place / "model"
        _write_random_model(model)
        train = _write_random_corpus(place, steps * task.batch)
    elif not train.is_file():
        raise SystemExit(
            f"{train}: is not there; --data is a directory with {' and '.join(INSTRUCTIONS_AND_PAIRS)}, as in "
            "data/ of github.com/hiyouga/LLaMA-Factory"
        )
    content = {
        "stage": task.stage,
        "model": {"family": "llama", "weights": str(model)},
        "data": {"train": str(train), "max_length": task.length},
        "train": {
            "max_steps": steps, "global_batch_size": task.batch, "micro_batch_size": task.batch,
            "learning_rate": task.learning_rate, "lr_schedule": "constant",
        },
        **({"lora": LORA | ({"base_dtype": task.base_dtype} if task.base_dtype else {})} if task.has_adapter else {}),
        **({"dpo": {"loss": "sigmoid", "beta": BETA}} if task.stage == "dpo" else {}),
        **(_grpo_sections(task) if task.draws else {}),
        "engine": {"precision": precision, "recompute": task.recompute},
        "device": "cpu",
        "seed": SEED,
        "output_dir": str(place / "run"),
    }  # fmt: skip
    recipe = place / "recipe.json"
    recipe.write_text(json.dumps(content, indent=2))
    tokenizer = TextTokenizer(model)
    rows = _write_rows(task, recipe, load_plugins(), place, steps * task.batch, tokenizer)
    asked = {
        "kind": task.stage, "model": str(model), "eos": tokenizer.special_tokens["eos_token"],
        "rows": str(rows), "batch": task.batch, "steps": steps,
        "learning_rate": task.learning_rate, "max_length": task.length, "beta": BETA, "threads": threads,
        "precision": precision, **LORA, "has_adapter": task.has_adapter, "base_dtype": task.base_dtype,
        "num_generations": task.group, "max_completion_length": task.drawn,
        "scratch": str(place / "peers"),
    }  # fmt: skip
    (place / "asked.json").write_text(json.dumps(asked))
    return Prepared(recipe, place / "asked.json")


def _grpo_sections(task: Task) -> dict[str, Any]:
    return {
        "rollout": {
            "num_generations": task.group, "max_completion_length": task.drawn, "batch_size": task.batch * task.group,
        },
        "reward": {"functions": {f"{REWARD}:of_completions": 1.0}},
        "grpo": {"loss": "dapo"},
    }  # fmt: skip


def _write_rows(task: Task, recipe: Path, registry: Any, place: Path, count: int, tokenizer: Any) -> Path:
    """What llmsuite will read from the recipe, in the order in which it takes it, for the peers."""
    from llmsuite.data.loader import SampleOrder
    from llmsuite.recipe.resolve import plan_run
    from llmsuite.stages.explain import open_stage

    plan = plan_run(recipe, [], registry)
    stage = open_stage(plan.model, plan.data, plan.parallel, plan.train, registry)
    samples = stage.reader.read(plan.data.train_file)
    order = SampleOrder(len(samples), SEED)
    taken = [samples[order.at(position)] for position in range(count)]
    if task.stage != "pretrain":
        return _save_texts(place / "rows.jsonl", [_parts(sample) for sample in taken], tokenizer)
    np.save(place / "rows.npy", np.stack(taken).astype("int64"))
    return place / "rows.npy"


def _parts(sample: Any) -> dict[str, list[int]]:
    """Token ids of the prompt and of the answer, or answers, if the row has any to learn from."""
    if hasattr(sample, "columns"):
        return {"prompt": list(sample.ids)}
    if hasattr(sample, "chosen"):
        return {"prompt": list(sample.prompt), "chosen": list(sample.chosen), "rejected": list(sample.rejected)}
    begin = int(np.flatnonzero(sample.weights)[0])
    assert sample.weights[begin:].all(), "several answers in a row: a peer would be taught something else"
    return {"prompt": sample.ids[:begin].tolist(), "completion": sample.ids[begin:].tolist()}


def _save_texts(path: Path, rows: Sequence[dict[str, list[int]]], tokenizer: Any) -> Path:
    """Each part as text and as ids. Raises SystemExit when a peer would make other ids of the text."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            text = {name: plain.decode(ids, skip_special_tokens=False) for name, ids in row.items()}
            for name in row:
                before, ids = ("", []) if name == "prompt" else (text["prompt"], row["prompt"])
                if plain.encode(before + text[name], add_special_tokens=False).ids != [*ids, *row[name]]:
                    raise SystemExit(f"a {name} is told in other tokens by its text alone: {text[name]!r}")
            file.write(json.dumps({**text, **{f"{name}_ids": ids for name, ids in row.items()}}) + "\n")
    return path


def _write_random_model(place: Path) -> None:
    """Weights drawn as those of a model that begins, and a tokenizer whose words are numbers."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    place.mkdir()
    (place / "config.json").write_text(json.dumps(RANDOM_MODEL))
    draw = np.random.default_rng(SEED)
    width, inner, words = (int(RANDOM_MODEL[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))  # type: ignore[call-overload]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width), "lm_head.weight": (words, width)}
    for layer in range(int(RANDOM_MODEL["num_hidden_layers"])):  # type: ignore[call-overload]
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (width,)
    weights = {
        name: (draw.standard_normal(shape) * 0.02 if len(shape) > 1 else np.ones(shape)).astype("float32")
        for name, shape in shapes.items()
    }
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    vocabulary = {f"<{number}>": number for number in range(words)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(place / "tokenizer.json"))
    special = {"bos_token": "<1>", "eos_token": "<2>", "pad_token": "<2>", "unk_token": "<0>"}
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))


def _write_random_corpus(place: Path, count: int) -> Path:
    """So many samples of tokens drawn evenly."""
    from llmsuite.data.indexed_corpus import CorpusWriter

    tokens = np.random.default_rng(SEED).integers(3, int(RANDOM_MODEL["vocab_size"]), count * LENGTH + 1)  # type: ignore[call-overload]
    with CorpusWriter(place / "corpus", "uint16") as writer:
        writer.add(tokens.astype("uint16").tobytes(), np.array([len(tokens)], "int32").tobytes())
        writer.commit()
    return place / "corpus.bin"
