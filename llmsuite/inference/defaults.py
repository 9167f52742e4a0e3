"""Sampling parameters that a model's authors recommend, in its generation_config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.errors import UserError
from llmsuite.files import read_json_object
from llmsuite.inference.sampling import Sampling
from llmsuite.regular import is_file

Choice = Literal["auto", "ignore"]
"""Whether they are the defaults of what nobody sets."""
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Those that are taken."""
_OF_DRAWING = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """Values for parameters of `Sampling` that neither a user nor a request has set."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By the names of `NAMES`; the file may have only some, or none."""

    def fill(self, sampling: Sampling, given: Collection[str]) -> Sampling:
        """The parameters with the defaults of those that are not `given`."""
        return dataclasses.replace(sampling, **{k: v for k, v in self.values.items() if k not in given})

    @property
    def note(self) -> str | None:
        """What a user is told of them; None where there are none."""
        if not self.values:
            return None
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"sampling defaults from generation_config.json: {shown}"


def read_defaults(directories: Sequence[Path], choice: Choice = "auto") -> SamplingDefaults:
    """Those of the first of some directories that has a generation_config.json; none with "ignore".

    With `do_sample` false answers are greedy by default, and what is of drawing only does not count. With `do_sample`
    true and no temperature it is 1, as transformers has it. Without `do_sample` the values count, as in vLLM.

    Raises:
        UserError: naming the file and a value that cannot be one.
    """
    path = next((p for p in (d / "generation_config.json" for d in directories) if is_file(p)), None)
    if choice == "ignore" or path is None:
        return SamplingDefaults()
    content = read_json_object(path)
    do_sample = content.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise UserError(f"{path}: do_sample is {do_sample!r}; it is true or false")
    values = {name: content[name] for name in NAMES if content.get(name) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
            raise UserError(f"{path}: {name} is {value!r}; it has to be a number")
    if values.get("top_k") == -1:  # which is off in vLLM
        values["top_k"] = 0
    if do_sample is False:
        values = {"temperature": 0.0, **{k: v for k, v in values.items() if k not in _OF_DRAWING}}
    elif do_sample:
        values = {"temperature": 1.0, **values}
    try:
        Sampling(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SamplingDefaults(values)
