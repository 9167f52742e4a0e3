"""A peer: paddlenlp's Trainer and DPOTrainer, on the same Paddle. Runs in a virtual environment of its own, see
`venvs.py`.

    python paddlenlp_steps.py TASK.json

Its data pipelines have fixed lengths and templates of their own; what is compared is the trainer, so it gets the token
ids, padded to the longest row of a batch and without a mask where it needs none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.transformers import LlamaForCausalLM
from paddlenlp.trl import DPOTrainer
from turns import TakeTurns

IGNORED = -100


class Callback(TakeTurns, TrainerCallback):
    pass


class InOrder:
    """The rows one after the other."""

    def _get_train_sampler(self) -> paddle.io.BatchSampler:
        size = self.args.per_device_train_batch_size  # type: ignore[attr-defined]
        return paddle.io.BatchSampler(self.train_dataset, shuffle=False, batch_size=size)  # type: ignore[attr-defined]


class PlainTrainer(InOrder, Trainer):
    pass


class PairTrainer(InOrder, DPOTrainer):
    def _wrap_ref_model(self, model: Any) -> Any:  # its own asks for a distributed launch and mixed precision
        return model


class Rows(paddle.io.Dataset):
    def __init__(self, rows: Any):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> Any:
        return self._rows[at]


def stretches(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    ids = np.stack(rows).astype("int64")
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def conversations(rows: list[dict[str, list[int]]]) -> dict[str, np.ndarray]:
    """Each token of the answer is a target of the one before it; padding is on the right, where none attends to it."""
    length = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows) - 1
    ids = np.zeros([len(rows), length], "int64")
    labels = np.full([len(rows), length], IGNORED, "int64")
    for i, row in enumerate(rows):
        prompt = row["prompt_ids"]
        answer = row["completion_ids"]
        whole = prompt + answer
        ids[i, : len(whole) - 1] = whole[:-1]
        labels[i, len(prompt) - 1 : len(whole) - 1] = answer
    return {"input_ids": ids, "labels": labels}


def pairs(rows: list[dict[str, list[int]]]) -> dict[str, np.ndarray]:
    """The layout of paddlenlp's `preprocess_preference_data`: both answers in one row behind their prompt, where the
    second does not see the first."""
    length = max(len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows) - 1
    batch = {
        name: np.zeros([len(rows), length], "int64")
        for name in ("input_ids", "position_ids", "chosen_labels", "rejected_labels")
    }
    batch["attention_mask"] = np.tile(np.tri(length, dtype=bool), [len(rows), 1, 1])
    borders = []
    for i, row in enumerate(rows):
        prompt = row["prompt_ids"]
        chosen = row["chosen_ids"]
        rejected = row["rejected_ids"]
        begin = len(prompt) - 1  # the prompt's last token is the first of each answer's part: it predicts its first
        middle = begin + len(chosen)
        end = begin + len(chosen) + len(rejected)
        batch["input_ids"][i, :end] = prompt[:-1] + prompt[-1:] + chosen[:-1] + prompt[-1:] + rejected[:-1]
        batch["position_ids"][i, :end] = [*range(middle), *range(begin, begin + len(rejected))]
        batch["chosen_labels"][i, begin:middle] = chosen
        batch["rejected_labels"][i, middle:end] = rejected
        batch["attention_mask"][i, middle:end, begin:middle] = False
        borders.append([i, begin, middle, end])
    return {**batch, "response_indexs": np.array(borders)}


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    paddle.set_device("cpu")
    arguments = TrainingArguments(
        output_dir=task["scratch"], max_steps=task["steps"], per_device_train_batch_size=task["batch"],
        learning_rate=task["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, device="cpu", seed=0, remove_unused_columns=False,
    )  # fmt: skip
    kind = task["kind"]

    def load() -> Any:
        return LlamaForCausalLM.from_pretrained(task["model"], convert_from_torch=True, dtype="float32")

    model = load()
    common = {"args": arguments, "callbacks": [Callback()]}
    if kind == "pretrain":
        rows: Any = np.load(task["rows"])
        PlainTrainer(model, data_collator=stretches, train_dataset=Rows(rows), **common).train()
        return
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    if kind == "dpo":
        from types import SimpleNamespace

        config = SimpleNamespace(
            beta=task["beta"], loss_type="sigmoid", label_smoothing=0.0, reference_free=False, lora=False,
            ref_model_update_steps=-1, sft_loss_ratio=0.0, pref_loss_ratio=1.0, dpop_lambda=50, simpo_gamma=0.5,
            normalize_logps=False,
        )  # fmt: skip
        PairTrainer(model, pairs, ref_model=load(), dpo_config=config, train_dataset=Rows(rows), **common).train()
        return
    if kind == "lora":
        names = [
            ".*q_proj.*",
            ".*k_proj.*",
            ".*v_proj.*",
            ".*o_proj.*",
            ".*gate_proj.*",
            ".*up_proj.*",
            ".*down_proj.*",
        ]
        lora = LoRAConfig(target_modules=names, r=task["rank"], lora_alpha=task["alpha"], dtype="float32")
        model = LoRAModel(model, lora)
        model.mark_only_lora_as_trainable()
    PlainTrainer(model, data_collator=conversations, train_dataset=Rows(rows), **common).train()


if __name__ == "__main__":
    main()
