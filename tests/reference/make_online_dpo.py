"""Writes tests/reference/rl/online_dpo.json: loss and gradient norm of TRL's OnlineDPOTrainer on fixed completions.

Its own `training_step` runs, on a model of tests/reference/llama, with what it would draw and reward given to it; the
reference has nine tenths of every weight. Needs torch, transformers and trl, and neither Paddle nor llmsuite; made with
torch 2.13, transformers 5.23 and trl 1.16. A second run writes the same values:

    python tests/reference/make_online_dpo.py
"""

from __future__ import annotations

import collections
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

HERE = Path(__file__).resolve().parent
MODEL = "grouped_query"
EOS = 2
PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 11]]
COMPLETIONS = [[[5, 9, EOS], [7, 12, 8, 4, 6]], [[10, 3, 3, 8, 9, EOS], [EOS]], [[4, EOS], [13, 6, 7, 9, EOS]]]
"""Two of each prompt."""
REWARDS = [[1.0, 0.0], [0.25, 0.5], [0.0, 2.0]]
BETA = 0.3


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows]
    mask = [[0] * (width - len(r)) + [1] * len(r) if left else [1] * len(r) + [0] * (width - len(r)) for r in rows]
    return torch.tensor(ids), torch.tensor(mask)


def step(loss: str) -> dict[str, float]:
    """Loss and norm of the gradient."""
    model = LlamaForCausalLM.from_pretrained(HERE / "llama" / MODEL, dtype=torch.float32)
    reference = LlamaForCausalLM.from_pretrained(HERE / "llama" / MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    completions = [of[i] for i in (0, 1) for of in COMPLETIONS]
    drawn = (*padded(2 * PROMPTS, left=True), *padded(completions, left=False), None)
    rewards = torch.tensor([of[i] for i in (0, 1) for of in REWARDS])
    found: dict[str, float] = {}

    def backward(total: torch.Tensor, **_: Any) -> None:
        total.backward()
        found["loss"] = total.item()
        found["grad_norm"] = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()

    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        reward_funcs=[None],
        beta=BETA,
        max_length=64,
        eos_token_ids=[EOS],
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        args=SimpleNamespace(
            use_vllm=False, missing_eos_penalty=None, loss_type=loss, torch_empty_cache_steps=None, n_gpu=1, optim="",
            gradient_accumulation_steps=1,
        ),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, backward=backward),
        state=SimpleNamespace(global_step=1),
        stats=collections.defaultdict(list),
        _generate=lambda *_: drawn,
        _calculate_rewards_from_functions=lambda **_: rewards.clone(),
    )  # fmt: skip
    trainer._forward = functools.partial(OnlineDPOTrainer._forward, trainer)
    OnlineDPOTrainer.training_step(trainer, model, {"prompt": [""] * len(PROMPTS)})
    margins = trainer.stats["rewards/margins"]
    return {**found, "margin": margins[0]}


def main() -> None:
    data = {
        "model": MODEL,
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "rewards": REWARDS,
        "beta": BETA,
        "reference_factor": 0.9,
        "trl": {loss: step(loss) for loss in ("sigmoid", "ipo")},
    }
    (HERE / "rl" / "online_dpo.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
