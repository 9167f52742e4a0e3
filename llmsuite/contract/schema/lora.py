"""The recipe section `lora`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from llmsuite.contract.schema.numbers import Decay, PositiveFloat, PositiveInt, Rank
from llmsuite.contract.schema.section import Section, keys_except
from llmsuite.models.adapter_method import METHODS, AdapterConfig, AdapterMethod, find_method
from llmsuite.models.block_quant import LLM_INT8, BlockFormat


@dataclasses.dataclass(kw_only=True)
class LoraSection(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): in any stage, train adapters and freeze the model."""

    rank: Rank | None = None
    """Rank of the adapters. null: no adapters; the model itself is trained."""
    method: Literal["lora", "dora"] = "lora"
    """Structure of an adapter. lora: two factors, A and B. dora: a trained magnitude for each column of W + A B (Liu et
    al. 2024, arXiv 2402.09353). Plugins have others, that of llmsuite these: mixer: a trained rank x rank matrix
    between A and B (MoSLoRA, Wu et al. 2024, arXiv 2406.11909). mora: a square matrix instead of A and B, with as many
    parameters and no scaling (Jiang et al. 2024, arXiv 2405.12130). vera: frozen random A and B, shared by all
    matrices, each followed by a trained vector (Kopiczko et al. 2023, arXiv 2310.11454). lokr: a Kronecker product
    instead of A B (Yeh et al. 2023, arXiv 2309.14859)."""
    init: Literal["default", "pissa", "olora", "lora_ga"] = "default"
    """Initialisation of A and B. default: A random, B zero. pissa: the principal singular vectors of W, with the
    initial A B subtracted from W (Meng et al. 2024, arXiv 2404.02948). olora: factors of a QR decomposition of W, with
    the initial A B subtracted from W (Büyükakyüz 2024, arXiv 2406.01775). lora_ga: singular vectors of the gradient of
    W over the first batches, the largest for A and the next ones for B, with the initial A B subtracted from W (Wang et
    al. 2024, arXiv 2407.05000). pissa, olora and lora_ga need method lora."""
    init_batches: PositiveInt = 1
    """With lora_ga: number of global batches, from the first on, whose gradients are summed for the initialisation. The
    run then trains on these batches as usual."""
    init_passes: PositiveInt = 1
    """With lora_ga: number of passes over these batches. Each pass holds the gradients of only a part of the adapted
    matrices in memory; all of them, in float32, have as many elements as the adapted matrices."""
    init_gamma: PositiveFloat = 64.0
    """With lora_ga: A and B are initialised as singular vectors times (output dimension of W) ** 0.25 / sqrt(gamma)."""
    alpha: PositiveFloat = 16.0
    """Scaling: the output of an adapter is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout probability of the inputs of adapters in training (Srivastava et al. 2014); the inputs of the frozen
    matrices are not dropped. The mask is a function of the seed, the step, the adapter, and the token with its context:
    it does not depend on the mesh or the micro-batch size."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    share_first: bool = False
    """One factor A for all matrices of one input: for q_proj, k_proj and v_proj, and for gate_proj and up_proj. So are
    adapters where these are one matrix, as in Megatron-LM and PaddleFormers. The files of the adapters have a copy of A
    for each matrix. It needs method lora with init default."""
    init_shards: PositiveInt = 1
    """With method lora and init default: start A of matrices that tensor parallelism cuts along their inputs (o_proj
    and down_proj) as this many matrices, each with the variance for its own inputs, so that A has this many times the
    variance. Megatron-LM and PaddleFormers start so with that tensor parallel degree. It is no degree of this run."""
    target_modules: list[str] | None = None
    """Matrices that get an adapter: patterns that match a module name, or its end after a dot, such as "q_proj",
    "layers.0.mlp.*" or "experts.*" (one adapter for each routed expert). "embed_tokens" and "lm_head" are allowed.
    Default: every matrix of attention and MLP, except the routed experts."""
    modules_to_save: list[str] | None = None
    """Modules that are trained in full next to the adapters, and saved with them: "embed_tokens" and "lm_head". null:
    none."""
    ensure_weight_tying: bool = False
    """With modules_to_save, where embedding and head are one matrix (`tie_word_embeddings`): train this matrix, so that
    they stay one. false: such a model is refused. It has no effect on a model with two matrices."""
    lora_plus_ratio: PositiveFloat = 1.0
    """Learning rate of B divided by that of A (LoRA+, Hayou et al. 2024, arXiv 2402.12354)."""
    base_dtype: Literal["nf4", "fp4", "int8", "llm_int8"] | None = None
    """Quantise the frozen matrices of attention and MLP to 4 or 8 bits, with one scale per block (QLoRA, Dettmers et
    al. 2023, arXiv 2305.14314). llm_int8: one scale for each output, and inputs in 8 bits too, except columns with
    outliers (LLM.int8, Dettmers et al. 2022, arXiv 2208.07339; load_in_8bit of bitsandbytes). null: keep them in
    engine.precision."""
    base_block: PositiveInt = 64
    """With base_dtype nf4, fp4 or int8: number of input dimensions of a matrix that share a scale. An even number that
    divides the input dimension of every quantised matrix; with tensor parallelism, of its shard on each rank."""

    base_double_quant: bool = False
    """With base_dtype nf4 or fp4: quantise the scales too (QLoRA, section 3: double quantisation): to 8 bits, with one
    scale for 256 of them."""

    @property
    def base_format(self) -> BlockFormat | None:
        """Quantisation format of the frozen matrices; None where they are kept in engine.precision."""
        if self.base_dtype is None:
            return None
        if self.base_dtype == LLM_INT8:
            return BlockFormat(LLM_INT8, 0)
        return BlockFormat(self.base_dtype, self.base_block, self.base_double_quant)

    @property
    def adapter_method(self) -> AdapterMethod:
        """Method of the adapters, by `method` and `init`."""
        return find_method(self.method, self.init)

    @property
    def adapter_config(self) -> AdapterConfig:
        """Method, rank and scale of the adapters; for a section that sets a rank."""
        assert self.rank is not None
        return AdapterConfig(
            self.adapter_method,
            self.rank,
            self.alpha,
            self.dropout,
            self.rslora,
            self.lora_plus_ratio,
            self.share_first,
            self.init_shards,
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target_modules == []:
            yield "target_modules", "is empty, so nothing would be trained; name modules, or remove it"
        if self.modules_to_save == []:
            yield "modules_to_save", "is empty; name modules, or remove it"
        if self.init != "default" and self.method != "lora":
            yield "init", f"is {self.init}, which needs lora.method lora; set it to default, or lora.method to lora"
        if (self.method, self.init) != ("lora", "default"):
            needed = "which needs lora.method lora and lora.init default; set these, or remove it"
            if self.share_first:
                yield "share_first", f"is true, {needed}"
            if self.init_shards != 1:
                yield "init_shards", f"is {self.init_shards}, {needed}"
        if self.base_block % 2:
            yield "base_block", f"is {self.base_block}; it has to be even, because two 4-bit values share a byte"
        if self.base_double_quant and self.base_dtype in ("int8", LLM_INT8):
            message = f"is true, but base_dtype is {self.base_dtype}; set that to nf4 or fp4, or this to false"
            yield "base_double_quant", message

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.rank is None:
            for key in keys_except(self, "rank"):
                yield key, "has no effect while rank is null; set that too, or remove it"
            return
        yield from METHODS[self.method].refused_keys.items()
        if self.modules_to_save is None:
            yield "ensure_weight_tying", "has no effect while modules_to_save is null; set that too, or remove it"
        if self.init != "lora_ga":
            for key in ("init_batches", "init_passes", "init_gamma"):
                yield key, f"has no effect with lora.init {self.init}; remove it, or set lora.init to lora_ga"
        if self.base_dtype is None:
            for key in ("base_block", "base_double_quant"):
                yield key, "has no effect while base_dtype is null; set that too, or remove it"
        elif self.base_dtype == LLM_INT8:
            yield "base_block", "has no effect with base_dtype llm_int8, whose blocks are all inputs; remove it"
