"""Protocol of adapters on matrices: how a method changes one, starts, is sharded, merged and stored.

A method derives from `AdapterMethod`; its layers are in a module of their own. Importing a method imports neither
Paddle nor NumPy, without which recipes are checked.

Shapes: I inputs and O outputs of a matrix W [I, O], R rank of its adapter; a stack of E experts is [E, I, O].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmsuite.base.strict_json import Kind
from llmsuite.base.typing import ReadSlice

if TYPE_CHECKING:
    import numpy as np

Array = Any
"""A NumPy array or a Paddle tensor: merging uses operators that both have."""


@dataclasses.dataclass(frozen=True)
class AdapterParameter:
    """One parameter of an adapter; in the model it stands next to the `weight` of its module."""

    by_inputs: int | None = None
    """Dim that tensor parallelism cuts where it cuts W along its inputs; None for a full copy on each rank."""
    by_outputs: int | None = None
    """Dim that it cuts where it cuts W along its outputs."""
    is_trained: bool = True
    """False for a parameter that stays at its initial value; it is saved with the others."""
    partial_gradient: Literal["never", "tokens", "shard"] = "never"
    """Case in which each rank has a part of its gradient. tokens: where W is cut along its inputs, as each rank has its
    own tokens of the output with sequence parallelism. shard: wherever W is cut."""


class AdapterLayers(NamedTuple):
    """The layers with an adapter: classes that are constructed as `cls(layer, config)` with the layer that they replace
    and an `AdapterConfig`. They derive from `llmsuite.adapters.layers.adapter.Adapter`."""

    linear: type
    """Layer in place of a `paddle.nn.Linear`."""
    experts: type | None = None
    """Layer in place of a `llmsuite.models.experts.GroupedLinear`; None where `on_experts` has the reason."""
    embedding: type | None = None
    """Layer in place of a `paddle.nn.Embedding`; None where `on_embedding` has the reason."""


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The settings that all adapters of a model share."""

    method: AdapterMethod
    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    """Dropout probability of their inputs in training."""
    rslora: bool = False
    """True for a scale of alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    lora_plus_ratio: float = 1.0
    """Learning rate of a factor B divided by that of A (LoRA+, Hayou et al. 2024, arXiv 2402.12354)."""
    share_first: bool = False
    """True where the matrices of one input share A, see `llmsuite.adapters.shared_first`."""
    init_shards: int = 1
    """Number of parts of A, each of which starts as that of a matrix with its own inputs only."""

    @property
    def scale(self) -> float:
        """Factor of the outputs of the adapters: alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class AdaptedModel:
    """The model that initial values of adapters depend on."""

    read: ReadSlice
    """Values of its parameters: (name, shape, index) -> slice. Matrices are not quantised."""
    seed: int
    """Seed of the recipe."""
    shapes: Mapping[str, Sequence[int]]
    """Shape of every parameter of the full model."""
    config: AdapterConfig
    embedding: str | None = None
    """Name of the embedding module."""
    rounded: Callable[[str, np.ndarray], np.ndarray] = lambda module, matrix: matrix
    """Maps a matrix, or full columns of it, to what the model multiplies by: other values where it is quantised."""
    rounds_in_full: bool = False
    """True where `rounded` needs full matrices, because the scales of all columns depend on each other."""
    is_cut_by_inputs: Callable[[str], bool] = lambda module: False
    """Returns True for the name of a matrix that tensor parallelism cuts along its inputs."""


