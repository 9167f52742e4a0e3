"""Data sets that ms-swift reads by rules of its own, such as another text, split or subset."""

from __future__ import annotations

OWN_RULES = {
    "100PoisonMpts", "AdvertiseGen", "AgentInstruct_copy", "CodeExercise-Python-27k", "Countdown-Tasks-3to4",
    "DAPO-Math-17k-Processed", "DISC-Law-SFT", "DPO-zh-en-emoji", "DocQA-RL-1.6K", "DuReader_robust-QG", "Duet-v0.5",
    "Evol-instruction-66k", "GenQA", "GuanacoDataset", "HC3", "HC3-Chinese", "Human-Like-DPO-Dataset",
    "Infinity-Instruct", "LongAlpaca-12k", "MATH-lighteval", "MATH-plus", "MSAgent-Bench", "MSAgent-MultiRole",
    "MathInstruct", "MathR", "MathR-32B-Distill", "OpenOrca", "OpenOrca-Chinese", "R1-Distill-SFT", "RedPajama-Data-V2",
    "WebInstructSub", "alpaca-gpt4-data-zh", "alpha-umi-toolbench-processed-v2", "aya_collection", "blossom-math-v2",
    "chinese-poetry-collection", "clue", "competition_math", "databricks-dolly-15k", "dolma", "falcon-refinedweb",
    "firefly-train-1.1M", "function-calling-chatml", "github-code", "gsm8k", "hh-rlhf", "hh_rlhf_cn", "instruct", "jd",
    "lawyer_llama_data", "leetcode-solutions-python", "lmsys-chat-1m", "math-trn-format", "medical_zh", "ms_bench",
    "orca_dpo_pairs", "orpo-dpo-mix-40k", "pile-val-backup", "ruozhiba", "scidocs-reranking",
    "shareAI-Llama3-DPO-zh-en-emoji", "sharegpt", "sql-create-context", "stack-exchange-paired",
    "stackoverflowdupquestions-reranking", "starcoderdata", "stsb", "sudoku-extreme-1k", "synthetic_text_to_sql",
    "the-stack", "tigerbot-law-plugin", "ultrachat_200k", "verifiable-coding-problems-python",
    "verifiable-coding-problems-python_decontaminated", "wikipedia-cn-20230720-filtered", "xlam-function-calling-60k",
    "zh_cls_fudan-news", "zh_ner-JAVE", "zhihu_rlhf_3k",
}  # fmt: skip
"""Names without their organisation, by which ms-swift finds its rules."""
_FORMATS = {
    "alpaca-gpt4-data-zh": "swift_alpaca_zh",
    "LongAlpaca-12k": "swift_long_alpaca",
    "self-cognition:qwen3": "swift_self_cognition_qwen3",
    "self-cognition:empty_think": "swift_self_cognition_empty_think",
    "shareAI-Llama3-DPO-zh-en-emoji": "swift_emoji_pairs",
    "DPO-zh-en-emoji": "swift_emoji_pairs",
}
"""Data formats that have these rules, by NAME or NAME:SUBSET."""
_SECTIONS = {"swift_emoji_pairs": ("dpo", "rm")}
"""Sections of the stages that read a format; the others are for sft and gkd."""


def own_format(name: str, subset: str, section: str) -> str | None:
    """Return the data format that has ms-swift's rules for a data set; None if none has.

    Args:
        name: of the data set, with or without its organisation.
        subset: of the data set; "" for none.
        section: of the stage, whose kind of rows the format has to have.
    """
    known = name.rpartition("/")[2]
    found = _FORMATS.get(f"{known}:{subset}" if subset else known)
    if found is None or section not in _SECTIONS.get(found, ("sft", "gkd")):
        return None
    return found
