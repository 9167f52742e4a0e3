"""Writes tests/reference/rl/verl.json: advantages, returns and value losses as verl computes them.

Needs torch and a copy of verl's sources, and neither Paddle nor llmsuite; made with torch 2.13 and verl at commit
b178a3cd5. A second run writes the same values:

    python tests/reference/make_ppo.py DIRECTORY_OF_VERL

verl's own functions run, taken out of its files: the imports of these need more than they do.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).resolve().parent / "rl" / "verl.json"
LENGTHS = [5, 9, 1, 4, 7, 3]
OBSERVED = {1: [2, 3, 6], 4: [0, 5]}
"""Tokens of an environment in some completions."""


def functions(path: Path, names: list[str], known: dict[str, Any]) -> types.SimpleNamespace:
    """These functions of a file, without the decorators that register them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    scope = dict(known)
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


def numbers(seed: int, scale: float = 1.0) -> torch.Tensor:
    """[completions, longest], float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([len(LENGTHS), max(LENGTHS)], generator=generator, dtype=torch.float64) * scale


def rows(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """The values where the mask is 1, by completion."""
    return [row[kept > 0].tolist() for row, kept in zip(values, mask)]


def main(verl: Path) -> None:
    masks = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
    functional = functions(verl / "verl/utils/torch_functional.py", masks, {"torch": torch})
    wanted = ["compute_gae_advantage_return", "compute_reinforce_plus_plus_outcome_advantage", "compute_value_loss"]
    known = {"torch": torch, "verl_F": functional}
    core = functions(verl / "verl/trainer/ppo/core_algos.py", [*wanted, "agg_loss"], known)

    whole = torch.zeros_like(numbers(0))
    for row, length in enumerate(LENGTHS):
        whole[row, :length] = 1
    own = whole.clone()
    for row, places in OBSERVED.items():
        own[row, places] = 0
    rewards = numbers(1)
    values = numbers(2)
    found: dict[str, Any] = {"gae": []}
    for gamma, lambda_ in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)):
        advantages, returns = core.compute_gae_advantage_return(rewards * own, values, own, gamma, lambda_)
        case = {"gamma": gamma, "lambda": lambda_, "advantages": rows(advantages, own), "returns": rows(returns, own)}
        found["gae"].append(case)
    found |= {"rewards": rows(rewards, own), "values": rows(values, own)}
    config = types.SimpleNamespace(gamma=0.9)
    advantages, returns = core.compute_reinforce_plus_plus_outcome_advantage(rewards * whole, whole, config)
    found["reinforce_pp"] = {
        "gamma": 0.9, "rewards": rows(rewards, whole),
        "advantages": rows(advantages, whole), "returns": rows(returns, whole),
    }  # fmt: skip
    now = (values + numbers(3, 0.4)).requires_grad_()
    loss, share = core.compute_value_loss(now, numbers(4), values, whole, 0.2)
    (gradient,) = torch.autograd.grad(loss, now)
    found["value_loss"] = {
        "clip": 0.2, "values": rows(now.detach(), whole), "old": rows(values, whole),
        "returns": rows(numbers(4), whole), "loss": loss.item(), "clip_ratio": share.item(),
        "gradient": rows(gradient, whole),
    }  # fmt: skip
    TARGET.write_text(json.dumps(found) + "\n", encoding="utf-8")


main(Path(sys.argv[1]))
