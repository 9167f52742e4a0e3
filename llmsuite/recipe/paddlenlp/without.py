"""Arguments of PaddleNLP that have no key here, and why."""

from __future__ import annotations

import fnmatch

_KERNELS = "the device backend chooses its fused kernels"
_MATRICES = "matrices stay apart, see parallel.fuse_projections; `convert --layout paddlenlp --fused` writes fused ones"
_OVERLAP = "the engine decides what is overlapped and fused"
_ACCUMULATED = "evaluation keeps sums only, so nothing piles up"
_PRINTED = "metrics go to the terminal and to metrics.jsonl"
_ONE_MODEL = "names no choice here: model.family and model.config say it"
_GENERATION = "generation is a command of its own: llmsuite generate"

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
    "enable_auto_parallel": "names PaddleNLP's trainer; section parallel has the strategy, engine.mode how it runs",
    "parallel_mode": "section parallel has the strategy",
    "use_intermediate_api": "models are cut by the table of their family",
    "virtual_pipeline_seg_method": "layers are split evenly; nearest key: parallel.pipeline_cut",
    "auto_parallel_resume_form_hybrid_parallel": "a checkpoint goes on with any strategy",
    "ignore_load_lr_and_optim": "a resumed run goes on exactly; to start afresh, give the checkpoint as model.weights",
    "ignore_save_lr_and_optim": "checkpoints hold the optimizer, so that a run can go on",
    "save_sharded_model": "every checkpoint is whole, written by all ranks",
    "load_sharded_model": "every checkpoint is whole, read by slices",
    "resume_from_checkpoint": "add --resume to llmsuite run",
    "overwrite_output_dir": "an output directory with checkpoints is resumed or refused",
    "distributed_dataloader": "each data rank reads its own samples",
    "data_impl": "corpora are mapped from disk",
    "skip_warmup": "corpora are mapped from disk",
    "share_folder": "machines without a shared directory read their own files",
    "pad_to_*": "what a batch is padded with is never learnt",
    "data_cache": "the cache is that of LLMSUITE_CACHE",
    "disable_tqdm": _PRINTED,
    "logging_*": _PRINTED,
    "logging_dir": _PRINTED,
    "run_name": _PRINTED,
    "skip_profile_timer": _PRINTED,
    "skip_memory_metrics": _PRINTED,
    "eval_accumulation_steps": _ACCUMULATED,
    "recompute_use_reentrant": "recomputation needs no choice of how",
    "pp_recompute_interval": "nearest key: engine.recompute_every",
    "no_recompute_layers": "nearest key: engine.recompute_every",
    "recompute_offload": "activations stay on the device; nearest key: engine.recompute",
    "model_type": _ONE_MODEL,
    "remove_unused_columns": "keys of a row that its format does not know are not read",
    "release_grads": "gradients are released after each step",
    "return_position_ids": "positions are counted, from 0 in each row",
    "offload_level": "nearest key: engine.offload_optimizer",
    "sharding_comm_*": _OVERLAP,
    "moe_group": "experts are shared over the data axes: parallel.expert_parallel_degree",
    "use_expert_parallel": "parallel.expert_parallel_degree above 1 says so",
    "using_flex_token": "ranks send each token to its experts",
    "moe_subbatch_token_num": "experts take the tokens of a micro-batch at once; nearest key: train.micro_batch_tokens",
    "pre_alloc_memory": "Paddle's allocator has FLAGS_initial_gpu_memory_in_mb",
    "tensor_parallel_output": "logits stay cut over tensor parallel ranks",
    "sep_parallel_degree": "there is no axis that cuts the context; nearest key: parallel.sequence_parallel",
    "context_parallel_degree": "there is no axis that cuts the context; nearest key: parallel.sequence_parallel",
    "src_length": "a prompt has no limit of its own: both parts share data.max_length",
    "max_prompt_len": "a prompt has no limit of its own: both parts share data.max_length",
    "eval_with_do_generation": "there is nothing to evaluate, or the stage is not sft; nearest key: "
    "generation.max_new_tokens",
    "save_generation_output": "belongs to eval_with_do_generation",
    "top_k": "belongs to eval_with_do_generation",
    "top_p": "belongs to eval_with_do_generation",
    "greedy_zero_padding": "nearest key: data.packing",
    "lazy": "rows are read as they are needed",
    "benchmark": "every step is timed: metrics.jsonl",
    "lokr_*": "belongs to lokr",
    "vera_*": "belongs to vera",
    "loraga_*": "belongs to loraga",
    "prefix_*": "belongs to prefix_tuning",
    "num_prefix_tokens": "belongs to prefix_tuning",
    "intervention_type": "belongs to reft",
    "neftune_*": "belongs to neftune",
    "normalizer_*": "belongs to normalize_score_during_training",
    "use_quick_lora": "adapters have one form",
    "greater_is_better": "nearest key: checkpoint.best_is",
    "normalize*": "scores of a reward model are not normalised; nearest key: rm.center_rewards",
    "from_aistudio": "weights are a directory: llmsuite import",
    "*aistudio*": "uploading is up to you",
}
"""Patterns of `fnmatch` over names; the first that fits counts."""


def reason(key: str) -> str | None:
    """Why an argument has no key; None when it is not known."""
    return next((text for pattern, text in WITHOUT.items() if fnmatch.fnmatchcase(key, pattern)), None)
