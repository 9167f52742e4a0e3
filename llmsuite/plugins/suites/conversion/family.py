"""The model family and the preset for a model name of PaddleNLP or Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ModelFamily

# pattern of a name -> the model_type of its config.json, or why there is none; the first match counts
_MODEL_TYPES = (
    (r"awq|gptq|aqlm|[-_](int|fp)[48]\b|bnb-(4bit|nf4)|gguf", "quantised already"),
    (r"[-_]vl\b|-vl-|-omni|vision|llava|-ocr|moss-vl|[-_](tts|asr)\b|-multimodal", "for images or sound"),
    (r"gpt-?oss", "gpt_oss"),
    (r"gpt-?(neo|j)", "gpt_neo"),
    (r"llama-?4", "llama4"),
    (r"qwen-?3[.-]?(5|6|next)\b|qwen-?3\.\d", "qwen3_5 or qwen3_next"),
    (r"deepseek-?v(3\.2|4)", "deepseek_v32 or newer"),
    (r"mistral-small-3|ministral-3|mistral-large-3", "mistral3"),
    (r"embedding|reranker", "of embeddings"),
    (r"baichuan", "baichuan"),
    (r"glm-(4|z1)-(9|32)b(-\w+)?-0414", "glm4"),
    (r"glm-4\.[56]v", "for images or sound"),
    (r"glm-4\.[56]\b", "glm4_moe"),
    (r"chatglm|glm-?\d", "chatglm"),
    (r"mixtral", "mixtral"),
    (r"mistral", "mistral"),
    (r"hunyuan-(0\.5|1\.8|4|7)b\b", "hunyuan_v1_dense"),
    (r"hunyuan", "hunyuan_v1_moe"),
    (r"yuan", "yuan"),
    (r"gemma-?2\b", "gemma2"),
    (r"gemma-?3-(270m|1b)\b", "gemma3_text"),
    (r"gemma-?(3|4)", "gemma3 or newer, for images"),
    (r"gemma", "gemma"),
    (r"granite-?3[^/]*-a\d+m", "granitemoe"),
    (r"granite-?3", "granite"),
    (r"granite", "granitemoehybrid"),
    (r"olmo-?2\b", "olmo2"),
    (r"olmo-?3", "olmo3"),
    (r"phi-?3\.5-moe", "phimoe"),
    (r"phi-?3-small", "phi3small"),
    (r"phi-?(3(\.5)?-(mini|medium)|4)\b", "phi3"),
    (r"seed-oss", "seed_oss"),
    (r"smollm-?3", "smollm3"),
    (r"starcoder-?2", "starcoder2"),
    (r"internlm-?3", "internlm3"),
    (r"minimax-m2", "minimax_m2"),
    (r"command-(r7b|a)\b", "cohere2"),
    (r"bloom", "bloom"),
    (r"\bopt-\d", "opt"),
    (r"\bbge-|roberta|\bbert", "xlm-roberta"),
    (r"ernie-?4\.5.*a\d", "ernie4_5_moe"),
    (r"ernie-?4\.5", "ernie4_5"),
    (r"plano-orchestrator[^/]*-a\d+b", "qwen3_moe"),
    (r"plano-orchestrator", "qwen3"),
    (r"distill-qwen|deepcoder|cogito-v1-preview-qwen", "qwen2"),
    (r"qwen-?3.*a[\d.]+b", "qwen3_moe"),
    (r"qwen-?[12].*a[\d.]+b", "qwen2_moe"),
    (r"qwen-?3", "qwen3"),
    (r"qwen-?(1\.5|2)|qwq", "qwen2"),
    (r"qwen", "qwen"),
    (r"distill-llama|llama|vicuna|alpaca|smollm|deepseek-(llm|coder|math)|(?<![a-z])yi-(6|9|34)b\b", "llama"),
    (r"kimi-?k2\b(?![.-]?(5|6))", "kimi_k2"),
    (r"deepseek-?(v3|r1)", "deepseek_v3"),
    (r"deepseek", "deepseek_v2"),
    (r"gpt", "gpt2"),
)

_QUANTISED = re.compile(r"-(gptq(-int[48])?|awq)(?=/?$)", re.IGNORECASE)
"""End of the name of a published model whose matrices are stored in codes that are read here."""
_SUFFIXES = re.compile(r"^meta-|-(instruct|thinking|chat|it|pt|hf|base|en|bf16|fp16)\b", re.IGNORECASE)
_DATE = re.compile(r"(?<=^olmo-2)-\d{4}(?=-)")
"""Month and day in names such as OLMo-2-1124-7B."""


def is_quantised(model: str) -> bool:
    """Return True for the name of a model whose matrices are published in codes of GPTQ or AWQ."""
    return _QUANTISED.search(model) is not None


def unquantised(model: str) -> str:
    """Return the name of the model that one in codes of GPTQ or AWQ was made from; other names as they are."""
    return _QUANTISED.sub("", model)


def family_of(
    model: str, registry: Registry, key: str = "model_name_or_path", reads_codes: bool = False
) -> ModelFamily:
    """Return the family of a model.

    Args:
        model: name or directory of the model.
        registry: registered families.
        key: argument that names the model, for messages.
        reads_codes: True if the model may be one in codes of GPTQ or AWQ.

    Raises:
        UserError: no family supports the model, or neither its name nor a local config.json determines its type.
    """
    name = unquantised(model) if reads_codes else model
    kind = next((kind for pattern, kind in _MODEL_TYPES if re.search(pattern, name, re.IGNORECASE)), None)
    kind = kind or _type_in(Path(model) / "config.json")
    if kind is None:
        raise UserError(
            f"{key} is {model!r}, whose family is not known; if `llmsuite list models` has the model_type of its "
            "config.json, add --family"
        )
    found = next((family for family in registry.models.values() if kind in family.hf_model_types), None)
    if found is None:
        known = ", ".join(sorted({kind for family in registry.models.values() for kind in family.hf_model_types}))
        raise UserError(
            f"no recipe is this job: {key} is {model!r}, of type {kind}, which no family supports; supported types: "
            f"{known}"
        )
    return found


def _type_in(config: Path) -> str | None:
    """Return the model_type in a local config.json; None without one."""
    try:
        found = read_json_object(config).get("model_type")
    except UserError:  # the caller asks for --family
        return None
    return str(found) if found else None


def preset_of(name: str, family: ModelFamily) -> str | None:
    """Return the preset with a model's name, without suffixes such as -instruct; None if there is none."""
    plain = _SUFFIXES.sub("", name.rstrip("/").rpartition("/")[2]).lower()
    plain = _DATE.sub("", plain)
    return plain if plain in family.presets else None
