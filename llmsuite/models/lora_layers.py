"""The layers of `paddlenlp.peft` (3.0.0b4) as llmsuite runs them; importing this module takes paddlenlp.

What is ours: the layer is put in place of an existing one whose W it keeps, makes no second W, and computes on parts of
W under tensor parallel.

Adapters of routed experts and of the embedding are beside it, in `lora_experts.py` and `lora_embedding.py`.

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from llmsuite.models.adapter import Adapter, identity
from llmsuite.models.adapter_sizes import kron_shapes, square_size
from llmsuite.models.experts import Stacked
from llmsuite.models.lora_embedding import DoraEmbedding, LoraEmbedding, PissaEmbedding
from llmsuite.models.lora_experts import DoraExperts, LokrExperts, LoraExperts, MoraExperts, PissaExperts
from llmsuite.models.lora_products import Factors
from llmsuite.models.paddlenlp_peft import import_alone
from llmsuite.models.peft_configs import DoraConfig, LokrConfig, VeraConfig
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.models.shard_plan import KRON_INNER
from llmsuite.models.structured import Part, StructuredLinear, kron_update, mora_update
from llmsuite.typing import Tensor

_VeRALinear: Any = import_alone("paddlenlp.peft.vera.vera_layers")[0].VeRALinear
_LoKrLinear: Any = import_alone("paddlenlp.peft.lokr.lokr_layers")[0].LoKrLinear
_LoRALinear: Any = import_alone("paddlenlp.peft.lora.lora_layers")[0].LoRALinear


class LoraLinear(Adapter, _LoRALinear):
    """x W + scale (x A) B with factors A [I, R] and B [R, O] (Hu et al. 2021, arXiv 2106.09685).

    With a mixer M [R, R] between them, x W + scale (x A) M B (MoSLoRA, Wu et al. 2024, arXiv 2406.11909, eq. 5).
    """

    def __init__(self, linear: nn.Linear, config: Any):
        """
        Args:
            linear: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        num_inputs, num_outputs = linear.weight.shape
        with paddle.LazyGuard():  # the W that it makes takes no memory and draws no random numbers; it is not kept
            _LoRALinear.__init__(
                self,
                num_inputs,
                num_outputs,
                r=config.r,
                lora_alpha=config.lora_alpha,
                rslora=config.rslora,
                lora_plus_scale=config.lora_plus_scale,
                lora_use_mixer=config.lora_use_mixer,
                bias_attr=False if linear.bias is None else None,
            )
        self.take(linear)

    @property
    def is_on(self) -> bool:
        return not self.disable_lora

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self.disable_lora = not is_on

    def is_low_rank(self) -> bool:
        """Whether it is this and nothing more, so that products may be made of its factors (`models.products`)."""
        is_dropped = self.lora_dropout is not identity and self.training
        is_dense = not isinstance(self.weight, QuantisedMatrix)
        return type(self) is LoraLinear and is_dense and not is_dropped and not self.lora_use_mixer

    def factors(self) -> Factors | None:
        """What it adds at present."""
        return None if self.disable_lora or self.merged else Factors(self.lora_A, self.lora_B, self.scaling)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self.base(x)
        if self.disable_lora or self.merged:
            return y
        # theirs scales the wide product: one more tensor [..., O], and a twentieth of the time
        return self.complete_sum(y) + self._update(x)

    def _update(self, x: Tensor) -> Tensor:
        narrow = self.complete_sum(self.matmul(self.lora_dropout(x), self.lora_A)) * self.scaling
        if self.lora_use_mixer:
            narrow = self.matmul(narrow, self.lora_AB)
        return self.matmul(narrow, self.lora_B)


