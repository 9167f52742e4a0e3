"""Errors that such suites have had, put in one at a time: the comparison with one process has to notice each.

They are laid over the engine from here, in the rank processes of `tests.parity.worker` only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

NUDGE = 2.0**-16
"""Relative; large beside the rounding of float32, 2**-24, and small beside what it changes."""


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch is divided by its own weight, and their number stands for the weight of the step."""
    from llmsuite.parallel.loss_ledger import LossTerms
    from tests.parity.token_stage import TokenStage

    loss = TokenStage.loss

    def divided(self: Any, model: Any, batch: Any) -> LossTerms:
        terms = loss(self, model, batch)
        return LossTerms(terms.total / terms.weight, 1.0)

    patch.setattr(TokenStage, "loss", divided)


def pipeline_gradients_not_averaged(patch: pytest.MonkeyPatch) -> None:
    """Only the last pipeline stage divides by the weight of all micro-batches; the others by that of one."""
    from llmsuite.parallel import collective
    from llmsuite.parallel.loss_ledger import LossLedger

    reduce = LossLedger.reduce
    add = LossLedger.add

    def counted(self: Any, terms: Any) -> None:
        self.num_micro_batches = getattr(self, "num_micro_batches", 0) + 1
        add(self, terms)

    def own_weight(self: Any) -> tuple[float, dict[str, float]]:
        weight, metrics = reduce(self)
        mesh = collective.mesh()
        is_last = mesh.coordinate["pp"] == mesh.degrees.pp - 1
        return (weight if is_last else weight / self.num_micro_batches), metrics

    patch.setattr(LossLedger, "add", counted)
    patch.setattr(LossLedger, "reduce", own_weight)


def positive_losses_counted(patch: pytest.MonkeyPatch) -> None:
    """What is supervised is told by `loss > 0`, and a loss of 0 falls out of the mean."""
    from llmsuite.stages import pair_loss

    loss = pair_loss.PairLoss.terms
    compare = pair_loss.PairLoss._pair_losses
    latest: list[Any] = []

    def noted(self: Any, logps: Any, batch: Any) -> Any:
        latest[:] = compare(self, logps, batch)
        return tuple(latest)

    def counted(self: Any, model: Any, batch: Any) -> pair_loss.LossTerms:
        terms = loss(self, model, batch)
        return pair_loss.LossTerms(terms.total, float((latest[0] > 0).sum()), terms.sums)

    patch.setattr(pair_loss.PairLoss, "_pair_losses", noted)
    patch.setattr(pair_loss.PairLoss, "terms", counted)


def tied_reduce_forgotten(patch: pytest.MonkeyPatch) -> None:
    """First and last stage each update their copy of a tied embedding with their own gradient."""
    _no_group(patch, "tied_group")


def data_reduce_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Each data rank updates with the gradients of its own samples."""
    from llmsuite.parallel.mesh import DATA, Mesh

    group = Mesh.group
    patch.setattr(Mesh, "group", lambda self, kind: None if kind == DATA else group(self, kind))


def replicated_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """What every rank of a tensor parallel group holds counts once a rank in the norm that gradients are clipped by."""
    from llmsuite.parallel import collective
    from llmsuite.parallel.sharding import ParameterShard

    replica_count = ParameterShard.replica_count.fget
    assert replica_count is not None

    def fewer(self: Any) -> int:
        whole = self.parameter.is_dist() and self.parameter.placements[0].is_replicated()
        return replica_count(self) // (collective.mesh().degrees.tp if whole else 1)

    patch.setattr(ParameterShard, "replica_count", property(fewer))


def factor_of_first_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank starts with the first rank's part of an adapter's first factor that is cut over tp."""
    from llmsuite.adapters.lora import FIRST_FACTOR
    from llmsuite.parallel import materialize

    local_slice = materialize.local_slice

    def first_slice(name: str, *of_parameter: Any) -> list[slice]:
        index = local_slice(name, *of_parameter)
        if not name.endswith(f".{FIRST_FACTOR}"):
            return index
        return [slice(0, part.stop - part.start) for part in index]

    patch.setattr(materialize, "local_slice", first_slice)


def scale_of_own_rank(patch: pytest.MonkeyPatch) -> None:
    """Inputs are rounded by the largest one that this rank has seen of its part of them."""
    from llmsuite.parallel import collective

    patch.setattr(collective, "max_over_run", lambda values: [float(value) for value in values])


def weight_scale_of_own_part(patch: pytest.MonkeyPatch) -> None:
    """Every rank rounds a matrix that is cut by its inputs by the largest weight of its own part."""
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

    from llmsuite.models import qat

    scale_of = qat.weight_scale

    def own_scale(weight: Any) -> Any:
        if not (weight.is_dist() and weight.placements[-1].is_shard(0)):
            return scale_of(weight)
        mesh = weight.process_mesh
        mine = scale_of(dtensor_to_local(weight, mesh, weight.placements))
        return dtensor_from_local(mine, mesh, [dist.Replicate() for _ in mesh.shape])  # which it is not

    patch.setattr(qat, "weight_scale", own_scale)


