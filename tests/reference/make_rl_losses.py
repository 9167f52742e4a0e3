"""Writes tests/reference/rl/trl.json: advantages, KL, losses and gradients as TRL's GRPOTrainer computes them.

Needs torch, transformers and trl, and neither Paddle nor llmsuite; made with torch 2.13 and trl 1.16.0. Run it from
anywhere; a second run writes the same values:

    python tests/reference/make_rl_losses.py

The trainer's own methods run, on a stand-in for the trainer: the completions, their rewards and their log-probabilities
are given. The loss is differentiated by the log-probabilities, in float64.
"""

from __future__ import annotations

import collections
import itertools
import json
import types
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

TARGET = Path(__file__).resolve().parent / "rl" / "trl.json"
GROUP = 4
MAX_LENGTH = 9
EOS = 1
LENGTHS = [5, 9, 1, 4, 7, 3, 3, 6, 2, 8, 4, 5]
REWARDS = [
    [1.0, 0.0, 0.5, 0.0],
    [1.0, 1.0, 1.0, 1.0],  # without signal
    [0.25, None, -1.0, 2.0],  # one is missing
]
TRUNCATED = 1  # has as many tokens as are allowed, and no end


def numbers(seed: int, scale: float) -> torch.Tensor:
    """[completions, longest], float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([len(LENGTHS), max(LENGTHS)], generator=generator, dtype=torch.float64) * scale


class Accelerator:
    device = torch.device("cpu")
    process_index = 0
    num_processes = 1
    is_main_process = True

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str) -> Any:
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model


class Trainer(GRPOTrainer):
    """A GRPOTrainer that draws nothing and has no model."""

    def __init__(self, **settings: Any):
        args = GRPOConfig(
            output_dir="unused", use_cpu=True, bf16=False, report_to=[], num_generations=GROUP,
            per_device_train_batch_size=len(LENGTHS), max_completion_length=MAX_LENGTH, **settings,
        )  # fmt: skip
        self.args = args
        for name in (
            "loss_type", "beta", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation",
            "num_generations", "mask_truncated_completions", "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
            "top_entropy_quantile", "off_policy_mask_threshold", "use_vllm", "max_completion_length",
        ):  # fmt: skip
            setattr(self, name, getattr(args, name))
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon_high or args.epsilon
        self.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.num_iterations = 1
        self.ref_model = object()
        self.accelerator = Accelerator()
        self.state = types.SimpleNamespace(global_step=0)
        self._tokenizer = types.SimpleNamespace(pad_token_id=0)
        self.eos_token_ids = [EOS]
        self.pad_to_multiple_of = None
        self.log_multimodal = False
        self.environment_factories = self.environments = self.tools = None
        self.reward_weights = torch.ones(1)
        self.reward_func_names = ["given"]
        self._metrics = {"train": collections.defaultdict(list)}
        self._logs = collections.defaultdict(list, rewards=collections.defaultdict(list))
        self._pending_extra_logs = {}
        self._pending_metrics = {}
        self.current_gradient_accumulation_steps = 1
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        self.queue: list[torch.Tensor] = []

    def _generate(self, prompts: Any) -> Any:
        ids = [[7] * (n - 1) + [7 if i == TRUNCATED else EOS] for i, n in enumerate(LENGTHS)]
        sampled = [row[:n] for row, n in zip(ROLLOUT.tolist(), LENGTHS)] if self.use_vllm else None
        return [[5, 6]] * len(ids), ids, None, [""] * len(ids), sampled, {}, None, None

    def _calculate_rewards(self, *given: Any) -> torch.Tensor:
        flat = [float("nan") if r is None else r for row in REWARDS for r in row]
        return torch.tensor(flat, dtype=torch.float64).unsqueeze(1)

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        return self.queue.pop(0), torch.zeros([len(LENGTHS), max(LENGTHS)], dtype=torch.float64), None


LOGPS = -numbers(1, 1.0).abs()
OLD = LOGPS + numbers(2, 0.3)
REFERENCE = LOGPS + numbers(3, 0.5)
ROLLOUT = OLD + numbers(4, 0.6)


def flat(values: torch.Tensor) -> list[float]:
    return [x for row, n in zip(values.tolist(), LENGTHS) for x in row[:n]]


def case(**settings: Any) -> dict[str, Any]:
    """One loss and its gradient; the inputs of the trainer's loss come from its own method."""
    settings.setdefault("use_bias_correction_kl", False)
    trainer = Trainer(**settings)
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    trainer.queue = ([OLD] if corrects else []) + ([REFERENCE] if trainer.beta else [])
    trainer.args.gradient_accumulation_steps = 1
    rows = [{"prompt": "?"} for _ in LENGTHS]
    inputs = trainer._generate_and_score_completions(rows)
    assert not trainer.queue
    inputs["old_per_token_logps"] = OLD
    leaf = LOGPS.clone().requires_grad_()
    trainer.queue = [leaf]
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    found = {"settings": settings, "advantages": inputs["advantages"].tolist(), "loss": loss.item()}
    found["gradient"] = flat(gradient)
    if trainer.beta:
        found["kl"] = trainer._metrics["train"]["kl"][-1]
    if corrects:
        weights = inputs["importance_sampling_ratio"].expand(-1, max(LENGTHS))
        found["correction"] = flat(weights)
    return found


def main() -> None:
    losses = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo"]
    cases = []
    for loss, level, beta in itertools.product(losses, ["token", "sequence"], [0.0, 0.1]):
        high = 2.0 if loss == "cispo" else 0.28
        cases.append(case(loss_type=loss, importance_sampling_level=level, beta=beta, epsilon=0.2, epsilon_high=high))
    usual: dict[str, Any] = {"loss_type": "dapo", "epsilon": 0.2}
    cases += [case(**usual, scale_rewards=scale) for scale in ("group", "batch", "none")]
    cases.append(case(**usual, delta=1.3))
    for level in ("token", "sequence"):
        cases.append(case(**usual, importance_sampling_level=level, beta=0.1, use_bias_correction_kl=True))
    cases.append(case(**usual, mask_truncated_completions=True))
    for mode in ("token_truncate", "token_mask"):
        bounds = {"vllm_importance_sampling_clip_max": 1.5}
        if mode == "token_mask":
            bounds["vllm_importance_sampling_clip_min"] = 1 / 1.5
        cases.append(case(**usual, beta=0.1, use_vllm=True, vllm_importance_sampling_mode=mode, **bounds))
    given = {
        "lengths": LENGTHS, "max_length": MAX_LENGTH, "truncated": [TRUNCATED], "rewards": REWARDS,
        "logps": flat(LOGPS), "old": flat(OLD), "reference": flat(REFERENCE), "rollout": flat(ROLLOUT),
    }  # fmt: skip
    TARGET.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(found) for found in cases)
    TARGET.write_text(f'{{"given": {json.dumps(given)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")


main()
