"""Words of recipes for adapters and for meshes."""

from __future__ import annotations

STEM = "adapter_model"
TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}
SP = {"sequence_parallel": True}
INTERLEAVED = {**PP, "pipeline_schedule": "interleaved"}
STATIC = "--engine.mode=to_static"
RECOMPUTE = "--engine.recompute=full"
ADAMW = {"optimizer": "adamw"}
TIED = {"run": ("--model.config.tie_word_embeddings=true",)}
# of which the first part of a pipeline has none
SOME = {"run": ('--lora.target_modules=["layers.2.*", "layers.3.mlp.up_proj"]', "--lora.rslora=true")}


# packed rows: which documents are in a row depends on nothing but the data, but where a row is in a batch does
DROPOUT = {"run": ("--lora.dropout=0.25", "--data.packing=best_fit")}
PREFERENCE = {"stage": "dpo"}
# with a norm that is clipped, and one mask for the matrices that share A
SHARED = {
    **ADAMW,
    "run": ("--lora.share_first=true", "--lora.dropout=0.25", "--train.max_grad_norm=0.1"),
}
EP = {"expert_parallel_degree": 2}
# routed experts, and one matrix of shared and dense ones
EXPERTS = {**ADAMW, "family": "deepseek", "run": ('--lora.target_modules=["experts.*", "o_proj", "down_proj"]',)}
# all experts are quantised, and get adapters
NF4_EXPERTS = {
    **ADAMW,
    "family": "deepseek",
    "run": ("--lora.base_dtype=nf4", "--lora.base_block=8", *EXPERTS["run"]),  # type: ignore[misc]
}
ENDS = {**ADAMW, "run": ('--lora.target_modules=["embed_tokens", "lm_head", "layers.2.*"]',)}
# matrices with adapters and without, of row- and column-parallel ones
NF4 = {
    "run": ("--lora.base_dtype=nf4", "--lora.base_block=16", '--lora.target_modules=["q_proj", "o_proj", "up_proj"]')
}
# of one micro-batch, whose outliers they depend on
INT8 = {"run": ("--lora.base_dtype=llm_int8", "--train.micro_batch_size=1")}
# in blocks so small that a matrix has several blocks of scales
DOUBLED = {
    "run": (
        *("--lora.base_dtype=nf4", "--lora.base_block=2", "--lora.base_double_quant=true"),
        '--lora.target_modules=["q_proj", "o_proj", "up_proj"]',
    )
}
DOUBLED_EXPERTS = {**NF4_EXPERTS, "run": (*NF4_EXPERTS["run"], "--lora.base_double_quant=true")}  # type: ignore[misc]
