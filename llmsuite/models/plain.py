"""For families whose models are plain Paddle: a shape and names without a counterpart in HF transformers. Imports no
Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import Self

from llmsuite.models.hf_tensors import HfTensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainShape:
    """Base of the shapes: config.json has their fields as they are. One without a field `vocab_size` is that of a model
    that reads no tokens, and needs no tokenizer."""

    model_type: ClassVar[str]
    """That of config.json, by which the family is found again: one of `ModelFamily.hf_model_types`."""

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """The shape in a config.json."""
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data})

    def to_hf(self) -> dict[str, Any]:
        """A config.json."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Fields that are wrong, and why; for subclasses."""
        return iter(())


@dataclasses.dataclass(frozen=True)
class PlainNames:
    """`ModelFamily.names` of models whose files have the tensors by the names and in the orientation of Paddle."""

    parameter_names: Callable[[Any], Sequence[str]]
    """Shape to the names of all parameters, in the order of `named_parameters()`."""

    def is_linear(self, name: str) -> bool:
        """Nothing is stored transposed."""
        return False

    def hf_tensors(self, name: str, config: Any) -> HfTensors:
        """Where a parameter lies: under its own name."""
        return HfTensors((name,))

    def from_hf(self, name: str, config: Any) -> str:
        """The parameter that a tensor of a file is: the one of its name."""
        return name

    def paddlenlp_prefix(self, config: Any) -> None:
        """There is no other layout."""


def reads_tokens(config: Any) -> bool:
    """Whether models of a shape read tokens, and so a recipe has to name a tokenizer. None, a shape with problems of
    its own, counts as one of these."""
    return config is None or hasattr(config, "vocab_size")
