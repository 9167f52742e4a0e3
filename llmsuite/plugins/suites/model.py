"""Parts of sections `model` and `lora` in which suites differ only in the names of arguments."""

from __future__ import annotations

import collections
from typing import Any

from llmsuite.base.safe_files import exists
from llmsuite.models.decoder_config import DenseConfig
from llmsuite.plugins.suites.conversion.family import is_quantised, preset_of
from llmsuite.plugins.suites.suite import Run

_WITH_DROPOUT = ("gpt", "granite", "granite_moe", "seed_oss", "starcoder")
"""Families whose published config.json has dropout of the model itself."""
_WITHOUT_DROPOUT = ("dpo", "kto", "rm", "gkd")
"""Sections whose trainers are TRL's, or made of them: by default they set `disable_dropout`."""


def model(run: Run, tokenizer: str | None = None, hub: str = "") -> dict[str, Any]:
    """Return section model: the weights by name or directory, and the preset of that name.

    Args:
        run: the conversion.
        tokenizer: name of the tokenizer, if it is not that of the weights.
        hub: prefix of a hub, such as "ms:", for a name that is not a local directory.
    """
    name = str(run.take(run.suite.model_key))
    is_local = name.startswith((".", "/", "~")) or exists(name)
    found: dict[str, Any] = {"family": run.family.name, "weights": name if is_local else f"{hub}{name}"}
    if tokenizer not in (None, name):
        found["tokenizer"] = tokenizer
    if is_quantised(name):
        _check_codes(run, name)
    if run.family.name in _WITH_DROPOUT and run.section not in _WITHOUT_DROPOUT:
        run.refuse(
            run.suite.model_key,
            name,
            "the config.json of these models has dropout, which is applied there; llmsuite has it in adapters only",
        )
    run.preset = preset_of(name, run.family)
    if run.preset is not None:
        found["preset"] = run.preset
    else:
        run.note(f"model.preset: none is known for {name}; checks need its config.json, in model.weights")
    return found


def _check_codes(run: Run, name: str) -> None:
    """Refuse a model in codes of GPTQ or AWQ, unless adapters are trained on its matrices as they are."""
    if not run.suite.reads_codes or run.stage != "lora":
        run.refuse(run.suite.model_key, name, "its matrices are quantised; only sft with adapters trains on them")
    run.note("model.weights: matrices are read as the values of their codes, so they need the memory of the precision; "
             "their products are rounded as those of other matrices")  # fmt: skip


def revision(run: Run, found: dict[str, Any], hub: str = "") -> None:
    """Add `model_revision` to the name of the weights in section model; the branch that a hub has by default is left
    out."""
    given = run.take("model_revision")
    if given is None:
        return
    usual = "master" if hub == "ms:" else "main"
    weights = found["weights"]
    if given == usual:
        run.left_out("model_revision", given, "is the default")
    elif exists(weights) or weights.startswith((".", "/", "~")):
        run.left_out("model_revision", given, "the weights are a directory")
    else:
        found["weights"] = f"{weights}@{given}"


def system(run: Run, key: str, has_default: bool) -> dict[str, Any]:
    """Return `data.system`; refuse an empty text, which suites take for no system turn.

    Args:
        run: the conversion.
        key: argument with the text.
        has_default: True unless it is known that the chat template adds no system turn of its own.
    """
    given = run.given(key)
    text = run.take(key)
    if text is not None:
        return {"system": str(text)}
    if given == "" and has_default:
        run.refuse(key, '""', "turns the system turn of the template off; nearest key: data.chat_template")
    elif given == "":
        run.left_out(key, given, "the template has no system turn of its own")
    return {}


def target_modules(run: Run, key: str, every: tuple[str, ...], default: str | None = None) -> dict[str, Any]:
    """Return `lora.target_modules`.

    Args:
        run: the conversion.
        key: argument that names the matrices.
        every: values of it that mean all linear layers except the head.
        default: its default value.
    """
    given = run.given(key) or default
    named = run.words(key) or ([default] if default is not None else [])
    if len(named) != 1 or named[0] not in every:
        if any(set(word) & set("^$()[]|\\") for word in named):
            run.refuse(key, given, "is a regular expression; nearest key: lora.target_modules, which has patterns")
        elif run.family.name == "gpt":
            run.refuse(key, given, "names matrices of GPT-2, of which c_attn is one for queries, keys and values with "
                                   "one adapter there; here its parts have an adapter each")  # fmt: skip
        named = _of_joined(run, key, named)
        return {"target_modules": named} if named else {}
    if run.has_experts:
        run.refuse(
            key, given, "includes routed experts and gates; name the matrices, such as q_proj,k_proj,v_proj,o_proj"
        )
    if run.family.name == "gpt":
        run.refuse(key, given, "matches no matrices in GPT-2, whose layers are not linear layers there")
    for matrix in sorted(set(_joined(run).values())):
        run.refuse(key, given, f"includes {matrix}, {_ONE_THERE}")
    return {}


