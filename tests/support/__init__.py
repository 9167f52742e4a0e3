"""What tests and their tools share: models, rows, servers and cases."""

import sys
from pathlib import Path

if "pytest" in sys.modules:
    import pytest

    # so that an assertion in here tells its values, as one in a test does
    pytest.register_assert_rewrite(*(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py")))
