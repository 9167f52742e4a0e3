"""Writes tests/reference/peft/models/FAMILY-CASE-KIND/: adapters of models that lie in this directory, and the logits
that HF PEFT has with them.

Needs torch, transformers, peft, numpy and safetensors, and neither Paddle nor llmsuite; made with torch 2.13,
transformers 5.23 and peft 0.21.2. Run it from anywhere; a second run writes the same values:

    python tests/reference/make_peft_models.py

`pairs` and `lora_ga` are files as llmsuite writes them, with random numbers in them, which PEFT has read. `stacks`,
`down` and `full` (`modules_to_save`; with transformers 5.24) are adapters that PEFT has made and saved. Logits
[B, L, V] are of the input ids of the model's own reference.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
RANK = 3
ALPHA = 5.0
SEED = 0
OF_EXPERTS = ("deepseek/v3", "qwen_moe/qwen3", "ernie_moe/tied")
CASES = (
    *((case, kind) for case in OF_EXPERTS for kind in ("pairs", "stacks")),
    ("qwen_moe/qwen2", "down"),
    ("llama/grouped_query", "lora_ga"),
    ("llama/grouped_query", "full"),
    ("ernie/tied", "full"),
)
ATTENTION = {
    "deepseek": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "others": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
MLP = ["gate_proj", "up_proj", "down_proj"]
STACKS: dict[str, dict[str, Any]] = {
    "stacks": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "down": {
        "target_parameters": ["mlp.experts.down_proj"],
        "use_rslora": True,
        "rank_pattern": {r".*\.experts\.down_proj": 2},
        "alpha_pattern": {r".*\.experts\.down_proj": 7.0},
    },
}


def main(cases: Sequence[tuple[str, str]] = CASES) -> None:
    for case, kind in cases:
        torch.manual_seed(SEED)
        target = HERE / "peft" / "models" / f"{case.replace('/', '-')}-{kind}"
        target.mkdir(parents=True, exist_ok=True)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        base = AutoModelForCausalLM.from_pretrained(HERE / case, dtype=torch.float32, **plain)
        with np.load(HERE / case / "reference.npz") as stored:
            ids = torch.tensor(stored["input_ids"])
        attention = ATTENTION.get(case.partition("/")[0], ATTENTION["others"])
        if kind == "full":
            full = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": "tied" in case}
            model = saved_by_peft(target, base, LoraConfig(target_modules=attention, **full, **common()))
        elif kind in STACKS:
            model = saved_by_peft(target, base, LoraConfig(target_modules=attention, **STACKS[kind], **common()))
        else:
            write_as_llmsuite(target, base, attention, kind)
            model = PeftModel.from_pretrained(base, target)
        with torch.no_grad():
            np.savez(target / "reference.npz", logits=model.eval()(input_ids=ids).logits.numpy())


def common() -> dict[str, Any]:
    return {"task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}


def saved_by_peft(target: Path, base: Any, config: LoraConfig) -> Any:
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(target)
    (target / "README.md").unlink()
    saved = json.loads((target / "adapter_config.json").read_text())
    saved["base_model_name_or_path"] = None
    # they come out of sets
    named = ("target_modules", "target_parameters", "modules_to_save")
    saved |= {key: sorted(saved[key]) for key in named if saved[key] is not None}
    write_config(target, saved)
    return model


def write_as_llmsuite(target: Path, base: Any, attention: list[str], kind: str) -> None:
    """Factors of each matrix of each expert; or of LoRA-GA, whose second half is what it has begun with."""
    linears = {
        name: module.weight.shape for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)
    }
    names = attention + MLP
    shapes = {}
    rank = 2 * RANK
    alpha = 2 * ALPHA
    if kind == "pairs":
        stacks = {name: module for name, module in base.named_modules() if name.endswith(".experts")}
        for name, stack in stacks.items():
            _, hidden, inner = stack.down_proj.shape
            places = itertools.product(range(stack.num_experts), MLP)
            shapes |= {f"{name}.{i}.{m}": (hidden, inner) if m == "down_proj" else (inner, hidden) for i, m in places}
        each = [f"{expert}.{matrix}" for matrix in MLP for expert in range(stack.num_experts)]
        names = attention + each
        rank = RANK
        alpha = ALPHA
    wanted = attention if kind == "pairs" else names
    shapes |= {name: shape for name, shape in linears.items() if name.rpartition(".")[2] in wanted}
    tensors = {}
    for name, (num_outputs, num_inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.2 * torch.randn(rank, num_inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.2 * torch.randn(num_outputs, rank)
    save_file(tensors, target / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
        "base_model_name_or_path": None,
        "r": rank,
        "target_modules": names,
        "inference_mode": True,
        "lora_alpha": alpha,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    write_config(target, told)


def write_config(target: Path, config: dict[str, Any]) -> None:
    (target / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
