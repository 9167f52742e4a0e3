"""Weight-only quantisation for generation, with matrices in 16, 8 or 4 bits: kernels convert them in registers, and all
sums are float32.

Packed are the matrices of the decoder layers, routed experts included, the embedding and the head. The inputs of their
matmuls are rounded to bfloat16, as in training in bf16. Norms, biases and activations between matmuls are float32, and
so is the cache except in bf16, and so are the matrices that modules name as `never_packed`: small ones such as routers,
and those that are multiplied with something other than inputs. Where layers are in 4 bits, the embedding and the head
are in int8, because they determine the tokens directly.

A rollout model for training in bf16 computes exactly as the trained model does (`pack_bf16`): embedding and cache are
float32, gate and up of MLPs are rounded (`DecodingOps.joined_swiglu`), and so are queries, keys and values where
training rounds them (`MatmulOps.rounds_attention`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import nn

from llmsuite.adapters.parameters import is_factor
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import MatrixPart, PackedOps, PackedWeight
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.fusible import attentions, is_gated_mlp
from llmsuite.inference.packed_layers import PackedEmbedding, PackedExperts, PackedLinear, PackedTiedHead
from llmsuite.models.block_quant import LEVELS
from llmsuite.models.blocks import Attention, CausalLM, GatedMLP, halves_first
from llmsuite.models.embedding import is_plain_embedding
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.linear import is_matrix, is_plain_linear

ReadSlice = Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]
"""A `llmsuite.parallel.materialize.ReadSlice`."""


def head_precision(precision: str) -> str:
    """Precision of the embedding and the head, for one of the layers."""
    return "int8" if precision in LEVELS else precision


@paddle.no_grad()
def pack_matrices(model: CausalLM, read: ReadSlice, precision: str, ops: PackedOps) -> None:
    """Replace the matrices of a lazily built model by packed ones; other parameters are unchanged.

    Queries, keys and values become one matrix, and so do gate and up, as in `llmsuite.inference.fused`.

    Args:
        model: every matrix is packed, unless its module names it as `never_packed`.
        read: reads slices of the values; only a part of a matrix is in memory in float32.
        precision: bf16, int8, nf4, fp4 or int4.
        ops: the device's operations on packed weights.

    Raises:
        UserError: a matrix cannot be packed.
    """
    packer = _Packer(read, precision, ops)
    packer.layers(model)
    packer.experts(model)
    if left := _first_unpacked(model):
        raise UserError(f"--precision {precision}: {left} cannot be stored in it; use fp32")
    embedding = packer.embedding(model, head_precision(precision))
    if is_plain_embedding(model.model.embed_tokens):  # a subclass has code of its own, and stays in float32
        model.model.embed_tokens = PackedEmbedding(embedding, ops.packed_embedding)
    packer.head(model, embedding)


@paddle.no_grad()
def pack_bf16(model: CausalLM, read: ReadSlice, ops: PackedOps) -> None:
    """Pack the matrices of a rollout model in bf16, so that it gives the same numbers as the model that is trained in
    bf16 on such a device. The embedding stays float32, because its lookup is no matmul."""
    packer = _Packer(read, "bf16", ops)
    packer.layers(model)
    packer.head(model, packer.embedding(model, "bf16") if model.lm_head is None else None)


def register_packed_buffers(model: CausalLM) -> None:
    """Register the packed matrices of a model as buffers of their layers, so that they are saved with a program."""
    for module in model.sublayers():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            module.register_buffer("bytes", module.matrix.bytes)
        elif isinstance(module, GroupedLinear) and isinstance(module.weight, PackedExperts):
            module.register_buffer("bytes", module.weight.matrix.bytes)


def _first_unpacked(model: CausalLM) -> str | None:
    """Name of the first matrix of the layers that is neither packed, nor named as `never_packed`, nor part of an
    adapter; None for none."""
    kept = {f"{prefix}.{name}" for prefix, module in model.named_sublayers() for name in _never_packed(module)}
    for name, parameter in model.model.layers.named_parameters("model.layers"):
        if parameter.ndim > 1 and not is_factor(name) and not {name, name.removesuffix(".weight")} & kept:
            return str(name)
    return None


def _never_packed(module: nn.Layer) -> Sequence[str]:
    """Names of the layers and parameters of a module that stay in float32."""
    found: Sequence[str] = getattr(module, "never_packed", ())
    return found


class _Packer:
    """Reads the matrices of a model and packs them."""

    def __init__(self, read: ReadSlice, precision: str, ops: PackedOps):
        self._read = read
        self._precision = precision
        self._ops = ops

    def layers(self, model: CausalLM) -> None:
        """Pack the matrices of the layers: concatenated where they are computed together (`fusible`), else one by
        one."""
        fusible = set(map(id, attentions(model)))
        for prefix, module in list(model.named_sublayers()):
            if id(module) in fusible:
                self.attention(prefix, module)
            elif is_gated_mlp(module):
                self.mlp(prefix, module)
            else:
                self.pack_others(prefix, module)

    def pack_others(self, prefix: str, module: nn.Layer) -> None:
        """Pack the linear layers of a module one by one."""
        for name, layer in list(module.named_children()):
            if is_matrix(layer) and name not in _never_packed(module):
                setattr(module, name, self._linear([f"{prefix}.{name}"], [layer], is_accessible=True))

    def embedding(self, model: CausalLM, precision: str) -> PackedWeight:
        """The packed matrix of the embedding, [D, V]."""
        shape = model.model.embed_tokens.weight.shape
        return self.matrix(("model.embed_tokens",), (shape[::-1],), precision, transposed=True)

    def head(self, model: CausalLM, embedding: PackedWeight | None) -> None:
        """Pack the head; where it is tied, it uses the matrix of the embedding."""
        if model.lm_head is None:
            assert embedding is not None
            model.tied_head = PackedTiedHead(self._layer(embedding, None))
        else:
            if not is_matrix(model.lm_head):
                raise self._not_plain("lm_head", model.lm_head)
            shape = model.lm_head.weight.shape
            precision = head_precision(self._precision)
            model.lm_head = self._layer(self.matrix(("lm_head",), (shape,), precision), None, "lm_head")

    def attention(self, prefix: str, module: Attention) -> None:
        """Pack the projections of an attention; interleaved pairs of rotary embedding are reordered into two halves."""
        projections = [module.q_proj, module.k_proj, module.v_proj]
        module.num_heads = tuple(p.weight.shape[1] // module.head_size for p in projections[:2])
        orders: list[np.ndarray | None] = [None] * 3
        if module.interleaved:
            orders = [*(halves_first(heads, 0, module.head_size).numpy() for heads in module.num_heads), None]
        module.qkv_proj = self._linear([f"{prefix}.{part}_proj" for part in "qkv"], projections, orders)
        module.q_proj = module.k_proj = module.v_proj = None
        module.o_proj = self._linear([f"{prefix}.o_proj"], [module.o_proj])

    def mlp(self, prefix: str, module: GatedMLP) -> None:
        """Pack the matrices of an MLP."""
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        layers = [module.gate_proj, module.up_proj]
        module.gate_up_proj = self._linear(names, layers)
        module.gate_proj = module.up_proj = None
        module.down_proj = self._linear([f"{prefix}.down_proj"], [module.down_proj])

    def experts(self, model: CausalLM) -> None:
        """Pack the stacks of routed experts, one expert after the other."""
        for prefix, module in model.named_sublayers():
            if isinstance(module, GroupedLinear):
                if type(module) is not GroupedLinear:
                    raise self._not_plain(prefix, module)
                stack = self._stack(prefix, module.weight.shape)
                del module.weight  # an nn.Layer lets a parameter be replaced by nothing but a parameter
                module.weight = PackedExperts(stack, self._ops.packed_grouped_matmul)

    def _stack(self, name: str, shape: Sequence[int]) -> PackedWeight:
        """The packed matrices of all experts, [E, I, O]."""
        num_experts, num_inputs, num_outputs = shape
        _check_blocks(name, num_inputs, self._precision)

        def read_outputs(number: int, first: int, end: int) -> np.ndarray:
            index = [slice(number, number + 1), slice(0, num_inputs), slice(first, end)]
            return np.asarray(self._read(f"{name}.weight", shape, index)[0], "float32")

        matrices = [MatrixPart(num_outputs, functools.partial(read_outputs, number)) for number in range(num_experts)]
        return self._ops.pack_stack(matrices, num_inputs, self._precision)

    def _linear(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Linear],
        orders: Sequence[np.ndarray | None] = (None, None),
        is_accessible: bool = False,
    ) -> PackedLinear:
        """One packed layer with the outputs of several linear layers; `is_accessible`: third-party code may read its
        matrix."""
        for name, layer in zip(names, layers):
            if not is_plain_linear(layer):
                raise self._not_plain(name, layer)
        shapes = [layer.weight.shape for layer in layers]
        matrix = self.matrix(names, shapes, self._precision, orders)
        bias = None
        if layers[0].bias is not None:
            values = [self._read(f"{n}.bias", s[1:], [slice(0, s[1])]) for n, s in zip(names, shapes)]
            values = [value if order is None else value[order] for value, order in zip(values, orders)]
            bias = tensor_of(np.concatenate(values).astype("float32"))
        return self._layer(matrix, bias, names[0] if is_accessible else "")

    def _layer(self, matrix: PackedWeight, bias: Tensor | None, name: str = "") -> PackedLinear:
        return PackedLinear(matrix, bias, self._ops.packed_matmul, name)

    def _not_plain(self, name: str, layer: nn.Layer) -> UserError:
        return UserError(
            f"--precision {self._precision}: {name} is more than a matrix (a {type(layer).__name__}), such as a layer "
            "that rounds its inputs; use fp32"
        )

    def matrix(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        precision: str,
        orders: Sequence[np.ndarray | None] = (None, None),
        transposed: bool = False,
    ) -> PackedWeight:
        """The outputs of several parameters as one matrix.

        Args:
            names: of the layers.
            shapes: of their matrices, [I, O] each.
            precision: to store them in.
            orders: the outputs of each in the order in which they are to lie; None for their own.
            transposed: the parameters are [O, I].
        """
        num_inputs = int(shapes[0][0])
        _check_blocks(names[0], num_inputs, precision)
        parts = []
        for name, (_, num_outputs), order in zip(names, shapes, orders):
            read_outputs = functools.partial(
                self._read_outputs, f"{name}.weight", [num_inputs, num_outputs], transposed
            )
            if order is not None:
                read_outputs = functools.partial(_reordered, functools.cache(read_outputs), order)
            parts.append(MatrixPart(num_outputs, read_outputs))
        return self._ops.pack(parts, num_inputs, precision)

    def _read_outputs(self, name: str, shape: Sequence[int], transposed: bool, first: int, end: int) -> np.ndarray:
        """Outputs of a parameter, [I, end - first] in float32."""
        index = [slice(0, shape[0]), slice(first, end)]
        if transposed:
            return np.asarray(self._read(name, shape[::-1], index[::-1]), "float32").T
        return np.asarray(self._read(name, shape, index), "float32")


def _check_blocks(name: str, num_inputs: int, precision: str) -> None:
    """Check that the inputs of a layer can be cut into blocks. Raises UserError if not."""
    if precision != "bf16" and num_inputs % 2:
        raise UserError(
            f"--precision {precision}: {name} has {num_inputs} inputs, an odd number, which cannot be cut into blocks; "
            "use fp32 or bf16"
        )


def _reordered(read_outputs: Callable[[int, int], np.ndarray], order: np.ndarray, first: int, end: int) -> np.ndarray:
    """Some outputs of a parameter in another order; the parameter is read completely, once."""
    return read_outputs(0, len(order))[:, order[first:end]]
