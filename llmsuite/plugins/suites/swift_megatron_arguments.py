"""Arguments of ms-swift's `megatron` commands that no recipe can express, that are ignored, and the keys that the
others become. Those of data, models and losses are as in `swift`."""

from __future__ import annotations

from collections.abc import Mapping

from llmsuite.plugins.suites import swift_arguments
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.conversion.refuse import Refusal

_WEIGHTS = Refusal("weights are those of `model`: model.weights")
_STATES = Refusal("optimizer states and main gradients are float32", lambda value: value not in (None, "fp32"))
_BALANCE = "is a load-balancing loss over the micro-batch; nearest key: train.expert_balance_loss"
_SCHEDULE = Refusal("train.lr_schedule has constant, linear, cosine and wsd")
_FUSED = "the engine decides what is overlapped and fused"

REFUSED: Mapping[str, Refusal] = {
    "mcore_*": _WEIGHTS,
    "perform_initialization": _WEIGHTS,
    "finetune": Refusal("continues a run of Megatron; add --resume to llmsuite run", lambda value: not is_on(value)),
    "bridge_backend": Refusal(
        "weights are read as the family has them", lambda value: value not in (None, "mcore-bridge")
    ),
    "calculate_per_token_loss": Refusal(
        "the loss is averaged over the tokens of the global batch", lambda value: not is_on(value)
    ),
    "reference_free": Refusal("the reference is the initial model"),
    "f_divergence_type": Refusal("the divergence is reverse_kl", lambda value: value not in (None, "reverse_kl")),
    "calculate_KL": Refusal("the KL divergence is estimated for the loss kto", lambda value: not is_on(value)),
    "main_grads_dtype": _STATES,
    "main_params_dtype": _STATES,
    "exp_avg_dtype": _STATES,
    "exp_avg_sq_dtype": _STATES,
    "lr_warmup_init": Refusal("the warm-up begins at 0"),
    "lr_wsd_*": _SCHEDULE,
    "weight_decay_incr_style": Refusal("train.weight_decay is a number", lambda value: value not in (None, "constant")),
    "start_weight_decay": Refusal("train.weight_decay is a number"),
    "end_weight_decay": Refusal("train.weight_decay is a number"),
    "apply_wd_to_qk_layernorm": Refusal("norms have no weight decay"),
    "fp8_*": Refusal("engine.precision has fp32, bf16 and fp16"),
    "fp4_*": Refusal("engine.precision has fp32, bf16 and fp16"),
    "moe_aux_loss_coeff": Refusal(_BALANCE),
    "moe_z_loss_coeff": Refusal("the router has no z-loss"),
    "moe_expert_capacity_factor": Refusal("experts take all tokens that are routed to them"),
    "moe_pad_expert_input_to_capacity": Refusal("experts take all tokens that are routed to them"),
    "mtp_*": Refusal("nearest key: train.mtp_loss_weight"),
    "megatron_extra_kwargs": Refusal("are settings of Megatron's model"),
    "language_model_only": Refusal("models read text"),
    "data_parallel_random_init": Refusal("all data ranks begin with the same weights"),
    "data_sharding": Refusal("rows are shuffled over all data ranks"),
    "mrl_dims": Refusal("only language models are supported"),
    "use_megatron_fsdp": Refusal("nearest key: parallel.sharding"),
    **swift_arguments.REFUSED,
}
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "masked_softmax_fusion",
            "bias_dropout_fusion",
            "bias_activation_fusion",
            "apply_rope_fusion",
            "gradient_accumulation_fusion",
            "cross_entropy_loss_fusion",
            "cross_entropy_fusion_impl",
            "overlap_*",
            "batch_p2p_comm",
            "align_*",
            "tp_comm_overlap",
            "nccl_comm_warmup",
            "moe_grouped_gemm",
            "moe_permute_fusion",
            "moe_shared_expert_overlap",
            "moe_token_dispatcher_type",
            "moe_enable_deepep",
            "moe_layer_recompute",
            "microbatch_group_size_per_vp_stage",
            "te_rng_tracker",
            "manual_gc*",
            "optimizer_cuda_graph",
            "accumulate_allreduce_grads_in_fp32",
        ),
        _FUSED,
    ),
    "attention_backend": "the device backend chooses its fused kernels",
    "attention_softmax_in_fp32": "the softmax of attention is computed in float32",
    "apply_query_key_layer_scaling": "scores are scaled once, in float32",
    "moe_router_dtype": "the router is computed in float32",
    "moe_router_load_balancing_type": "belongs to moe_aux_loss_coeff",
    "moe_token_drop_policy": "belongs to moe_expert_capacity_factor",
    "recompute_*": "nearest key: engine.recompute",
    "use_precision_aware_optimizer": "optimizer states are float32",
    "optimizer_offload_fraction": "nearest key: engine.offload_optimizer",
    "main_*": "optimizer states are float32",
    "exp_avg_*": "optimizer states are float32",
    "context_parallel_size": "sequences are not split over ranks, which needs more memory",
    "cp_*": "sequences are not split over ranks",
    "sequence_packing_scheduler": "sequences are not split over ranks",
    "expert_tensor_parallel_size": "nearest key: parallel.expert_parallel_degree",
    "virtual_pipeline_model_parallel_size": "nearest key: parallel.pipeline_schedule",
    "decoder_*_pipeline_num_layers": "nearest key: section parallel",
    "account_for_*_in_pipeline_split": "nearest key: section parallel",
    "pipeline_model_parallel_layout": "nearest key: section parallel",
    "no_save_*": "checkpoints contain the optimizer state, for resuming",
    "no_load_*": "the model begins as its weights are",
    "finetune": "the model begins as its weights are",
    "bridge_backend": "weights are read as the family has them",
    "use_cpu_initialization": "tensors are read in slices",
    "save_missing_weights": "checkpoints are safetensors",
    "async_save": "checkpoints are written while training continues",
    "use_persistent_ckpt_worker": "checkpoints are written while training continues",
    "dist_*": "checkpoints are safetensors",
    "distrib_*": "checkpoints are safetensors",
    "mlp_padding_free": "the engine packs a micro-batch without padding where it can",
    "calculate_per_token_loss": "the loss is averaged over the tokens of the global batch",
    "calculate_KL": "the KL divergence is estimated for the loss kto",
    "f_divergence_type": "the divergence is reverse_kl",
    "weight_decay_incr_style": "the weight decay is constant",
    "eval_iters": "evaluation takes all rows",
    "tensorboard_*": "nearest key: loggers",
    "wandb_*": "nearest key: loggers",
    **swift_arguments.IGNORED,
}
TRANSLATIONS: Mapping[str, str] = {
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "train_iters": "train.max_steps",
    "lr": "train.learning_rate",
    "min_lr": "train.min_lr_ratio",
    "lr_decay_style": "train.lr_schedule",
    "lr_decay_iters": "train.lr_schedule",
    "lr_warmup_*": "train.warmup_steps or train.warmup_ratio, with train.warmup_from_zero",
    "clip_grad": "train.max_grad_norm",
    "adam_eps": "train.adam_epsilon",
    "optimizer": "train.optimizer",
    "*_parallel_size": "section parallel",
    "sequence_parallel": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.sharding",
    "recompute_granularity": "engine.recompute",
    "optimizer_cpu_offload": "engine.offload_optimizer",
    **swift_arguments.TRANSLATIONS,
}
