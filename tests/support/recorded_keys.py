"""Record of the keys that short runs read, next to those that are declared as used.

    python -m tests.support.recorded_keys DIR    # prints {case: {"used": [...], "read": [...]}}

A process of its own: it replaces the attribute access of all sections.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.base.fields import field_values
from llmsuite.cli.run import run_rank
from llmsuite.contract.schema.section import Section, unused_keys, value_at
from llmsuite.contract.specs import RunSpec
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.support.paths import ROOT

ONE_RANK = ("--launch.num_devices=1", "--parallel={}")
FEW_STEPS = ("--train.max_steps=4", "--train.global_batch_size=8", "--train.micro_batch_size=4")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pretrain": ("llama/pretrain.json", ()),
    "sft": ("llama/sft.json", ()),
    "lora": ("llama/lora.json", ()),
    "gkd": ("llama/gkd.json", ()),
    "gkd on policy": ("llama/gkd-on-policy.json", ()),
    "dpo": ("llama/dpo.json", ()),
    "orpo": ("llama/orpo.json", ()),
    "simpo": ("llama/simpo.json", ()),
    "rm": ("llama/rm.json", ()),
    "kto": ("llama/kto.json", ()),
    "grpo": ("llama/grpo.json", ()),
    "cispo": ("llama/cispo.json", ()),
    "grpo with a KL penalty": ("llama/reinforce_pp_kl.json", ()),
    "grpo with a correction": ("llama/grpo.json", ("--grpo.rollout_correction=tis", "--rollout.dynamic_sampling=true")),
    "grpo with an environment": ("llama/guess-grpo.json", ()),
    "ppo": ("llama/ppo.json", ("--ppo.kl_target=1", "--ppo.beta=0.1", "--ppo.reference=copy")),
    "online_dpo": ("llama/online_dpo.json", ()),
    "infer": ("llama/infer.json", ()),
    "infer with beams": ("llama/infer.json", ("--infer.num_beams=2", "--infer.temperature=null")),
    "lora_ga": ("llama/lora_ga.json", ()),
    "qlora": ("llama/qlora.json", ()),
    "reft": ("llama/reft.json", ()),
    "prefix": ("llama/prefix.json", ("--prefix.projection=true",)),
    "qat": ("llama/sft.json", ("--qat.weight_bits=8", "--qat.activation_bits=8")),
    "generation": ("llama/sft.json", ("--generation.max_new_tokens=4", "--generation.temperature=1")),
    "schedule": (
        "llama/sft.json",
        ("--train.lr_schedule=wsd", "--train.spike_factor=9", "--train.optimizer=sgd"),
    ),
    "best checkpoint": ("llama/sft.json", ("--checkpoint.best_metric=eval/loss",)),
    "early stopping": (
        "llama/sft.json",
        ("--train.early_stopping.patience=9", "--train.eval_steps=2"),
    ),
    "held-out rows": ("llama/sft.json", ("--data.eval=null", "--data.holdout=0.2", "--data.sample=64")),
    "experts": ("qwen_moe/sft.json", ()),
}  # fmt: skip
"""Case -> (recipe, overrides): each stage, and the settings on which the use of other keys depends."""

_BULK = ("dataclasses.py", "contract/schema/section.py", "base/fields.py")
"""Files whose functions read all keys of a section, which uses none of them."""


@contextlib.contextmanager
def recorded() -> Iterator[set[tuple[int, str]]]:
    """While active, record the (id of the section, key) of each read of a key."""
    reads: set[tuple[int, str]] = set()

    def read(section: Section, name: str) -> Any:
        is_key = not name.startswith("_") and name in type(section).__dataclass_fields__
        if is_key and not sys._getframe(1).f_code.co_filename.endswith(_BULK):
            reads.add((id(section), name))
        return object.__getattribute__(section, name)

    Section.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield reads
    finally:
        del Section.__getattribute__


def _keys(section: Section, prefix: str = "") -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield (dotted key, what its reading records) of each key below a section."""
    for name, value in field_values(section).items():
        if isinstance(value, Section):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, (id(section), name)


def declared(recipe: Section, stage: RunSpec) -> set[str]:
    """The keys of a recipe that are declared as used."""
    unused = {".".join(key) for key, _ in unused_keys(recipe)}
    elsewhere = {key for key, _ in value_at(recipe, stage.section_name).unused_elsewhere()}
    return {key for key, _ in _keys(recipe)} - unused - elsewhere


def main(directory: Path) -> dict[str, dict[str, list[str]]]:
    """Run the cases; returns the keys that each is declared to use, and those that it read."""
    registry = registry_with()
    plans = {}
    for case, (recipe, words) in CASES.items():
        of_training = () if recipe.endswith("infer.json") else FEW_STEPS
        overrides = [f"--output_dir={directory / case}", *ONE_RANK, *of_training, *words]
        plans[case] = plan_run(ROOT / "recipes" / recipe, overrides, registry, smoke=True)
    found = {}
    for case, plan in plans.items():
        with recorded() as reads:
            assert run_rank(plan, registry, False) == 0, case
        found[case] = {
            "used": sorted(declared(plan.recipe, plan.train.stage)),
            "read": sorted(key for key, read in _keys(plan.recipe) if read in reads),
            "capabilities": sorted(plan.train.stage.capabilities),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