def weights_nudged(patch: pytest.MonkeyPatch, number: int) -> None:
    """Every weight that is drawn is off by `NUDGE` of itself (rms): no error, but a measure of how sensitive results
    are to rounding. Of a matrix that is stored quantised it is what the codes stand for: other codes would be another
    model."""
    import paddle

    from llmsuite.engine import weights
    from llmsuite.models import quantised

    initial_values = weights.initial_values
    dequantise = quantised.dequantise
    quantise = weights.QuantisedReads._quantised
    quantises = False

    def moved(values: np.ndarray, by: bytes) -> Any:
        noise = np.random.default_rng([number, *by]).standard_normal(values.shape)
        return (values * (1 + NUDGE * noise)).astype("float32")

    def drawn(seed: int, name: str, *args: Any) -> Any:
        values = initial_values(seed, name, *args)
        return values if quantises else moved(values, name.encode())

    def stored(self: Any, *args: Any) -> Any:
        nonlocal quantises
        quantises = True
        try:
            return quantise(self, *args)
        finally:
            quantises = False

    def whole(codes: Any, *args: Any) -> Any:
        values = dequantise(codes, *args).numpy()
        return paddle.to_tensor(moved(values, hashlib.sha256(codes.numpy().tobytes()).digest()))

    patch.setattr(weights, "initial_values", drawn)
    patch.setattr(weights.QuantisedReads, "_quantised", stored)
    patch.setattr(quantised, "dequantise", whole)


