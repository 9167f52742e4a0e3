"""Arguments of PaddleNLP that have no key here, and why."""

from __future__ import annotations

import fnmatch

_KERNELS = "the device backend chooses its fused kernels"
_MATRICES = "matrices stay apart; `llmsuite convert --layout paddlenlp --fused` writes fused ones"
_ALWAYS = "it is always so"
_OVERLAP = "the engine decides what is overlapped and fused"
_ACCUMULATED = "evaluation keeps sums only, so nothing piles up"
_PRINTED = "metrics go to the terminal and to metrics.jsonl"
_ADAPTERS = "of adapters there is LoRA: section lora"
_ONE_MODEL = "names no choice here: model.family and model.config say it"
_GENERATION = "generation is a command of its own: llmsuite generate"
_QUANTISED = "weights are trained in bf16, fp16 or fp32"

WITHOUT = {
    "do_train": "a recipe trains",
    "do_predict": _GENERATION,
    "do_export": "exporting is a command of its own: llmsuite convert, llmsuite merge",
    "use_flash_attention": _KERNELS,
    "flash_mask": _KERNELS,
    "use_fused_*": _KERNELS,
    "use_fast_layer_norm": _KERNELS,
    "fused_linear*": _KERNELS,
    "enable_linear_fused_grad_add": _KERNELS,
    "fuse_attention_*": _MATRICES,
    "fuse_sequence_parallel_allreduce": _OVERLAP,
    "*_parallel_config": _OVERLAP,
    "unified_checkpoint*": "every checkpoint is one, whatever the strategy",
    "amp_master_grad": "gradients are always added up in float32",
    "amp_custom_*": "the device backend decides which ops run in 16 bits",
    "scale_loss": "with fp16 the loss is scaled dynamically, from 1024",
    "enable_auto_parallel": _ALWAYS,
    "use_intermediate_api": _ALWAYS,
    "auto_parallel_resume_form_hybrid_parallel": "a checkpoint goes on with any strategy",
    "ignore_load_lr_and_optim": "a resumed run goes on exactly; to start afresh, give the checkpoint as model.weights",
    "ignore_save_lr_and_optim": "checkpoints hold the optimizer, so that a run can go on",
    "save_sharded_model": "every checkpoint is whole, written by all ranks",
    "load_sharded_model": "every checkpoint is whole, read by slices",
    "resume_from_checkpoint": "add --resume to llmsuite run",
    "overwrite_output_dir": "an output directory with checkpoints is resumed or refused",
    "distributed_dataloader": "each data rank reads its own samples",
    "dataloader_drop_last": "an epoch's last batch goes on with the next epoch",
    "data_impl": "corpora are mapped from disk",
    "data_cache": "the cache is that of LLMSUITE_CACHE",
    "disable_tqdm": _PRINTED,
    "logging_*": _PRINTED,
    "logging_dir": _PRINTED,
    "run_name": _PRINTED,
    "skip_profile_timer": _PRINTED,
    "skip_memory_metrics": _PRINTED,
    "per_device_eval_batch_size": "evaluation takes train.micro_batch_size samples at a time",
    "eval_accumulation_steps": _ACCUMULATED,
    "recompute_use_reentrant": "recomputation needs no choice of how",
    "pp_recompute_interval": "nearest key: engine.recompute_every",
    "no_recompute_layers": "nearest key: engine.recompute_every",
    "recompute_offload": "activations stay on the device; nearest key: engine.recompute",
    "model_type": _ONE_MODEL,
    "moe_group": "experts are shared over the data axes: parallel.expert_parallel_degree",
    "use_expert_parallel": "parallel.expert_parallel_degree above 1 says so",
    "using_flex_token": "ranks send each token to its experts",
    "using_fake_gate": "it is for benchmarks: tokens go where the gate sends them",
    "moe_subbatch_token_num": "experts take the tokens of a micro-batch at once; nearest key: train.micro_batch_tokens",
    "pre_alloc_memory": "Paddle's allocator has FLAGS_initial_gpu_memory_in_mb",
    "tensor_parallel_output": "logits stay cut over tensor parallel ranks",
    "sep_parallel_degree": "there is no axis that cuts the context; nearest key: parallel.sequence_parallel",
    "context_parallel_degree": "there is no axis that cuts the context; nearest key: parallel.sequence_parallel",
    "src_length": "a prompt has no limit of its own: both parts share data.max_length",
    "max_prompt_len": "a prompt has no limit of its own: both parts share data.max_length",
    "eval_with_do_generation": _GENERATION,
    "save_generation_output": _GENERATION,
    "greedy_zero_padding": "nearest key: data.packing",
    "lazy": "rows are read as they are needed",
    "benchmark": "every step is timed: metrics.jsonl",
    "autotuner_benchmark": "every step is timed: metrics.jsonl",
    "decay_steps": "the learning rate comes down until the last step",
    "pissa": _ADAPTERS,
    "vera*": _ADAPTERS,
    "lokr*": _ADAPTERS,
    "use_mora": _ADAPTERS,
    "lora_use_mixer": _ADAPTERS,
    "reft": _ADAPTERS,
    "prefix_*": _ADAPTERS,
    "use_quick_lora": "adapters have one form",
    "lora_path": "nearest key: model.weights, after `llmsuite merge` of adapter and model",
    "neftune*": "embeddings are trained without noise",
    "weight_quantize_algo": _QUANTISED,
    "do_ptq": _QUANTISED,
    "do_gptq": _QUANTISED,
    "hidden_dropout_prob": "models are trained without dropout",
    "attention_probs_dropout_prob": "models are trained without dropout",
    "reference_free": "nearest key: dpo.reference, or dpo.loss simpo or orpo",
    "ref_model_update_steps": "the reference is the initial model",
    "pref_loss_ratio": "the preference loss has weight 1; nearest key: dpo.sft_weight",
    "greater_is_better": "nearest key: checkpoint.best_is",
    "regularization": "nearest key: rm.center_rewards",
    "normalize*": "scores of a reward model are not normalised; nearest key: rm.center_rewards",
    "from_aistudio": "weights are a directory: llmsuite import",
    "*aistudio*": "uploading is up to you",
}
"""Patterns of `fnmatch` over names; the first that fits counts."""


def reason(key: str) -> str | None:
    """Why an argument has no key; None when it is not known."""
    return next((text for pattern, text in WITHOUT.items() if fnmatch.fnmatchcase(key, pattern)), None)
