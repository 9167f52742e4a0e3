"""Sampling parameters that a model's authors recommend, in its generation_config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.safe_files import is_file
from llmsuite.inference.sampling import Sampling

Choice = Literal["auto", "ignore"]
"""auto: values of the file are the defaults of parameters that are not set; ignore: the file is ignored."""
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Supported parameters."""
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """Default values for parameters of `Sampling` that neither a user nor a request has set."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values by parameter, of those in `NAMES`; the file may have only some, or none."""

    def fill(self, sampling: Sampling, given: Collection[str]) -> Sampling:
        """`sampling` with the defaults for all parameters that are not `given`."""
        return dataclasses.replace(sampling, **{k: v for k, v in self.values.items() if k not in given})

    @property
    def note(self) -> str | None:
        """Message for the user; None where there are no defaults."""
        if not self.values:
            return None
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"sampling defaults from generation_config.json: {shown}"


def read_defaults(directories: Sequence[Path], choice: Choice = "auto") -> SamplingDefaults:
    """Read the defaults from the first directory that has a generation_config.json; none with "ignore".

    With `do_sample` false answers are greedy by default, and parameters of random sampling are ignored. With
    `do_sample` true and no temperature, the temperature is 1, as in transformers. Without `do_sample` the values are
    used, as in vLLM.

    Raises:
        UserError: a value is invalid; names the file.
    """
    paths = [directory / "generation_config.json" for directory in directories]
    path = next((path for path in paths if is_file(path)), None)
    if choice == "ignore" or path is None:
        return SamplingDefaults()
    content = read_json_object(path)
    do_sample = content.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise UserError(f"{path}: do_sample is {do_sample!r}; it is true or false")
    values = {name: content[name] for name in NAMES if content.get(name) is not None}
    for name, value in values.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UserError(f"{path}: {name} is {value!r}; it has to be a number")
    if values.get("top_k") == -1:  # off, in vLLM
        values["top_k"] = 0
    if do_sample is False:
        values = {"temperature": 0.0, **{k: v for k, v in values.items() if k not in _SAMPLING_ONLY}}
    elif do_sample:
        values = {"temperature": 1.0, **values}
    try:
        Sampling(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SamplingDefaults(values)
