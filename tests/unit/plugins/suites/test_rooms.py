"""The converter of PaddleNLP's files and the one of the other suites share `conversion`, and nothing else."""

from __future__ import annotations

from tests.support.house import house, imports

SUITES = "llmsuite.plugins.suites"


def part(module: str) -> str | None:
    """The part of the plugin that a module is in; None for another module, and for the one that registers all."""
    if module == SUITES or not module.startswith(f"{SUITES}."):
        return None
    package = module.removeprefix(f"{SUITES}.").partition(".")[0]
    return package if package in ("paddlenlp", "conversion") else "others"


def test_converters_do_not_know_each_other() -> None:
    pairs = {(part(module), part(target)) for module, target, _ in imports(house())}
    assert {(one, other) for one, other in pairs if one != other and None not in (one, other)} == {
        ("paddlenlp", "conversion"),
        ("others", "conversion"),
    }
