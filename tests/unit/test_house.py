"""The plan of the house: which room may import which, and how large anything in it may be.

`ruff check` limits how complicated a function may be; see pyproject.toml.
"""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.house import LIGHT, Trees, house, importers, imports, parse
from tests.support.paths import ROOT

LAYERS = (
    ("base",),
    ("devices",),
    ("models", "launch"),
    ("adapters", "contract"),
    ("checkpoint", "parallel"),
    ("data", "observe"),
    ("recipe", "inference"),
    ("planning", "rl", "serving"),
    ("engine",),
    ("stages",),
    ("builtin", "cli", "plugins", "testing"),
)
"""Rooms by floor, lowest first. A room imports itself and rooms of the floors below, be it inside a function or for
types only."""
ENTRANCE = "api"
"""The module of the Python API, which imports rooms of all floors, and which none of them imports."""
MAX_FLOORS = 11
MAX_FILE = 800
MAX_FUNCTION = 100
SHORTER = {"train_step": 60}
"""Functions everybody reads, and how many lines they may have."""


def room_of(module: str) -> str | None:
    """The room a module is in; None for the package itself and `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def arrows_upward(trees: Trees) -> list[str]:
    """Imports of rooms that are not on a floor below."""
    layer = {room: height for height, rooms in enumerate((*LAYERS, (ENTRANCE,))) for room in rooms}
    found = []
    for module, target, line in imports(trees):
        room = room_of(module)
        other = room_of(target)
        if room is not None and other is not None and room != other and layer[other] >= layer[room]:
            found.append(f"{module}:{line} imports {target}")
    return found


def floors(trees: Trees) -> dict[str, int]:
    """The floor of each room by its imports: the number of rooms in the longest chain of imports that it begins. Of
    rooms that import each other, numbers above those of any chain."""
    below: dict[str, set[str]] = {room: set() for module in trees if (room := room_of(module)) is not None}
    for module, target, _ in imports(trees):
        room = room_of(module)
        other = room_of(target)
        if room is not None and other is not None and room != other:
            below[room].add(other)
    found = dict.fromkeys(below, 1)
    for _ in below:
        for room, others in below.items():
            found[room] = 1 + max((found[other] for other in others), default=0)
    return found


def cycles(trees: Trees) -> list[list[str]]:
    """Modules that import each other, by Tarjan's strongly connected components."""
    graph: dict[str, list[str]] = {name: [] for name in trees}
    for module, target, _ in imports(trees):
        graph[module].append(target)
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for target in graph[module]:
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == numbers[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in numbers:
            visit(module)
    return found


def docstrings(trees: Trees) -> Iterator[tuple[str, int, str]]:
    """Module, line and text of every docstring: of modules, classes, functions and attributes."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield name, node.lineno, node.value.value


def asked_by_methods(trees: Trees) -> list[str]:
    """Calls of `Path.exists` and its like, which raise OSError for names that no file can have."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
            if is_call and node.func.attr in ("exists", "is_file", "is_dir"):  # type: ignore[attr-defined]
                found.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    return found


ALSO_DATA = {"base", "factors"}
"""Names of methods of layers that other objects have for data."""


def methods_of_layers(trees: Trees) -> set[str]:
    """Names of the methods of all layers, and of the functions that their classes compute with."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    layers = {"Layer"}
    found = {"forward"}
    while True:
        new = [c for c in classes if c.name not in layers and {ast.unparse(b).split(".")[-1] for b in c.bases} & layers]
        if not new:
            return found - ALSO_DATA
        layers |= {c.name for c in new}
        for member in (member for c in new for member in c.body):
            if isinstance(member, ast.FunctionDef) and not member.decorator_list:
                found.add(member.name)
            elif isinstance(member, ast.Assign) and ast.unparse(member.value).startswith("staticmethod("):
                found |= {ast.unparse(target) for target in member.targets}


UPDATE_OF_DICT = re.compile(r"(vars\(.*\)|.*\.__dict__)\.update")


def patches(trees: Trees) -> list[str]:
    """Assignments of a method to an instance: by name, or past its class into its dict. A layer gets what it needs when
    it is made, or owns a part that is exchanged as a whole."""
    methods = methods_of_layers(trees)
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                attribute = node.args[1]
                is_method = isinstance(attribute, ast.Constant) and attribute.value in methods
                found += [f"{name}:{node.lineno}"] if is_method or ast.unparse(node.func) != "setattr" else []
                continue
            elif isinstance(node, ast.Call) and UPDATE_OF_DICT.fullmatch(ast.unparse(node.func)):
                names = {keyword.arg for keyword in node.keywords}
                found += [f"{name}:{node.lineno}"] if names & methods else []
                continue
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr in methods:
                    found += [f"{name}:{node.lineno}"] if ast.unparse(target.value) != "self" else []
                elif isinstance(target, ast.Subscript):
                    of = ast.unparse(target.value)
                    found += [f"{name}:{node.lineno}"] if of.endswith("__dict__") or of.startswith("vars(") else []
    return found


def too_long(trees: Trees) -> list[str]:
    """Functions with more lines than they may have."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > SHORTER.get(node.name, MAX_FUNCTION):
                    found.append(f"{name}.{node.name}: {lines} lines")
    return found


def test_every_room_has_a_layer() -> None:
    rooms = {room for module in house() if (room := room_of(module)) is not None}
    assert rooms == {ENTRANCE, *(room for layer in LAYERS for room in layer)}


def test_imports_go_down() -> None:
    assert arrows_upward(house()) == []


def test_rooms_lie_on_few_floors() -> None:
    found = floors(house())
    assert len(LAYERS) == max(found[room] for room in found if room != ENTRANCE) <= MAX_FLOORS


def test_floors_are_counted_by_imports() -> None:
    codes = {
        "llmsuite.base.errors": "",
        "llmsuite.data.rows": "def late():\n    from llmsuite.base import errors",
        "llmsuite.engine.step": "import llmsuite.data.rows\nimport llmsuite.engine.loop",
        "llmsuite.engine.loop": "from llmsuite.base import errors",
        "llmsuite.__main__": "import llmsuite.engine.step",
    }
    trees = {name: ast.parse(code) for name, code in codes.items()}
    assert floors(trees) == {"base": 1, "data": 2, "engine": 3}
    trees["llmsuite.base.errors"] = ast.parse("import llmsuite.engine.loop")
    assert max(floors(trees).values()) > 3


def test_no_modules_import_each_other() -> None:
    assert cycles(house()) == []


HTTP = ("urllib.request", "http.client", "urllib3", "requests", "httpx", "aiohttp", "fsspec")
"""What asks other machines over HTTP."""
WHOLE_RUN = {
    "llmsuite.cli.run": 2,
    "llmsuite.engine.activation_recording": 1,
    "llmsuite.engine.rehearsal": 1,
    "llmsuite.engine.trainer": 2,
    "llmsuite.plugins.align.command": 1,
    "llmsuite.plugins.rehearse.command": 1,
    "llmsuite.stages.infer": 1,
}
"""Modules with functions that take a `RunPlan`, and how many: they start a run, or prepare its start."""


def run_plans(trees: Trees) -> dict[str, int]:
    """Number of parameters annotated `RunPlan`, by module."""
    found: collections.Counter[str] = collections.Counter()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation is not None and "RunPlan" in ast.unparse(node.annotation):
                found[module] += 1
    return dict(found)


MAY_ASK = {
    "llmsuite.base.web.client": {"urllib.request", "http.client"},
    "llmsuite.base.web.connection": {"urllib.request", "http.client"},
    "llmsuite.data.remote": {"fsspec"},  # for what is not HTTP
    "llmsuite.base.hub.huggingface": {"requests", "httpx"},  # for errors that the library of the hub raises
    "llmsuite.base.hub.limited": {"requests", "urllib3"},  # limits of the requests of that library
    "llmsuite.base.hub.modelscope": {"requests"},
}


def test_one_client_asks_other_machines() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in house().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                found.setdefault(name, set()).update(h for h in HTTP if f"{target}.".startswith(f"{h}."))
    assert {name: asks for name, asks in found.items() if asks} == MAY_ASK


def test_docstrings_name_their_thing_first() -> None:
    assert [
        f"{module}:{line}: {text[:60]}" for module, line, text in docstrings(house()) if text.startswith("Of ")
    ] == []


def test_layers_are_made_not_patched() -> None:
    assert patches(house()) == []


def test_only_who_handles_a_whole_run_gets_its_whole_plan() -> None:
    """The others get the plans that they use: of the model, the data, the parallelism or the training."""
    assert run_plans(house()) == WHOLE_RUN


def test_functions_fit_on_a_screen() -> None:
    assert too_long(house()) == []


def test_the_file_system_is_asked_in_one_place() -> None:
    """In llmsuite.base.safe_files; but for members of an archive, and what is deleted."""
    others = ("llmsuite.data.archives", "llmsuite.base.locks")
    assert [place for place in asked_by_methods(house()) if place.partition(":")[0] not in others] == []


def test_files_are_short() -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / "llmsuite").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_FILE} == {}


