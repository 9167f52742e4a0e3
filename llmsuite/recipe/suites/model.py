"""Section `model` and section `lora`, where suites differ in words only."""

from __future__ import annotations

from typing import Any

from llmsuite.recipe.conversion.family import preset_of
from llmsuite.recipe.suites.suite import Run
from llmsuite.regular import exists


def model(run: Run, tokenizer: str | None = None, hub: str = "") -> dict[str, Any]:
    """Weights by their name on a hub or in a directory, and the shape the family has under that name.

    `hub` is put in front of a name that is no directory here, such as "ms:".
    """
    name = str(run.take(run.suite.model_key))
    is_place = name.startswith((".", "/", "~")) or exists(name)
    found: dict[str, Any] = {"family": run.family.name, "weights": name if is_place else f"{hub}{name}"}
    if tokenizer not in (None, name):
        found["tokenizer"] = tokenizer
    run.preset = preset_of(name, run.family)
    if run.preset is not None:
        found["preset"] = run.preset
    else:
        run.note(f"model.preset: none is known of {name}; checks need its config.json, in model.weights")
    return found


def target_modules(run: Run, key: str, every: tuple[str, ...], default: str | None = None) -> dict[str, Any]:
    """Which matrices get adapters.

    Args:
        run: the conversion.
        key: the argument that names them.
        every: its values that mean all linear layers but the head.
        default: its value where nothing is given.
    """
    told = run.given(key) or default
    named = run.words(key) or ([default] if default is not None else [])
    if len(named) != 1 or named[0] not in every:
        if any(set(word) & set("^$()[]|\\") for word in named):
            run.refuse(key, told, "is a regular expression; nearest key: lora.target_modules, which has patterns")
        return {"target_modules": named} if named else {}
    if run.has_experts:
        run.refuse(
            key, told, "takes routed experts and gates too; name the matrices, as in q_proj,k_proj,v_proj,o_proj"
        )
    if run.family.name == "gpt":
        run.refuse(key, told, "finds no matrices in GPT-2, whose layers are no linear ones there")
    return {}


def bits(
    run: Run, four: bool, eight: tuple[str, Any], kind: tuple[str, str], doubled: tuple[str, bool]
) -> dict[str, Any]:
    """`lora.base_dtype` of bitsandbytes' arguments.

    Args:
        run: the conversion.
        four: whether frozen matrices are in 4 bits.
        eight: the argument that says whether they are in 8 bits, and its value; none where they are not.
        kind: the argument for nf4 or fp4, and its value.
        doubled: the argument that says whether scales are rounded too, and its value.
    """
    if eight[1]:
        run.refuse(*eight, "LLM.int8 keeps outliers in 16 bits; nearest key: lora.base_dtype, with int8")
    if not four:
        return {}
    if kind[1] not in ("nf4", "fp4"):
        run.refuse(*kind, "lora.base_dtype has nf4, fp4 and int8")
    if doubled[1]:
        run.refuse(
            doubled[0], True, f"its scales are rounded to 8 bits too; set {doubled[0]} to false for the same job"
        )
    return {"base_dtype": kind[1]}
