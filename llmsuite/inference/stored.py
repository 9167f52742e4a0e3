"""A model that answers with matrices in 16, 8 or 4 bits: kernels widen them in registers, all sums are float32.

Stored so are the matrices of the decoder layers, routed experts too, the embedding and the head. The inputs of their
products are rounded to bfloat16, as they are where a model is trained in it. Norms, biases and what is between products
are float32, and so is the cache but in bf16, and what modules name as `unstored`: small matrices that choose experts,
or that are multiplied with other things than inputs. Where layers are in 4 bits, the embedding and the head are in
int8: with them the model chooses words.

A model that draws for one that is trained in bf16 computes as that does (`store_rounding`): embedding and cache are
float32, and gate and up of MLPs are rounded (`Ops.joined_swiglu`), as are queries, keys and values where those of the
training are (`Ops.attends_operands`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import nn

from llmsuite.devices.decoder_weights import StoredMatrix
from llmsuite.devices.ops import Ops
from llmsuite.errors import UserError
from llmsuite.inference.fusible import attentions, is_gated_mlp
from llmsuite.inference.packing import Part, codes_of, pack_parts, pack_stack
from llmsuite.inference.stored_layers import StoredEmbedding, StoredLinear, StoredStack
from llmsuite.models.blocks import Attention, CausalLM, GatedMLP, halves_first
from llmsuite.models.exact import is_plain
from llmsuite.models.experts import Stacked
from llmsuite.models.targets import is_factor
from llmsuite.typing import Tensor

ReadSlice = Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]
"""As `llmsuite.parallel.fill.ReadSlice`."""


def head_precision(precision: str) -> str:
    """What the embedding and the head are stored in."""
    return "int8" if codes_of(precision).bits == 4 else precision


@paddle.no_grad()
def store(model: CausalLM, read: ReadSlice, precision: str, ops: Ops) -> None:
    """Replace the matrices of a lazily built model by stored ones; other parameters are left as they are.

    Queries, keys and values become one matrix, and so do gate and up, as in `llmsuite.inference.fused`.

    Args:
        model: in which every matrix is stored, or is named as `unstored` by the module that has it.
        read: gives the values; only a part of a matrix is in memory in float32.
        precision: bf16, int8, nf4, fp4 or int4.
        ops: the device's operations.

    Raises:
        UserError: a matrix cannot be stored so.
    """
    own = _Store(read, precision, ops)
    own.layers(model)
    own.experts(model)
    if left := _left(model):
        raise UserError(f"--precision {precision}: {left} cannot be stored in it; use fp32")
    words = own.words(model, head_precision(precision))
    assert ops.stored_outputs is not None
    if type(model.model.embed_tokens) is nn.Embedding:  # one with code of its own stays, in float32
        model.model.embed_tokens = StoredEmbedding(words, ops.stored_outputs)
    own.head(model, words)


@paddle.no_grad()
def store_rounding(model: CausalLM, read: ReadSlice, ops: Ops) -> None:
    """`store` in bf16, for the same numbers as those of a model that is trained in it on such a device: the embedding,
    which is no product, is float32."""
    own = _Store(read, "bf16", ops)
    own.layers(model)
    own.head(model, own.words(model, "bf16") if model.lm_head is None else None)


def keep_matrices(model: CausalLM) -> None:
    """Make the stored matrices of a model buffers of their layers, so that they are saved with a program."""
    for module in model.sublayers():
        if isinstance(module, (StoredLinear, StoredEmbedding)):
            module.register_buffer("bytes", module.matrix.bytes)
        elif isinstance(module, Stacked) and isinstance(module.weight, StoredStack):
            module.register_buffer("bytes", module.weight.matrix.bytes)


def _left(model: CausalLM) -> str | None:
    """A matrix of the layers that is neither stored, nor named as `unstored`, nor a part of what is beside them."""
    kept = {f"{prefix}.{name}" for prefix, module in model.named_sublayers() for name in _unstored(module)}
    for name, parameter in model.model.layers.named_parameters("model.layers"):
        if parameter.ndim > 1 and not is_factor(name) and not {name, name.removesuffix(".weight")} & kept:
            return str(name)
    return None


def _unstored(module: nn.Layer) -> Sequence[str]:
    """Names of layers and parameters of a module that stay in float32."""
    found: Sequence[str] = getattr(module, "unstored", ())
    return found


class _Store:
    """Reads matrices and stores them."""

    def __init__(self, read: ReadSlice, precision: str, ops: Ops):
        assert ops.stored_product is not None, "the device has no kernel for stored matrices"
        self._read, self._precision, self._product = read, precision, ops.stored_product
        self._grouped = ops.stored_grouped

    def layers(self, model: CausalLM) -> None:
        """Store the matrices of the layers: as one what will be computed as one (`fusible`), else one by one."""
        fusible = set(map(id, attentions(model)))
        for prefix, module in list(model.named_sublayers()):
            if id(module) in fusible:
                self.attention(prefix, module)
            elif is_gated_mlp(module):
                self.mlp(prefix, module)
            else:
                self.others(prefix, module)

    def others(self, prefix: str, module: nn.Layer) -> None:
        """Store the linear layers of a module one by one."""
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and name not in _unstored(module):
                setattr(module, name, self._linear([f"{prefix}.{name}"], [layer], is_seen=True))

    def words(self, model: CausalLM, precision: str) -> StoredMatrix:
        """The matrix of the embedding, [D, V]."""
        shape = model.model.embed_tokens.weight.shape
        return self.matrix(("model.embed_tokens",), (shape[::-1],), precision, turned=True)

    def head(self, model: CausalLM, words: StoredMatrix | None) -> None:
        """Store the head, which is that of the embedding where it is tied."""
        if model.lm_head is None:
            assert words is not None
            model.__dict__["tied_logits"] = self._layer(words, None)
        else:
            if type(model.lm_head) is not nn.Linear:
                raise self._is_more("lm_head", model.lm_head)
            shape, precision = model.lm_head.weight.shape, head_precision(self._precision)
            model.lm_head = self._layer(self.matrix(("lm_head",), (shape,), precision), None, "lm_head")

    def attention(self, prefix: str, module: Attention) -> None:
        """Store the projections of an attention; what is rotated together comes to lie in two halves."""
        projections = [module.q_proj, module.k_proj, module.v_proj]
        module.num_heads = tuple(p.weight.shape[1] // module.head_size for p in projections[:2])
        orders: list[np.ndarray | None] = [None] * 3
        if module.interleaved:
            orders = [*(halves_first(heads, 0, module.head_size).numpy() for heads in module.num_heads), None]
        module.qkv_proj = self._linear([f"{prefix}.{part}_proj" for part in "qkv"], projections, orders)
        module.q_proj = module.k_proj = module.v_proj = None
        module.o_proj = self._linear([f"{prefix}.o_proj"], [module.o_proj])

    def mlp(self, prefix: str, module: GatedMLP) -> None:
        """Store the matrices of an MLP."""
        names, layers = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [module.gate_proj, module.up_proj]
        module.gate_up_proj = self._linear(names, layers)
        module.gate_proj = module.up_proj = None
        module.down_proj = self._linear([f"{prefix}.down_proj"], [module.down_proj])

    def experts(self, model: CausalLM) -> None:
        """Store the stacks of routed experts, an expert after the other."""
        for prefix, module in model.named_sublayers():
            if isinstance(module, Stacked):
                if type(module) is not Stacked:
                    raise self._is_more(prefix, module)
                assert self._grouped is not None, "there is one where there is one for matrices"
                stack = self._stack(prefix, module.weight.shape)
                del module.weight  # else Paddle takes nothing but a parameter in its place
                module.weight = StoredStack(stack, self._grouped)

    def _stack(self, name: str, shape: Sequence[int]) -> StoredMatrix:
        """The matrices of all experts, [E, I, O]."""
        num_experts, num_inputs, num_outputs = shape
        _check_blocks(name, num_inputs, self._precision)

        def some(number: int, first: int, end: int) -> np.ndarray:
            index = [slice(number, number + 1), slice(0, num_inputs), slice(first, end)]
            return np.asarray(self._read(f"{name}.weight", shape, index)[0], "float32")

        matrices = [Part(num_outputs, functools.partial(some, number)) for number in range(num_experts)]
        return pack_stack(matrices, num_inputs, self._precision)

    def _linear(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Linear],
        orders: Sequence[np.ndarray | None] = (None, None),
        is_seen: bool = False,
    ) -> StoredLinear:
        """The outputs of several linear layers as one; `is_seen`: whether code of an author's may ask for it."""
        for name, layer in zip(names, layers):
            if not is_plain(layer):
                raise self._is_more(name, layer)
        shapes = [layer.weight.shape for layer in layers]
        matrix, bias = self.matrix(names, shapes, self._precision, orders), None
        if layers[0].bias is not None:
            values = [self._read(f"{n}.bias", s[1:], [slice(0, s[1])]) for n, s in zip(names, shapes)]
            values = [value if order is None else value[order] for value, order in zip(values, orders)]
            bias = paddle.to_tensor(np.concatenate(values).astype("float32"))
        return self._layer(matrix, bias, names[0] if is_seen else "")

    def _layer(self, matrix: StoredMatrix, bias: Tensor | None, name: str = "") -> StoredLinear:
        return StoredLinear(matrix, bias, self._product, name)

    def _is_more(self, name: str, layer: nn.Layer) -> UserError:
        return UserError(
            f"--precision {self._precision}: {name} is more than a matrix (a {type(layer).__name__}), such as one that "
            "rounds its inputs; use fp32"
        )

    def matrix(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        precision: str,
        orders: Sequence[np.ndarray | None] = (None, None),
        turned: bool = False,
    ) -> StoredMatrix:
        """The outputs of several parameters as one matrix.

        Args:
            names: of the layers.
            shapes: of their matrices, [I, O] each.
            precision: to store them in.
            orders: the outputs of each in the order in which they are to lie; None for their own.
            turned: whether the parameters are [O, I].
        """
        num_inputs = int(shapes[0][0])
        _check_blocks(names[0], num_inputs, precision)
        parts = []
        for name, (_, num_outputs), order in zip(names, shapes, orders):
            some = functools.partial(self._outputs, f"{name}.weight", [num_inputs, num_outputs], turned)
            if order is not None:
                some = functools.partial(_reordered, functools.cache(some), order)
            parts.append(Part(num_outputs, some))
        return pack_parts(parts, num_inputs, precision)

    def _outputs(self, name: str, shape: Sequence[int], turned: bool, first: int, end: int) -> np.ndarray:
        """Outputs of a parameter, [I, end - first] in float32."""
        index = [slice(0, shape[0]), slice(first, end)]
        if turned:
            return np.asarray(self._read(name, shape[::-1], index[::-1]), "float32").T
        return np.asarray(self._read(name, shape, index), "float32")


def _check_blocks(name: str, num_inputs: int, precision: str) -> None:
    """Raise UserError for a layer whose inputs cannot be cut into blocks."""
    if precision != "bf16" and num_inputs % 2:
        raise UserError(
            f"--precision {precision}: {name} has {num_inputs} inputs, an odd number, which are no blocks; "
            "use fp32 or bf16"
        )


def _reordered(some: Callable[[int, int], np.ndarray], order: np.ndarray, first: int, end: int) -> np.ndarray:
    """Some outputs of a parameter in another order; it is read whole, once."""
    return some(0, len(order))[:, order[first:end]]