def _between(bent: Callable[[Any], Any]) -> Callable[..., Any]:
    """What computes a function of bent tensors, on parts of distributed ones: what it gives is bent, and so are its
    gradients, as all is bfloat16 between products."""
    import paddle
    from paddle.autograd import PyLayer

    from llmsuite.devices.local_parts import on_local_shards

    class Between(PyLayer):
        """The function comes in a tuple, which PyLayer does not look into."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *tensors, (ctx.function,) = given
            ctx.save_for_backward(*tensors)
            return bent(ctx.function(*tensors))

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
            tensors = [tensor.detach() for tensor in ctx.saved_tensor()]
            for tensor in tensors:
                tensor.stop_gradient = False
            with paddle.enable_grad():
                found = paddle.grad([ctx.function(*tensors)], tensors, [gradient])
            return tuple(bent(tensor) for tensor in found)

    def between(function: Any, *tensors: Any) -> Any:
        apply = lambda *local: Between.apply(*local, (function,))  # noqa: E731
        return on_local_shards(apply, *tensors) if tensors[0].is_dist() else apply(*tensors)

    return between


def products_bent(patch: pytest.MonkeyPatch) -> None:
    """With precision bf16, inputs of products are not rounded but bent: x (1 + a sin(b log |x|)), which changes them
    by as much as a rounding to 5 bits would, and is continuous. So strategies that apply it to the same numbers agree
    as closely as in float32, and one that forgets it once, or applies it to a part of a sum, does not."""
    import paddle

    from llmsuite.devices import masks
    from llmsuite.devices import ops as plain
    from llmsuite.devices.local_parts import local_constant
    from llmsuite.devices.matmul_ops import MatmulOps
    from llmsuite.plugins.cpu_kernels import kernels as ops
    from llmsuite.plugins.cpu_kernels.cpu import CpuKernels

    def bent(wide: Any) -> Any:
        return wide * (1 + 2.0**-5 * paddle.sin(3 * paddle.log(wide.abs() + 1e-30)))

    def round_activation(x: Any) -> Any:
        """In float64, which says that it is bent already."""
        return x if x.dtype == paddle.float64 else bent(x.astype("float64"))

    def product(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
        return paddle.matmul(round_activation(x), round_activation(y), transpose_x, transpose_y)

    def matmul(*arguments: Any) -> Any:
        return product(*arguments).astype("float32")

    def rounded_output_matmul(pairs: Any, transpose_y: bool) -> Any:
        return bent(sum(product(x, y, False, transpose_y) for x, y in pairs))

    def rounded_grad_cross_entropy(logits: Any, targets: Any) -> Any:
        given = logits.detach()
        given.stop_gradient = False
        with paddle.enable_grad():
            nll = plain.cross_entropy(given, targets)
        return nll.detach(), lambda of_nll: round_activation(paddle.grad(nll, given, of_nll)[0])

    between = _between(bent)

    def swiglu(gate: Any, up: Any) -> Any:
        return between(plain.swiglu, gate, up)

    def rotary(x: Any, cos: Any, sin: Any) -> Any:
        turns = [local_constant(turn).astype("float64") for turn in (cos, sin)]
        return between(lambda local: plain.rotary(local, *turns), x)

    def attention(q: Any, k: Any, v: Any, spans: Any) -> Any:
        if spans is None:
            mask = masks.causal_mask(q.shape[1], k.shape[1], q.dtype)
        else:
            mask = masks.span_mask(local_constant(spans), q.dtype)
        return between(lambda *local: plain.attention(*local, mask), q, k, v)

    def of_either(of_float32: Any, of_bent: Any) -> Any:
        return lambda x, *rest: (of_bent if x.dtype == paddle.float64 else of_float32)(x, *rest)

    patch.setattr(CpuKernels, "_has_bf16", lambda self: False)
    patch.setattr(ops, "rounded_matmul", matmul)
    patch.setattr(ops, "rounded_io_matmul", rounded_output_matmul)
    patch.setattr(ops, "round_to_bf16", round_activation)
    patch.setattr(ops, "bf16_grad_cross_entropy", rounded_grad_cross_entropy)
    for name, of_bent in {"swiglu": swiglu, "rotary": rotary, "attention": attention}.items():
        patch.setattr(ops, name, of_either(getattr(ops, name), of_bent))
    patch.setattr(MatmulOps, "rounds_attention", property(lambda self: self.rounds_outputs))


def products_by_rounding(patch: pytest.MonkeyPatch) -> None:
    """No error: bf16 as on a processor without instructions for it."""
    from llmsuite.plugins.cpu_kernels.cpu import CpuKernels

    patch.setattr(CpuKernels, "_has_bf16", lambda self: False)


def frozen_in_float32(patch: pytest.MonkeyPatch) -> None:
    """No error: frozen matrices as they are in the files, to be rounded whenever they are multiplied with."""
    from llmsuite.recipe.plans import ModelPlan

    patch.setattr(ModelPlan, "keeps_frozen_bf16", lambda self, parallel_plan: False)


def plain_kernels(patch: pytest.MonkeyPatch) -> None:
    """No error: the CPU as without a compiler, so that attention makes scores of all pairs of tokens."""
    from llmsuite.plugins.cpu_kernels.cpu import CpuKernels

    patch.setattr(CpuKernels, "kernels", lambda self, precision: {})


def rollouts_in_float32(patch: pytest.MonkeyPatch) -> None:
    """Completions of a model that is trained in bf16 on the CPU are drawn by its float32 weights and products."""
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.rl import local

    refreshable = local.RefreshableModel
    patch.setattr(local, "AS_TRAINED", None)
    patch.setattr(local, "RefreshableModel", lambda model, ops: refreshable(model, CpuBackend().ops("fp32")))


def no_masters(patch: pytest.MonkeyPatch) -> None:
    """What the optimizer updates has the 16 bits of the parameter."""
    from llmsuite.parallel.sharding import ParameterShard

    write_back = ParameterShard.write_back

    def rounded(self: Any) -> None:
        write_back(self)
        if self.has_master and not self.is_empty:
            master = self.main_param.detach()
            master.copy_(master.astype(self.parameter.dtype).astype("float32"), True)

    patch.setattr(ParameterShard, "write_back", rounded)


def sums_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    """Gradients of micro-batches are added up in the 16 bits of the parameter."""
    from llmsuite.parallel.sharding import ParameterShard

    add = ParameterShard.add_shard

    def rounded(self: Any, own: Any) -> None:
        add(self, own)
        self._sum = self._sum.astype(self.parameter.dtype).astype("float32")

    patch.setattr(ParameterShard, "add_shard", rounded)


def wide_embedding(patch: pytest.MonkeyPatch) -> None:
    """The first activations are float32, and with them all others, as autocast has it."""
    from llmsuite.models.blocks import CausalLM

    embed = CausalLM.embed
    patch.setattr(CausalLM, "embed", lambda *args, **more: embed(*args, **more).astype("float32"))


def _no_group(patch: pytest.MonkeyPatch, name: str) -> None:
    from llmsuite.parallel.mesh import Mesh

    patch.setattr(Mesh, name, None)


MUTATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        mean_of_means,
        pipeline_gradients_not_averaged,
        positive_losses_counted,
        tied_reduce_forgotten,
        data_reduce_forgotten,
        replicated_counted_twice,
    )
}
OF_ADAPTERS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {"factor_of_first_rank": factor_of_first_rank}
OF_ROUNDING: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation for mutation in (scale_of_own_rank, weight_scale_of_own_part)
}
NUDGES: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    f"weights_nudged_{number}": functools.partial(weights_nudged, number=number) for number in range(3)
}


OF_16_BITS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation for mutation in (no_masters, sums_in_16_bits, wide_embedding)
}
OF_PRODUCTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation
    for mutation in (products_bent, products_by_rounding, frozen_in_float32, plain_kernels, rollouts_in_float32)
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """While active, an error is in; none for None."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            {**MUTATIONS, **OF_ADAPTERS, **OF_ROUNDING, **OF_PRODUCTS, **OF_16_BITS, **NUDGES}[name](patch)
        yield