class DoraLinear(LoraLinear):
    """(m / |V|) x V with V = W + scale A B: lengths m [O] of the columns are learnt apart from their directions.

    Liu et al. 2024, DoRA (arXiv 2402.09353), eq. 5; |V|, the length of each column, has no gradient (section 4.3).
    paddlenlp has no such layer.
    """

    def __init__(self, linear: nn.Linear, config: Any):
        super().__init__(linear, config)
        self.complete_columns: Callable[[Tensor], Tensor] = identity
        """Applied to the squared lengths: adds up the parts of the ranks, where W is cut along its inputs."""
        with paddle.LazyGuard():
            self.lora_magnitude = self.create_parameter([linear.weight.shape[1]])  # |W|, where values are read

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if self.disable_lora or self.merged:
            return self.base(x)
        with paddle.no_grad():
            whole = (self.dense_weight(x.dtype) + self.get_delta_weight()).astype("float32")
            # the columns that pad a vocabulary have no length
            length = (self.complete_columns(whole.square().sum(0)) + 1e-12).sqrt().astype(x.dtype)
        length = length.detach()  # in a program that is being made, `no_grad` says nothing
        y = self.complete_sum(self.weight_product(x)) + self._update(x)
        y = y * (self.lora_magnitude / length)
        return y if self.bias is None else y + self.bias

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.convert.adapter`")


class PissaLinear(LoraLinear):
    """x W + scale (x A) B - scale (x A0) B0: factors A, B that begin with the largest singular vectors of W, as A0, B0.

    Meng et al. 2024, PiSSA (arXiv 2404.02948), eq. 2 to 5, which takes scale A0 B0 off W. Here W stays as it is, so
    that it may be quantised, and that a model with its adapters switched off is the base. paddlenlp's own takes it off
    W in the first forward pass, and again after a reload.
    """

    def __init__(self, linear: nn.Linear, config: Any):
        super().__init__(linear, config)
        with paddle.LazyGuard():
            self.lora_A0 = self.create_parameter([linear.weight.shape[0], config.r])
            self.lora_B0 = self.create_parameter([config.r, linear.weight.shape[1]])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True

    def get_delta_weight(self, *factors: Tensor) -> Tensor:
        """As of `LoRALinear`."""
        return super().get_delta_weight(*factors) - paddle.matmul(self.lora_A0, self.lora_B0) * self.scaling

    def _update(self, x: Tensor) -> Tensor:
        x = self.lora_dropout(x)
        # not as one pair of factors side by side: Paddle 3.3.1 gathers parts of them to put them there
        update, start = (
            self.matmul(self.complete_sum(self.matmul(x, first)) * self.scaling, second)
            for first, second in ((self.lora_A, self.lora_B), (self.lora_A0, self.lora_B0))
        )
        return update - start


class LoraGaLinear(PissaLinear):
    """The same with factors that begin with singular vectors of the gradient of W (LoRA-GA, Wang et al. 2024, arXiv
    2407.05000); all are zero until `train.lora_ga` has it.

    paddlenlp's own takes scale A0 B0 off the parameter W, so that its base is another model from then on. It gives B
    the first R vectors and A the next ones, multiplies them by the fourth root of the inputs where the paper has that
    of the outputs, and neither runs on a pipeline nor loads its checkpoint without a GPU.
    """


class VeraLinear(Adapter, _VeRALinear):
    """x W + scale ((x A) d) B b, of which only the vectors d [R] and b [O] are trained (VeRA, Kopiczko et al. 2023,
    arXiv 2310.11454, eq. 2).

    A [I, R] and B [R, O] are random and frozen; they are called `lora_A0` and `lora_B0`, as others that are. In
    paddlenlp's own B is zero, so that nothing is ever learnt once A and B are frozen, W is copied, and the vectors are
    multiplied as matrices, one of them [O, O].
    """

    def __init__(self, linear: nn.Linear, config: Any):
        """
        Args:
            linear: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        num_inputs, num_outputs = linear.weight.shape
        with paddle.LazyGuard():
            nn.Linear.__init__(self, num_inputs, num_outputs, bias_attr=False if linear.bias is None else None)
            self.lora_A0 = self.create_parameter([num_inputs, config.r])
            self.lora_B0 = self.create_parameter([config.r, num_outputs])
            self.lora_d, self.lora_b = self.create_parameter([config.r]), self.create_parameter([num_outputs])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True
        self.scaling, self.is_on = config.scaling, True
        self.take(linear)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self.base(x)
        if not self.is_on:
            return y
        narrow = self.complete_sum(self.matmul(self.lora_dropout(x), self.lora_A0))
        # not d times the scale: Paddle 3.3.1 would sum its gradient over ranks in each backward pass
        narrow = narrow * self.scaling * self.lora_d
        return self.complete_sum(y) + self.matmul(narrow, self.lora_B0) * self.lora_b

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.convert.adapter`")


