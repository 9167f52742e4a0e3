"""Section `lora` of a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from llmsuite.models.block_quant import BlockFormat
from llmsuite.schema.numbers import Decay, PositiveFloat, PositiveInt, Rank
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class LoraSection(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685), trained instead of the model, in any stage."""

    rank: Rank | None = None
    """Rank of the adapters; null: no adapters, the model itself is trained."""
    method: Literal["lora", "mixer", "dora", "mora", "vera", "lokr"] = "lora"
    """lora: two factors A and B. mixer: with a trained matrix of rank x rank between them (MoSLoRA, Wu et al. 2024,
    arXiv 2406.11909). dora: with a trained length of each column of W + A B (Liu et al. 2024, arXiv 2402.09353).
    mora: a square matrix in place of the factors, with as many parameters and no scale (Jiang et al. 2024, arXiv
    2405.12130). vera: two random factors that are frozen and the same for all matrices, with a trained vector behind
    each of them (Kopiczko et al. 2023, arXiv 2310.11454). lokr: a Kronecker product in place of A B (Yeh et al. 2023,
    arXiv 2309.14859)."""
    init: Literal["default", "pissa", "lora_ga"] = "default"
    """default: A random, B zero. pissa: both begin with the largest singular vectors of W, and what they began with is
    taken off (Meng et al. 2024, arXiv 2404.02948). lora_ga: with those of the gradient of W in the first batches, A
    with the largest and B with the next ones (Wang et al. 2024, arXiv 2407.05000). Both are for method lora."""
    init_batches: PositiveInt = 1
    """With lora_ga: number of global batches, from the first on, whose gradients are summed. The run learns from them
    afterwards as ever."""
    init_passes: PositiveInt = 1
    """With lora_ga: go through these batches so many times, with the gradients of one part of the matrices in memory
    each time. They are float32, as large together as the adapted matrices."""
    init_gamma: PositiveFloat = 64.0
    """With lora_ga: A and B begin as singular vectors times the fourth root of the outputs of W, over the square root
    of this."""
    alpha: PositiveFloat = 16.0
    """The outputs of adapters are multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Probability with which an input of an adapter is zero in a training pass (Srivastava et al. 2014); the frozen
    matrices get all of them. Which ones: a function of the seed, the step, the adapter, and the token with those that
    it sees, so the same on every mesh and for every size of micro-batches."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    target_modules: list[str] | None = None
    """Matrices that get an adapter: patterns that match the name of a module, or its end after a dot, such as "q_proj",
    "layers.0.mlp.*" or "experts.*": routed experts get one each. "embed_tokens" and "lm_head" may have one. Default:
    every matrix of attention and MLP, except the routed experts."""
    lora_plus_ratio: PositiveFloat = 1.0
    """Learning rate of the factor B divided by that of A (LoRA+, Hayou et al. 2024, arXiv 2402.12354)."""
    base_dtype: Literal["nf4", "fp4", "int8"] | None = None
    """Keep the frozen matrices of attention and MLP in 4 or 8 bits, with a scale for each block (QLoRA, Dettmers et al.
    2023, arXiv 2305.14314). null: in engine.precision."""
    base_block: PositiveInt = 64
    """Inputs of a matrix that share a scale, with base_dtype. An even number that divides the inputs of every matrix,
    and under tensor parallel those of each rank."""

    @property
    def base_format(self) -> BlockFormat | None:
        """How the frozen matrices are stored; None for in engine.precision."""
        return None if self.base_dtype is None else BlockFormat(self.base_dtype, self.base_block)

    @property
    def scale(self) -> float:
        """Factor of the outputs of adapters."""
        assert self.rank is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def is_structured(self) -> bool:
        """Whether adapters are no pairs of factors."""
        return self.method in ("mora", "lokr")

    @property
    def num_pairs(self) -> int:
        """Pairs of factors that an adapter multiplies with."""
        if self.is_structured:
            return 0
        return 1 if self.init == "default" else 2

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target_modules == []:
            yield "target_modules", "is empty, so nothing would be trained; name some, or leave it out"
        if self.init != "default" and self.method != "lora":
            yield "init", f"is {self.init}, which is for lora.method lora; set it to default, or lora.method to lora"
        if self.method in ("vera", "lokr") and self.lora_plus_ratio != 1:
            yield "lora_plus_ratio", f"is for a trained factor B, which {self.method} does not have; set it to 1"
        if self.base_block % 2:
            yield "base_block", f"is {self.base_block}; it has to be even, as two codes share a byte"
        yield from self._without_effect()

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if self.rank is None:
            for key in given:
                yield key, "has no effect while rank is null; set that too, or remove it"
            return
        for key in ("alpha", "rslora", "lora_plus_ratio") if self.method == "mora" else ():
            if key in given:
                yield key, "has no effect on lora.method mora, which has neither a scale nor a factor B; remove it"
        for key in ("init_batches", "init_passes", "init_gamma") if self.init != "lora_ga" else ():
            if key in given:
                yield key, f"has no effect with lora.init {self.init}; remove it, or set lora.init to lora_ga"
        if self.base_dtype is None and "base_block" in given:
            yield "base_block", "has no effect while base_dtype is null; set that too, or remove it"
