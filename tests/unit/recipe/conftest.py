"""What makes recipes of PaddleNLP's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.plugins.manager import Registry
from llmsuite.recipe.conversion.arguments import Arguments
from llmsuite.recipe.paddlenlp.convert import Converted, convert
from tests.unit.recipe.paddlenlp_arguments import Convert


@pytest.fixture
def converted(registry: Registry) -> Convert:
    def run(values: dict[str, Any], name: str = "x_argument.json", **options: Any) -> Converted:
        return convert(Arguments(dict(values)), name, registry, **options)

    return run
