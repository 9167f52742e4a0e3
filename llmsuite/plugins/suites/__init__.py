"""Recipes from the training arguments of other suites: `llmsuite recipe from-NAME FILE`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from llmsuite.contract.hookspecs import ConversionOptions, ConvertedRecipe, DataFormat, RewardSpec, SuiteSpec, hookimpl

if TYPE_CHECKING:
    from llmsuite.contract.registry import Registry

_PADDLENLP = "the arguments of PaddleNLP's llm/ scripts: JSON, or a shell script"
_OTHERS = {
    "llamafactory": "the arguments of llamafactory-cli: YAML or JSON",
    "trl": "the arguments of TRL's commands: YAML or JSON",
    "paddleformers": "the arguments of paddleformers-cli: YAML or JSON",
    "axolotl": "the arguments of axolotl train: YAML or JSON",
    "swift": "the arguments of swift: YAML, JSON or a shell script",
}


@hookimpl
def llmsuite_register_suites() -> list[SuiteSpec]:
    others = [
        SuiteSpec(name=name, help=text, convert=functools.partial(_convert_other, name))
        for name, text in _OTHERS.items()
    ]
    return [SuiteSpec(name="paddlenlp", help=_PADDLENLP, convert=_convert_paddlenlp), *others]


@hookimpl
def llmsuite_register_data_formats() -> list[DataFormat]:
    from llmsuite.plugins.suites.swift_formats import FORMATS

    return FORMATS


@hookimpl
def llmsuite_register_rewards() -> list[RewardSpec]:
    from llmsuite.plugins.suites.rewards import REWARDS

    return REWARDS


def _convert_paddlenlp(path: Path, registry: Registry, options: ConversionOptions) -> ConvertedRecipe:
    from llmsuite.plugins.suites.conversion.arguments import read_arguments
    from llmsuite.plugins.suites.paddlenlp.convert import convert

    return convert(read_arguments(path), path.name, registry, **vars(options))


def _convert_other(name: str, path: Path, registry: Registry, options: ConversionOptions) -> ConvertedRecipe:
    from llmsuite.plugins.suites.convert import convert, read_values
    from llmsuite.plugins.suites.known import SUITES

    suite = SUITES[f"from-{name}"]
    return convert(suite, read_values(path, suite), path.name, registry, **vars(options))
