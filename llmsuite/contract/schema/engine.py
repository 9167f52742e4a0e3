"""The recipe section `engine` and the rules between its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from llmsuite.contract.schema.numbers import PositiveInt
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.contract.schema.section import Section


def _recompute_every(engine: EngineSection) -> Iterator[Violation]:
    if engine.recompute != "full":
        yield "recompute_every", f"is {engine.recompute_every}, but recompute is {engine.recompute}; choose full, or 1"


def _program_without_mode(engine: EngineSection) -> Iterator[Violation]:
    if engine.mode == "dynamic":
        yield "program", "is step, but mode is dynamic, which compiles nothing; set mode to to_static"


def _passes_without_a_step(engine: EngineSection) -> Iterator[Violation]:
    if not engine.compiles_steps:
        yield (
            "fused_passes",
            "is set, but only compiled training steps use it; remove it, or set mode to to_static and program to step",
        )


def _passes_once(engine: EngineSection) -> Iterator[Violation]:
    repeated = [name for i, name in enumerate(engine.fused_passes) if name in engine.fused_passes[:i]]
    if repeated:
        yield "fused_passes", f"has {repeated[0]!r} twice; once is enough"


def _selective_in_layers(engine: EngineSection) -> Iterator[Violation]:
    if engine.recompute == "selective" and engine.compiles_layers:
        yield (
            "recompute",
            "is selective, but to_static compiles full layers; choose full or none, engine.program step, or "
            "engine.mode dynamic",
        )


_UNUSED = (
    Rule(
        "`recompute_every` without `recompute: full`",
        "it would change nothing",
        ("--engine.recompute=none", "--engine.recompute_every=2"),
        _recompute_every,
    ),
    Rule(
        "`program: step` without `mode: to_static`",
        "it would change nothing",
        ("--engine.mode=dynamic", "--engine.program=step"),
        _program_without_mode,
    ),
    Rule(
        "`fused_passes` without `program: step`",
        "it would change nothing",
        ("--engine.mode=dynamic", '--engine.fused_passes=["eliminate_transpose"]'),
        _passes_without_a_step,
    ),
)
"""Rules that yield the keys without effect, whatever their own values are."""
_RULES = (
    Rule(
        "a pass twice in `fused_passes`",
        "it would change nothing",
        (
            "--engine.mode=to_static",
            "--engine.program=step",
            '--engine.fused_passes=["eliminate_transpose","eliminate_transpose"]',
        ),
        _passes_once,
    ),
    Rule(
        "`recompute: selective` with `to_static` and `program: layers`",
        "each layer is compiled as one program",
        ("--engine.recompute=selective", "--engine.mode=to_static"),
        _selective_in_layers,
    ),
)
ENGINE_RULES = (*_UNUSED, *_RULES)
"""Rules between keys of section `engine`."""


@dataclasses.dataclass(kw_only=True)
class EngineSection(Section):
    """Execution of a training step: compilation, precision, recomputation and memory."""

    mode: Literal["dynamic", "to_static"] = "dynamic"
    """dynamic: eager execution. to_static: compiled programs, at the granularity of `program`; batches are then padded
    to a multiple of 64 tokens."""
    program: Literal["layers", "step"] = "layers"
    """Granularity of compilation with `to_static`. layers: one program per decoder layer, forward and backward. step:
    one program for the full training step (forward, loss, backward, gradient reduction, clipping and optimizer), built
    by Paddle's auto-parallel; features that such a program does not support are rejected."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of parameters and activations. bf16 and fp16 keep float32 master weights and accumulate gradients in
    float32, unless train.master_weights is false. fp16 needs a GPU or XPU, uses dynamic loss scaling and skips steps
    that overflow. On cpu, bf16 is a mixed-precision policy: the inputs of matrix products, in rollouts too, and the
    activations inside an MLP or an attention block are bfloat16; parameters and everything else stay float32."""
    fused_passes: list[str] = dataclasses.field(default_factory=list)
    """With `program: step`, Paddle's graph passes to apply to the program, in this order, by their names in Paddle,
    such as "fused_gemm_epilogue_pass" or "fused_linear_param_grad_add_pass" on gpu. Their effect on speed and numerics
    depends on Paddle."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass instead of keeping them. full: all activations of a layer.
    selective: those of core attention, between queries, keys, values and the output (a fused attention kernel
    recomputes them in any case)."""
    recompute_every: PositiveInt = 1
    """With recompute "full": 1 to recompute every layer, n to recompute every n-th layer."""
    loss_chunk_tokens: PositiveInt | None = None
    """Compute the loss for this many tokens at a time, so that only their logits are in memory: with a vocabulary of
    150,000 the logits of 4096 tokens take 2.5 GB in float32. They are recomputed in the backward pass where the head
    is trained; not with adapters that leave the head frozen. null: all tokens of a micro-batch in one chunk."""

    offload_optimizer: bool = False
    """Keep optimizer moments and master weights in host memory; those of each parameter are on the device only during
    its update."""

    deterministic: bool = False
    """On gpu, accumulate the gradients of attention and of the embedding in a fixed order, at some cost in speed.
    Without it, a resumed run differs from an uninterrupted one in the last digits. The cpu is always deterministic;
    xpu rejects this key."""

    @property
    def compiles_layers(self) -> bool:
        """True where each decoder layer is compiled as a program."""
        return (self.mode, self.program) == ("to_static", "layers")

    @property
    def compiles_steps(self) -> bool:
        """True where the full training step is compiled as one program."""
        return (self.mode, self.program) == ("to_static", "step")

    def recomputes_layer(self, layer: int) -> bool:
        """Return True where all activations of a layer are recomputed."""
        return self.recompute == "full" and layer % self.recompute_every == 0

    def problems(self) -> Iterator[tuple[str, str]]:
        for rule in _RULES:
            yield from rule.check(self)

    def unused(self) -> Iterator[tuple[str, str]]:
        for rule in _UNUSED:
            yield from rule.check(self)