_ONE_THERE = "one matrix with one adapter there; here its parts have an adapter each"


def _joined(run: Run) -> dict[str, str]:
    """Return the matrices that are parts of one matrix in HF, by the last part of their names, with that of its
    name."""
    config_cls = run.family.config_cls
    if not issubclass(config_cls, DenseConfig):
        return {}
    matrices = {part: name for part, name in config_cls.hf_parts.items() if not part.endswith(".bias")}
    counts = collections.Counter(matrices.values())
    parts = {part.removesuffix(".weight"): name for part, name in matrices.items() if counts[name] > 1}
    return {part.rpartition(".")[2]: name.rpartition(".")[2] for part, name in parts.items()}


def _of_joined(run: Run, key: str, named: list[str]) -> list[str]:
    """Return named matrices without parts of a joined one, which PEFT does not find; refuse a joined one."""
    joined = _joined(run)
    for name in named:
        if name.rpartition(".")[2] in joined.values():
            run.refuse(key, name, f"is {_ONE_THERE}")
    absent = [name for name in named if name.rpartition(".")[2] in joined]
    if not absent:
        return named
    left = [name for name in named if name not in absent]
    if not left:
        run.refuse(key, ", ".join(absent), "names no matrix of the model there")
    run.note(f"lora.target_modules: without {', '.join(absent)}, which are parts of one matrix of another name there: "
             "PEFT does not find them")  # fmt: skip
    return left


def dropout(run: Run, default: float) -> dict[str, Any]:
    """Return `lora.dropout`. What turns off the dropout of the model also turns off that of adapters."""
    rate = run.number("lora_dropout", default)
    if not rate:
        return {}
    if run.section in _WITHOUT_DROPOUT:
        run.left_out("lora_dropout", rate, "the trainer of this stage turns dropout off, also that of adapters")
        return {}
    if run.section == "grpo":
        run.refuse("lora_dropout", rate, "completions are sampled without dropout; set it to 0 for the same job")
        return {}
    return {"dropout": float(rate)}


def modules_to_save(run: Run, key: str) -> dict[str, Any]:
    """Return `lora.modules_to_save` for the argument that names the modules which PEFT trains in full."""
    named = run.words(key)
    others = [name for name in named if name not in ("embed_tokens", "lm_head")]
    if others:
        run.refuse(key, ", ".join(others), "lora.modules_to_save has embed_tokens and lm_head")
    return {"modules_to_save": named} if named else {}


def bits(run: Run, four: bool, eight: tuple[str, Any], kind: tuple[str, str], doubled: bool) -> dict[str, Any]:
    """Return `lora.base_dtype` and `lora.base_double_quant` for bitsandbytes' arguments.

    Args:
        run: the conversion.
        four: True if frozen matrices are in 4 bits.
        eight: name and value of the argument for 8 bits; the value is false or None if they are not.
        kind: name and value of the argument for nf4 or fp4.
        doubled: True for double quantisation, which also quantises the scales.
    """
    if (four or eight[1]) and is_quantised(str(run.given(run.suite.model_key))):
        argument, value = eight if eight[1] else kind
        run.refuse(argument, value, "the model is quantised already")
    if eight[1] and not four:
        if run.has_experts:
            why = "which matrices of experts are in 8 bits depends on the version of transformers"
            run.refuse(*eight, f"{why}; nearest key: lora.base_dtype, with llm_int8")
        run.note(
            "lora.base_dtype: llm_int8 has the outliers of the tokens of a micro-batch; there its padding counts too"
        )
        return {"base_dtype": "llm_int8"}
    if not four:
        return {}
    if kind[1] not in ("nf4", "fp4"):
        run.refuse(*kind, "lora.base_dtype has nf4, fp4 and int8")
    if eight[1]:
        run.refuse(*eight, "is given with 4 bits")
    joined = sorted(set(_joined(run).values()))
    if doubled and joined:
        run.refuse(*kind, f"with double quantisation the scales of {', '.join(joined)} have one mean there; "
                          "lora.base_double_quant subtracts one from each of its parts")  # fmt: skip
    return {"base_dtype": kind[1], **({"base_double_quant": True} if doubled else {})}