@pytest.fixture
def crooked(tmp_path: Path) -> Trees:
    """A house that breaks each rule once."""
    files = {
        "base/errors.py": "def deep():\n    from llmsuite.engine import step\n",
        "engine/__init__.py": "",
        "engine/step.py": '"""Of a step."""\nfrom llmsuite.engine.loop import fit\n'
        + "def train_step():\n"
        + "    pass\n" * 60,
        "models/layers.py": (
            "class Norm(nn.Layer):\n    scale = staticmethod(scale)\n    def forward(self): self.eps = 1\n"
            "class Other(Norm):\n    def reset(self): pass\nnorm.forward = other\nnorm.scale = other\nnorm.eps = 2\n"
            "vars(norm)['eps'] = norm.__dict__['eps'] = 2\nsetattr(norm, 'reset', other)\nsetattr(norm, 'eps', 2)\n"
            "object.__setattr__(norm, 'eps', 2)\nvars(norm).update(forward=other)\nvars(norm).update(eps=2)\n"
        ),
        "engine/loop.py": (
            "from typing import TYPE_CHECKING\nimport llmsuite.base.errors\n"
            "if TYPE_CHECKING:\n    from llmsuite.engine import step\nlimit = 1\n'''Of it.'''\nlimit.exists()\n"
            "def fit(plan: 'resolve.RunPlan', *, other: RunPlan | None): pass\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "llmsuite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parse(tmp_path / "llmsuite")


def test_what_breaks_a_rule_is_found(crooked: Trees) -> None:
    assert arrows_upward(crooked) == ["llmsuite.base.errors:2 imports llmsuite.engine.step"]
    assert cycles(crooked) == [["llmsuite.base.errors", "llmsuite.engine.loop", "llmsuite.engine.step"]]
    assert [text for _, _, text in docstrings(crooked)] == ["Of it.", "Of a step."]
    assert asked_by_methods(crooked) == ["llmsuite.engine.loop:7"]
    assert run_plans(crooked) == {"llmsuite.engine.loop": 2}
    assert patches(crooked) == [f"llmsuite.models.layers:{line}" for line in (6, 7, 9, 9, 10, 12, 13)]
    assert too_long(crooked) == ["llmsuite.engine.step.train_step: 61 lines"]


def test_what_says_so_imports_no_paddle() -> None:
    """An import by other modules counts too: one that joins a module can make all its importers heavy."""
    heavy = importers(house(), frozenset({"paddle", "paddlenlp"}))
    light = {name for name, tree in house().items() if "Imports no Paddle" in (ast.get_docstring(tree) or "")}
    light |= {"llmsuite", "llmsuite.__main__", "llmsuite.api", "llmsuite.builtin"}
    light |= {name for name in house() if name.partition(".")[2].partition(".")[0] in LIGHT}
    assert len(light) > 200
    assert {name: heavy[name] for name in light & heavy.keys()} == {}


def test_imports_of_imports_are_found() -> None:
    texts = {
        "a": "from b import c",
        "b": "def late():\n    import paddle",
        "b.c": "try:\n    import d\nexcept ImportError:\n    pass",
        "d": "class D:\n    from paddle.nn import Layer",
        "e": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import paddle",
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert importers(trees, frozenset({"paddle"})) == {"a": "b.c", "b.c": "d", "d": "paddle.nn.Layer"}