class PaddleNlpFiles:
    """The files of a method that PaddleNLP does not save as LoRA: one with the configuration, and a pickle with the
    parameters. A subclass for each such method says what is in them."""

    label: str
    """Name of the method in messages."""
    config_name: str
    """Name of the file with the configuration."""
    tensors_name: str
    """Name of the pickle, in which a parameter is called `MODULE.KIND`."""
    kinds: Mapping[str, str]
    """Our kind of each parameter of an adapter, by its KIND there."""
    key_types: Mapping[str, Kind] = {}
    """Types of the keys of the configuration that are read, besides those that PEFT has too."""

    def peft_config(self, path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the keys of PEFT's adapter_config.json: of LORA with `stores_pair`.

        Args:
            path: of its file, for messages.
            config: content of the file.

        Raises:
            UserError: the adapters cannot be used.
        """
        raise AssertionError(f"{type(self).__name__} has to define `peft_config`")

    def problem(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """With `stores_pair`: the reason why stored parameters of a matrix cannot be folded; None where they can.

        Args:
            module: name of the matrix, for the message.
            shapes: of the parameters that are stored, by their kinds there.
        """
        return None

    def config(self, config: AdapterConfig, modules: Sequence[str], base: str | None) -> dict[str, Any]:
        """The content of the configuration of adapters that are written.

        Args:
            config: method, rank and scale of the adapters.
            modules: PaddleNLP's names of the matrices that have one.
            base: path or name of the model; None where it is not saved.
        """
        raise AssertionError(f"{type(self).__name__} has to define `config`")


class AdapterMethod:
    """A method of adapters; subclasses say how it works."""

    name: str
    """Its value of the recipe key `lora.method`."""
    help: str
    """One line on the parameters that it trains."""
    parameters: Mapping[str, AdapterParameter]
    """The parameters of an adapter by their last names: of all that it may have, whatever the rank."""
    is_init: bool = False
    """True for a value of `lora.init`: another start of method lora. Plugins register values of `lora.method` only."""
    api: int = 1
    """Version of the plugin contract that the method is written for."""

    # the model

    def layers(self) -> AdapterLayers:
        """Import the layers, which need Paddle."""
        raise AssertionError(f"{type(self).__name__} has to define `layers`")

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of an adapter on one matrix, in the order in which the layer creates them.

        Raises:
            UserError: the rank does not suit the matrix.
        """
        raise AssertionError(f"{type(self).__name__} has to define `shapes`")

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """Initial values of adapters, with which a model computes the same as without them: a function (name, shape,
        index) -> slice, float32, of the parameters of this method. It has the same values on every mesh: see
        `llmsuite.models.initial_values` for random ones."""
        raise AssertionError(f"{type(self).__name__} has to define `initial`")

    def merged(self, weight: Array, parameters: Mapping[str, Array], scale: float) -> Array:
        """W with its adapter merged into it. All are float32, except W, which may have the dtype of the model.

        Args:
            weight: W [I, O], or slices of it along `merges_slices`; as a Paddle tensor also a stack [E, I, O].
            parameters: of the adapter, by kind, cut in the same way.
            scale: factor of the output of the adapter.
        """
        raise AssertionError(f"{type(self).__name__} has to define `merged`")

    merges_slices: Sequence[int] = ()
    """Dims of W along which a slice is merged from the same slices of W and of the parameters: 0 inputs, 1 outputs."""

    # the recipe

    on_experts: str = "it has no layer for a stack of routed experts"
    """Reason why routed experts are refused; empty where they are not."""
    on_embedding: str = "it has no layer for an embedding"
    """Reason why the embedding is refused; empty where it is not."""
    supports_padding: bool = False
    """True where outputs of W may be padded, as those of lm_head are for tensor parallelism."""
    fits_any_rank: bool = False
    """True where every rank suits every matrix, so that `shapes` refuses none."""
    supports_programs: bool = True
    """False where the backward pass recomputes the adapter, which programs compiled by to_static do not."""
    refused_keys: Mapping[str, str] = {}
    """Keys of the section `lora` that have to keep their defaults -> the end of the message."""
    needs_gradients: bool = False
    """True where the initial values come from gradients of the first batches (`llmsuite.engine.lora_ga`)."""
    is_plain: bool = False
    """True for LoRA alone: the product of two factors, which starts at zero. There are faster forms of its layers."""

    # memory and traffic of a step

    keeps_input: bool = True
    """True where the backward pass needs the input of the layer for a gradient of the adapter."""
    num_sums: int = 1
    """Number of products [..., R] that ranks sum where W is cut along its inputs."""
    sums_norms: bool = False
    """True where ranks sum the squared norms of the columns of W where it is cut along its inputs."""

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        """Elements that an adapter keeps of each token for the backward pass, next to its input."""
        return float(rank)

    # files

    stores_pair: bool = False
    """True where files have a pair of LoRA's factors A and B, see `folded`. Otherwise they have the parameters
    themselves, as `base_model.model.MODULE.KIND`, which other libraries do not read."""
    stored_vectors: Sequence[str] = ()
    """With `stores_pair`: the parameters, vectors [O], that files have next to the pair."""
    pair_parts: Mapping[str, str] = {}
    """With `stores_pair` and a `flag`: the other parameters that files of PEFT or PaddleNLP have next to A and B, where
    they are called `MODULE.lora_PART`: the kind of each by its PART."""
    stored_kinds: Sequence[str] = ()
    """Without `stores_pair`: the parameters that files may have, where they are more than `parameters`."""
    flag: str = ""
    """Key of PEFT's or PaddleNLP's configuration that is true for this method; empty for none."""
    paddlenlp: PaddleNlpFiles | None = None
    """The files that PaddleNLP has for this method alone; None where it has none, or those of LoRA."""
    peft_type: str = ""
    """Value of `peft_type` in adapter_config.json. Empty for LORA with `stores_pair`, and otherwise for a name that no
    other library knows."""
    scale_keys: tuple[str, str] | None = ("lora_alpha", "r")
    """Without `stores_pair`: keys of adapter_config.json with alpha and the rank; None for a method without scale."""

    def type_in_files(self) -> str:
        """The value of `peft_type` in adapter_config.json."""
        return self.peft_type or ("LORA" if self.stores_pair else f"LLMSUITE_{self.name.upper()}")

    def folded(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """With `stores_pair`: the pair that files have for the parameters of one adapter, and the `stored_vectors`."""
        return dict(parameters)

    def folded_config(self, config: AdapterConfig) -> AdapterConfig:
        """The configuration of the adapters that `folded` returns."""
        return config

    def peft_keys(self, config: AdapterConfig) -> dict[str, Any]:
        """Without `stores_pair`: the keys of adapter_config.json, in addition to those of all methods."""
        return {
            "peft_type": self.type_in_files(),
            "lora_alpha": config.alpha,
            "use_rslora": config.rslora,
            "lora_dropout": config.dropout,
        }

    def fits(self, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...], rank: int | None) -> bool:
        """Without `stores_pair`: True where the shapes of stored parameters are valid for a matrix [I, O].

        Args:
            stored: shapes by kind.
            shape: I and O.
            rank: the rank that adapter_config.json names; None where it names none.
        """
        return rank is not None and dict(stored) == self.shapes(rank, *shape)


METHODS: dict[str, AdapterMethod] = {}
"""Each method by its value of `lora.method`, or of `lora.init`. `llmsuite.adapters.methods` adds those of llmsuite, the
registry those of plugins. One table for a process: names of parameters have to be understood everywhere, also where
there is no registry."""


def find_method(method: str = "lora", init: str = "default") -> AdapterMethod:
    """The method of the recipe keys `lora.method` and `lora.init`."""
    return METHODS[method] if init == "default" else METHODS[init]


def zeros(index: Sequence[slice]) -> np.ndarray:
    """Zeros of the shape of a slice, float32."""
    import numpy as np

    return np.zeros([part.stop - part.start for part in index], "float32")


def split(name: str) -> tuple[str, str]:
    """The module and the kind of a parameter of an adapter, from its name."""
    module, _, kind = name.rpartition(".")
    return module, kind
