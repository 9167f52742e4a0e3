"""Arguments as PaddleNLP's files have them, and what makes recipes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmsuite.contract.specs import ConvertedRecipe

# keys as in llm/config/*/*_argument.json and llm/auto_parallel; the values are ours
COMMON: dict[str, Any] = {
    "output_dir": "./checkpoints/x", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 8, "logging_steps": 1, "bf16": True, "fp16_opt_level": "O2", "do_train": True,
    "do_eval": True, "disable_tqdm": True, "unified_checkpoint": True, "use_flash_attention": True,
}  # fmt: skip
PRETRAIN: dict[str, Any] = {
    **COMMON, "model_name_or_path": "facebook/llama-13b", "tokenizer_name_or_path": "facebook/llama-13b",
    "input_dir": "./data", "split": "949,50,1", "max_seq_length": 2048, "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 2, "virtual_pp_degree": 1, "sharding": "stage1", "sharding_parallel_degree": 2,
    "sequence_parallel": 1, "learning_rate": 3e-05, "min_learning_rate": 3e-06, "lr_scheduler_type": "cosine",
    "warmup_steps": 30, "warmup_ratio": 0.01, "max_steps": 1000, "save_steps": 500, "eval_steps": 250,
    "weight_decay": 0.01, "max_grad_norm": 1.0, "adam_beta2": 0.95, "continue_training": 0, "do_predict": False,
    "recompute": True, "recompute_granularity": "core_attn", "distributed_dataloader": 1, "save_total_limit": 3,
    "dataloader_num_workers": 1, "amp_master_grad": True, "fuse_attention_qkv": True, "device": "gpu", "seed": 1234,
    "to_static": False, "sharding_parallel_config": "enable_overlap", "num_hidden_layers": 10, "model_type": "llama",
}  # fmt: skip
SFT: dict[str, Any] = {
    **COMMON, "model_name_or_path": "meta-llama/Meta-Llama-3.1-8B-Instruct", "dataset_name_or_path": "./data",
    "num_train_epochs": 3, "learning_rate": 3e-05, "warmup_steps": 30, "evaluation_strategy": "epoch",
    "save_strategy": "epoch", "src_length": 1024, "max_length": 3072, "load_best_model_at_end": True,
    "eval_with_do_generation": False, "metric_for_best_model": "accuracy", "recompute": True, "save_total_limit": 1,
    "tensor_parallel_degree": 2, "sharding": "stage2", "zero_padding": True, "eval_accumulation_steps": 16,
}  # fmt: skip
LORA = {
    **SFT,
    "model_name_or_path": "Qwen/Qwen2-7B",
    "lora": True,
    "lora_rank": 16,
    "sharding": "stage1",
    "pissa": False,
}
DPO: dict[str, Any] = {
    **COMMON, "model_name_or_path": "deepseek-ai/DeepSeek-V2-Lite", "train_dataset_path": "./data/train.jsonl",
    "dev_dataset_path": "./data/dev.jsonl", "num_train_epochs": 1, "max_steps": 100, "learning_rate": 1e-06,
    "warmup_steps": 10, "evaluation_strategy": "steps", "save_strategy": "steps", "eval_steps": 50, "save_steps": 500,
    "max_seq_len": 3072, "max_prompt_len": 2048, "load_best_model_at_end": True, "tensor_parallel_degree": 4,
    "sharding": "stage1 offload", "recompute": False, "beta": 0.2, "loss_type": "hinge", "label_smoothing": 0.0,
    "flash_mask": True, "lora": True, "lora_rank": 64, "rslora_plus": True, "expert_parallel_degree": 2,
}  # fmt: skip
Convert = Callable[..., ConvertedRecipe]
