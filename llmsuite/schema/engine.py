"""The section `engine` and the rules between its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.rule import Rule, Violation
from llmsuite.schema.section import Section


def _recompute_every(engine: EngineSection) -> Iterator[Violation]:
    if engine.recompute_every > 1 and engine.recompute != "full":
        yield "recompute_every", f"is {engine.recompute_every}, but recompute is {engine.recompute}; choose full, or 1"


def _program_without_mode(engine: EngineSection) -> Iterator[Violation]:
    if engine.program == "step" and engine.mode == "dynamic":
        yield "program", "is step, but mode is dynamic, which compiles nothing; set mode to to_static"


def _passes_without_a_step(engine: EngineSection) -> Iterator[Violation]:
    if engine.fused_passes and not engine.compiles_steps:
        yield (
            "fused_passes",
            "is given, but only programs of whole steps take it; leave it out, or set mode to to_static and program to "
            "step",
        )


def _passes_once(engine: EngineSection) -> Iterator[Violation]:
    twice = [name for i, name in enumerate(engine.fused_passes) if name in engine.fused_passes[:i]]
    if twice:
        yield "fused_passes", f"has {twice[0]!r} twice; once is enough"


def _selective_in_layers(engine: EngineSection) -> Iterator[Violation]:
    if engine.recompute == "selective" and engine.compiles_layers:
        yield (
            "recompute",
            "is selective, but to_static compiles whole layers; choose full or none, engine.program step, or "
            "engine.mode dynamic",
        )


ENGINE_RULES = (
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
        "a layer is compiled whole",
        ("--engine.recompute=selective", "--engine.mode=to_static"),
        _selective_in_layers,
    ),
)
"""Rules between keys of the section `engine`."""


@dataclasses.dataclass(kw_only=True)
class EngineSection(Section):
    """How a step is computed."""

    mode: Literal["dynamic", "to_static"] = "dynamic"
    """dynamic: op by op. to_static: by compiled programs, see `program`; batches are then padded to a multiple of 64
    tokens."""
    program: Literal["layers", "step"] = "layers"
    """What a program of `to_static` has. layers: the forward and backward pass of a decoder layer. step: the whole
    training step, with loss, gradients, their sum, clipping and optimizer, by Paddle's auto-parallel; what it does not
    have yet is refused."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of parameters and activations. bf16 and fp16 keep float32 master weights and sum gradients in float32.
    fp16 needs a GPU or XPU, scales the loss dynamically and skips steps that overflow. On the cpu, bf16 is another
    policy: the inputs of matrix products are rounded to bfloat16, in rollouts too, what lies between those of an MLP
    or an attention is bfloat16, and parameters and all else stay float32."""
    fused_passes: list[str] = dataclasses.field(default_factory=list)
    """With `program: step`, passes of Paddle's that change the program, in this order, by the names that Paddle has for
    them, such as "fused_gemm_epilogue_pass" or "fused_linear_param_grad_add_pass" on a gpu. What they do to speed and
    numbers is up to Paddle."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass instead of keeping them. full: whole layers. selective: the core
    of attention, between queries, keys, values and its output (a fused attention kernel does so by itself)."""
    recompute_every: PositiveInt = 1
    """With recompute "full": 1 to recompute all layers, n for every n-th one."""
    loss_chunk_tokens: PositiveInt | None = None
    """Compute the loss for so many tokens at a time, so that only their logits exist: with a vocabulary of 150,000
    those of 4096 tokens are 2.5 GB in float32. Where the head is trained, they are made again in the backward pass;
    under adapters that leave it as it is, they are not. null: all tokens of a micro-batch at once."""

    offload_optimizer: bool = False
    """Keep moments and master weights in host memory; those of each parameter move to the device for its update
    only."""

    deterministic: bool = False
    """Add up gradients of attention and of the embedding in one order on gpu, at some speed: without it a run and its
    resumption differ in the last digits there. On cpu they do not; for xpu it is refused."""

    @property
    def compiles_layers(self) -> bool:
        """Whether each decoder layer is a program."""
        return (self.mode, self.program) == ("to_static", "layers")

    @property
    def compiles_steps(self) -> bool:
        """Whether each training step is a program."""
        return (self.mode, self.program) == ("to_static", "step")

    def computes_again(self, layer: int) -> bool:
        """Whether a layer of the model is recomputed as a whole."""
        return self.recompute == "full" and layer % self.recompute_every == 0

    def problems(self) -> Iterator[tuple[str, str]]:
        for rule in ENGINE_RULES:
            yield from rule.check(self)