class MoraLinear(StructuredLinear, _LoRALinear):
    """x W + f(x) with a square matrix in place of two factors, which has their number of parameters and a higher rank
    (MoRA, Jiang et al. 2024, arXiv 2405.12130); `mora_update` is f.

    paddlenlp's own takes the matrix for its transpose when it is merged, multiplies 16-bit inputs by float32 numbers,
    and does not run on several ranks.
    """

    def __init__(self, linear: nn.Linear, config: Any):
        """
        Args:
            linear: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.

        Raises:
            UserError: the rank is too large, see `square_size`.
        """
        num_inputs, num_outputs = linear.weight.shape
        size = square_size(config.r, num_inputs, num_outputs)
        bias = False if linear.bias is None else None
        with paddle.LazyGuard():
            _LoRALinear.__init__(self, num_inputs, num_outputs, r=config.r, use_mora=True, bias_attr=bias)
        square = self.lora_A
        assert square.shape == [size, size]
        del self.lora_A, self.cos, self.sin  # a name of its own: what is called A is cut with W
        self.lora_square = square
        self.part, self.is_on = Part(), True
        self.take(linear)

    def own(self) -> list[Tensor]:
        return [self.lora_square]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (square,) = parameters
        return mora_update(x, square, self.out_features)


class LokrLinear(StructuredLinear, _LoKrLinear):
    """x W + scale x (kron(w1, w2))^T (LoKr, Yeh et al. 2023, LyCORIS, arXiv 2309.14859); see `kron_update`.

    paddlenlp's own makes the whole product in each pass, cannot be merged or switched off, and cannot be built without
    memory, as it multiplies when it is made.
    """

    def __init__(self, linear: nn.Linear, config: Any):
        """
        Args:
            linear: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        num_inputs, num_outputs = linear.weight.shape
        shapes = kron_shapes(config.r, num_inputs, num_outputs)
        with paddle.LazyGuard():
            nn.Linear.__init__(self, num_inputs, num_outputs, bias_attr=False if linear.bias is None else None)
            for name, shape in shapes.items():
                setattr(self, name, self.create_parameter(shape))
        self.use_w1, self.use_w2, self.scale, self._names = True, KRON_INNER in shapes, config.scaling, list(shapes)
        self.part, self.is_on = Part(), True
        self.take(linear)

    def own(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return kron_update(x, *parameters) * self.scale


def adapter_layer(layer: nn.Linear | nn.Embedding | Stacked, config: Any) -> Adapter:
    """The layer with an adapter that replaces a linear layer, an embedding, or a stack of experts."""
    of_linear, of_experts, of_embedding = _kinds(config)
    kind = of_linear if isinstance(layer, nn.Linear) else of_experts if isinstance(layer, Stacked) else of_embedding
    assert kind is not None, "a rule refuses what has no layer"
    return kind(layer, config)


def _kinds(config: Any) -> tuple[Any, Any, Any]:
    """The layers of a kind of adapters for linear layers, stacks of experts, and embeddings."""
    if isinstance(config, DoraConfig):
        return DoraLinear, DoraExperts, DoraEmbedding
    if isinstance(config, VeraConfig):
        return VeraLinear, None, None
    if isinstance(config, LokrConfig):
        return LokrLinear, LokrExperts, None
    if config.use_mora:
        return MoraLinear, MoraExperts, None
    if config.loraga:
        return LoraGaLinear, None, None
    return (PissaLinear, PissaExperts, PissaEmbedding) if config.pissa else (LoraLinear, LoraExperts, LoraEmbedding)
