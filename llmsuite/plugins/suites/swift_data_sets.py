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
