"""Config and names for families whose models are plain Paddle, with no counterpart in HF transformers. Imports no
Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import Self

from llmsuite.models.hf_tensors import HfTensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainShape:
    """Base class of such configs: their fields are the keys of config.json. A model whose config has no field
    `vocab_size` reads no tokens, and needs no tokenizer."""

    model_type: ClassVar[str]
    """`model_type` in config.json, by which the family is found again: one of `ModelFamily.hf_model_types`."""

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """The config of the content of a config.json."""
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data})

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Pairs of a wrong field and the reason; for subclasses to define."""
        return iter(())


@dataclasses.dataclass(frozen=True)
class PlainNames:
    """`ModelFamily.names` of models whose files have the tensors with the names and the orientation of Paddle."""

    parameter_names: Callable[[Any], Sequence[str]]
    """Maps a config to the names of all parameters, in the order of `named_parameters()`."""

    def is_linear(self, name: str) -> bool:
        """False: no parameter is stored transposed."""
        return False

    def hf_tensors(self, name: str, config: Any) -> HfTensors:
        """The tensor of the same name."""
        return HfTensors((name,))

    def from_hf(self, name: str, config: Any) -> str:
        """The parameter of the same name."""
        return name

    def paddlenlp_prefix(self, config: Any) -> None:
        """None: there is no PaddleNLP layout."""


def reads_tokens(config: Any) -> bool:
    """True if models of a config read tokens, so that a recipe has to name a tokenizer; also for None, an invalid
    config."""
    return config is None or hasattr(config, "vocab_size")
