"""Files of PaddleFormers."""

from __future__ import annotations

from typing import Any

BARE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B", "do_train": True, "train_dataset_path": "train.jsonl", "stage": "SFT",
    "template": "qwen3_nothink",
}  # fmt: skip


SFT: dict[str, Any] = {
    **BARE, "train_dataset_type": "erniekit", "train_dataset_prob": "1.0", "eval_dataset_type": "erniekit",
    "eval_dataset_path": "eval.jsonl", "eval_dataset_prob": "1.0", "max_seq_len": 8192, "packing": True,
    "mix_strategy": "concat", "template_backend": "custom",
    "_attn_implementation": "flashmask", "stage": "SFT", "fine_tuning": "full", "seed": 23, "do_eval": True,
    "per_device_eval_batch_size": 1, "per_device_train_batch_size": 1, "num_train_epochs": 1, "max_steps": -1,
    "eval_steps": 100, "evaluation_strategy": "steps", "save_steps": 50, "save_strategy": "steps", "logging_steps": 1,
    "gradient_accumulation_steps": 4, "logging_dir": "x", "output_dir": "out", "disable_tqdm": True,
    "warmup_steps": 20, "learning_rate": 1e-5, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "sequence_parallel": True, "sharding": "stage1", "recompute_granularity": "full", "recompute_method": "uniform",
    "recompute_num_layers": 1, "bf16": True, "fp16_opt_level": "O2", "unified_checkpoint": False,
    "save_checkpoint_format": "flex_checkpoint", "weight_decay": 0.0, "adam_beta2": 0.999, "save_safetensors": False,
    "moe_router_bias_update_rate": 0.0, "moe_token_dispatcher_type": "deepep", "batch_p2p_comm": True,
    "clear_every_step_cache": True, "use_expert_parallel": True, "expert_model_parallel_size": 4, "split_param": True,
    "tp_sync_param": True, "loss_subbatch_sequence_length": 8192, "use_fused_head_and_loss_fn": True,
}  # fmt: skip
DPO = {**SFT, "stage": "DPO", "packing": False, "loss_type": "sigmoid", "reference_free": False}
