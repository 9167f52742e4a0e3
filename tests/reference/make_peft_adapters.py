"""Writes tests/reference/peft/adapters.json: what HF PEFT's LoRA layers compute, with dropout and with PiSSA.

Needs torch and peft, and neither Paddle nor llmsuite; made with torch 2.13 and peft 0.21.2. Run it from anywhere; a
second run writes the same values:

    python tests/reference/make_peft_adapters.py

Matrices are written [inputs, outputs]. Which inputs torch's dropout keeps is written too, as no other library draws the
same. The step is one of plain gradient descent on `sum(y * direction)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

TARGET = Path(__file__).resolve().parent / "peft" / "adapters.json"
INPUTS = 12
OUTPUTS = 10
RANK = 3
ALPHA = 6.0
RATE = 0.05
DROPOUT = 0.3
CASES: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": DROPOUT, "init_lora_weights": False},
    "dropout, rslora": {"lora_dropout": DROPOUT, "init_lora_weights": False, "use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa, rslora": {"init_lora_weights": "pissa", "use_rslora": True},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class Recorded(nn.Dropout):
    """Torch's dropout, which notes what it keeps."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted = super().forward(torch.ones_like(x))
        self.kept = noted != 0
        return x * noted


def numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().tolist()


def case(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    base = Model()
    found: dict[str, Any] = {"weight": numbers(base.proj.weight.T), "bias": numbers(base.proj.bias)}
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["proj"], **options)
    model = get_peft_model(base, config)
    layer = model.base_model.model.proj
    if "lora_dropout" in options:
        layer.lora_dropout["default"] = Recorded(DROPOUT)
    first = layer.lora_A["default"].weight
    second = layer.lora_B["default"].weight
    found |= {"A": numbers(first.T), "B": numbers(second.T)}
    x = torch.randn(2, 4, INPUTS, requires_grad=True)
    direction = torch.randn(2, 4, OUTPUTS)
    found |= {"x": numbers(x), "direction": numbers(direction), "y": []}
    model.train()
    y = model(x)
    (y * direction).sum().backward()
    if "lora_dropout" in options:
        found["kept"] = layer.lora_dropout["default"].kept.int().tolist()
    for name, tensor in (("x", x), ("A", first), ("B", second)):
        found[f"gradient of {name}"] = numbers(tensor.grad if name == "x" else tensor.grad.T)
    with torch.no_grad():
        for parameter in (first, second):
            parameter -= RATE * parameter.grad
    model.eval()
    return found | {"y": numbers(y), "y after a step": numbers(model(x))}


def main() -> None:
    sizes = {"rank": RANK, "alpha": ALPHA, "rate": RATE, "dropout": DROPOUT}
    cases = {name: {**case(options), "rslora": "use_rslora" in options} for name, options in CASES.items()}
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps({"sizes": sizes, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
