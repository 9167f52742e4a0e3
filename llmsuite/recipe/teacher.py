"""The teacher of a run: a second, frozen model with the vocabulary of the trained one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.rule import Violation
from llmsuite.contract.specs import ModelFamily, TeacherProfile
from llmsuite.models.head import NO_KEYS, head_of
from llmsuite.models.protocols import HasVocabulary, shape_fields
from llmsuite.models.shard_plan import UNSHARDED, ShardPlan
from llmsuite.recipe.shape import named_weights


@dataclasses.dataclass(frozen=True)
class TeacherPlan:
    """The network of a teacher and the files of its values."""

    key: str
    """Recipe key that names it, such as "gkd.teacher"."""
    family: ModelFamily
    config: Any
    """Shape of the teacher, of the family's `config_cls`."""
    weights: Path | None
    """Directory of its weights; None for random values. It may be missing until `RunPlan.check_files`."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of its parameters and activations."""
    seed: int
    """Seed of random values, which differ from those of the model."""

    @property
    def shard_plan(self) -> ShardPlan:
        """Partition of its parameters for tensor parallelism."""
        return self.family.shard_plan or UNSHARDED


def teacher_of(
    profile: TeacherProfile | None,
    recipe: Recipe,
    family: ModelFamily,
    config: Any,
    families: Mapping[str, ModelFamily],
    precisions: Sequence[str] | None,
) -> tuple[TeacherPlan | None, list[Violation]]:
    """Return the plan of the teacher and the rules that it violates; no plan where there is no teacher, or none that
    could be trained with.

    Args:
        profile: of the teacher; None for a stage without one.
        recipe: of the run.
        family: of the model.
        config: of the model; None if it could not be determined.
        families: known model families.
        precisions: that the device supports for training; None for an unknown device.
    """
    if profile is None:
        return None, []
    found, problem = _shape(profile, family, families)
    if found is None:
        return None, [problem]
    plan = TeacherPlan(
        key=profile.key,
        family=found[0],
        config=found[1],
        weights=found[2],
        precision=profile.precision or recipe.engine.precision,
        seed=recipe.seed + 1,
    )
    return plan, _violations(plan, recipe, config, precisions)


def _shape(
    profile: TeacherProfile, family: ModelFamily, families: Mapping[str, ModelFamily]
) -> tuple[tuple[ModelFamily, Any, Path | None] | None, Violation]:
    """Return family, config and directory of the teacher, or None and the reason why there is no such teacher."""
    key = profile.key
    none = ("", "")
    try:
        weights = named_weights(profile.weights, profile.preset is None)
    except UserError as error:
        return None, (key, f"{error}; or set {key}_preset to check the recipe without weights")
    given = dict(profile.config)
    if profile.preset is not None:
        owners = [f for f in (family, *families.values()) if profile.preset in f.presets]
        if not owners:
            return None, (f"{key}_preset", f"no family has a preset {profile.preset!r}; `llmsuite list models` has all")
        family = owners[0]
        given = {**family.presets[profile.preset], **given}
    if weights is not None and is_file(weights / "config.json"):
        from llmsuite.checkpoint.model_dir import read_config

        try:
            found_family, config = read_config(weights, families)
        except UserError as error:
            return None, (key, str(error))
        fields = shape_fields(config)
        differing = sorted(name for name in given if name not in fields or fields[name] != given[name])
        if found_family.name != family.name and profile.preset is not None:
            differing = ["the family"]
        if differing:
            message = f"{weights} is another model than {key}_preset and {key}_config say ({', '.join(differing)})"
            return None, (key, f"{message}; remove both keys: the shape of the teacher is in its files")
        return (found_family, config, weights), none
    if not given:
        if weights is None:
            return None, (key, "is required: a directory with a model, a run, or a name on a hub such as hf:ORG/NAME")
        message = f"{profile.weights} is not a directory with a model (working directory: {Path.cwd()})"
        return None, (key, f"{message}; or set {key}_preset to check the recipe without weights")
    names = {field.name for field in dataclasses.fields(family.config_cls)} - {*NO_KEYS}
    if unknown := sorted(given.keys() - names):
        return None, (f"{key}_config", f"{unknown[0]} is no field of a {family.name} shape; they are in model.config")
    config = family.config_cls(**given)
    problems = list(config.problems())
    if problems:
        return None, (f"{key}_config", f"{problems[0][0]} {problems[0][1]}")
    return (family, config, weights), none


def _violations(plan: TeacherPlan, recipe: Recipe, config: Any, precisions: Sequence[str] | None) -> list[Violation]:
    """Return the rules between a teacher, the model, the device and the strategy that are violated."""
    key = plan.key
    found: list[Violation] = []
    if plan.shard_plan.is_auto_parallel:
        message = f"is of family {plan.family.name}, which can be trained only, and not called by another model"
        found.append((key, f"{message}; choose a teacher of another family"))
    if head_of(plan.config) == "score":
        found.append((key, "is a reward model, which has no distributions over tokens; choose a language model"))
    sized = isinstance(config, HasVocabulary) and isinstance(plan.config, HasVocabulary)
    if sized and config.vocab_size != plan.config.vocab_size:
        found.append(
            (
                key,
                f"has a vocabulary of {plan.config.vocab_size} tokens, and the model one of {config.vocab_size}: their "
                "distributions cannot be compared; choose a teacher with the same vocabulary",
            )
        )
    if precisions is not None and plan.precision not in precisions:
        message = f"is {plan.precision}, which {recipe.device} does not support; choose one of {', '.join(precisions)}"
        found.append((f"{key}_precision", message))
    tp = recipe.parallel.tensor_parallel_degree
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(plan.config, name, None)
        if tp > 1 and isinstance(heads, int) and heads % tp:
            message = f"is {tp}, which does not divide the {heads} {name} of the teacher ({key})"
            found.append(("parallel.tensor_parallel_degree", f"{message}; choose a divisor of it"))
    return found
