"""Writes tests/unit/checkpoint/convert/peft_lokr.json: LoKr adapters that HF PEFT makes and their updates.

Run it where torch and peft (0.21) are: `python tests/tools/peft_lokr.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "unit" / "checkpoint" / "convert" / "peft_lokr.json"
SIZES = ((12, 20, 1, {}), (12, 20, 4, {}), (7, 6, 2, {}), (16, 36, 1, {"decompose_both": True, "decompose_factor": 4}))
"""Inputs, outputs, rank, and other keys of PEFT's configuration."""


def made(num_inputs: int, num_outputs: int, rank: int, keys: dict[str, Any]) -> dict[str, Any]:
    import peft
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(num_inputs, num_outputs))
    config = peft.LoKrConfig(r=rank, alpha=5, target_modules=["0"], init_weights=False, **keys)
    wrapped = peft.get_peft_model(model, config)
    state = {name: value.tolist() for name, value in peft.get_peft_model_state_dict(wrapped).items()}
    update = wrapped.base_model.model[0].get_delta_weight("default")
    return {
        "shape": [num_inputs, num_outputs],
        "rank": rank,
        "plain": not keys,
        "state": state,
        "update": update.detach().T.tolist(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps([made(*of) for of in SIZES]) + "\n", encoding="utf-8")
