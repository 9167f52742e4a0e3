"""Fixtures that convert PaddleNLP's arguments to recipes."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ConvertedRecipe
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.paddlenlp.convert import convert
from tests.support.paddlenlp_arguments import Convert


@pytest.fixture
def converted(registry: Registry) -> Convert:
    def run(values: dict[str, Any], name: str = "x_argument.json", **options: Any) -> ConvertedRecipe:
        return convert(Arguments(dict(values)), name, registry, **options)

    return run
