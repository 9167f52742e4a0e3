"""The command line in a process of its own: what it imports, its exit codes, and readers that go away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

HEAVY = {
    "datasets", "huggingface_hub", "matplotlib", "numpy", "paddle", "paddlenlp", "pandas", "pyarrow", "requests",
    "scipy", "tokenizers", "torch", "transformers",
}  # fmt: skip
"""Packages that commands which only look at recipes do not need."""
LIGHT = f"""
import sys
from llmsuite.cli.main import main

for words in sys.stdin.read().splitlines():
    try:
        code = main(words.split())
    except SystemExit as left:
        code = left.code
    print(code, words, file=sys.stderr)
    heavy = {HEAVY} & set(sys.modules)
    assert not heavy, (words, heavy)
"""
ENVIRONMENT = {**os.environ, "LLMSUITE_PLUGINS": ""}


def llmsuite(*words: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmsuite", *words]
    return subprocess.run(
        command, cwd=cwd, env={**ENVIRONMENT, **changes}, capture_output=True, text=True, check=False, timeout=120
    )


SLOW = {"jinja2", "jsonargparse", "numpy", "packaging", "paddle", "pydantic", "rich", "yaml"}
"""Packages that take long to import."""


def imported(*words: str, **variables: str) -> set[str]:
    """The packages that a command imports."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "llmsuite", *words],
        cwd=ROOT, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    assert len(lines) > 50, process.stderr
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("words", ["--help", "--version"])
def test_what_needs_no_command_imports_no_slow_package(words: str) -> None:
    assert imported(words) & SLOW == set()


@pytest.mark.parametrize(
    "words", ["list stages", "list recipes", "list formats", "list keys", "run --help", "plan --help"]
)
def test_commands_that_read_no_recipe_import_their_parser_only(words: str) -> None:
    assert imported(*words.split()) & SLOW == {"jsonargparse", "yaml"}, "jsonargparse imports yaml"


@pytest.mark.parametrize(
    "line", ["llmsuite ", "llmsuite run recipes/llama/d", "llmsuite run recipes/llama/dpo.json --dpo.loss="]
)
def test_a_press_of_tab_imports_no_slow_package(line: str, tmp_path: Path) -> None:
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    answers = tmp_path / "answers"
    found = imported(**asked, _ARGCOMPLETE_STDOUT_FILENAME=str(answers))
    assert found & SLOW == set()
    assert answers.read_text()


def test_looking_needs_no_paddle(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    good = write_recipe()
    bad = write_recipe({"seed": -1}, name="bad.json")
    expected = {
        "--help": 0,
        "--version": 0,
        "run --help": 0,
        f"validate {good}": 0,
        f"validate {good} --smoke": 0,
        f"validate {bad}": 2,
        **{
            f"list {what}": 0
            for what in ("stages", "models", "recipes", "devices", "formats", "loggers", "layouts", "keys")
        },
        f"show {good}": 0,
        f"show {good} --smoke --json": 0,
        "schema": 0,
        "plugins list": 0,
        "plugins info builtin": 0,
        f"run {good} --launch.nnodes=2": 2,
    }
    result = subprocess.run(
        [sys.executable, "-c", LIGHT],
        input="\n".join(expected),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    codes = [line.split(" ", 1) for line in result.stderr.splitlines() if line[:2] in ("0 ", "2 ")]
    assert {words: int(code) for code, words in codes} == expected


def test_exit_codes_and_streams(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = write_recipe({"train.max_step": 1})
    bad = llmsuite("validate", "recipe.json", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if 'max_step"' in text)
    assert bad.stderr == f"recipe.json:{line}:3: train.max_step: unknown key; did you mean 'max_steps'?\n"
    write_recipe()
    good = llmsuite("validate", "recipe.json", "--seed", "3", cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("recipe.json: ok (dpo, llama, ")
    odd = llmsuite("validate", "recipe.json", "--sead", cwd=tmp_path)
    assert (odd.returncode, odd.stdout) == (2, "")


def test_words_that_are_no_utf8(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    write_recipe()
    result = llmsuite("validate", "recipe.json", "--output_dir=\udcff", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "--output_dir=\\udcff: is not UTF-8\n")


@pytest.mark.parametrize("words", [["list", "stages"], ["list", "keys"], ["schema"], ["--help"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    """`llmsuite list keys | head -1` gives no traceback and no other output."""
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "llmsuite", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 0


INTERRUPTED = """
import os, signal, sys

class Finder:
    left = {number}

    def find_spec(self, name, path=None, target=None):
        Finder.left -= 1
        if not Finder.left:
            os.kill(os.getpid(), signal.SIGINT)

from llmsuite.__main__ import main
sys.meta_path.insert(0, Finder())
code = main()
assert Finder.left <= 0, "there are fewer imports"
sys.exit(code)
"""


@pytest.mark.further
@pytest.mark.parametrize("number", [1, 10, 100, 300, 600, 1000, 1500])
def test_ctrl_c_while_it_imports(number: int, tmp_path: Path) -> None:
    """In front of the import with this number, until some way into Paddle."""
    words = ["run", "recipes/llama/sft.json", "--smoke", "--launch.num_devices=1", "--parallel={}"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(number=number), *words, "--train.max_steps=1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, "")


CONVERTED = INTERRUPTED.replace(
    "os.kill(os.getpid(), signal.SIGINT)",
    """
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("initialization failed") from None
""",
)


@pytest.mark.further
@pytest.mark.parametrize("number", [10, 300, 1000, 1500])
def test_ctrl_c_that_an_import_makes_another_error_of(number: int, tmp_path: Path) -> None:
    """The initialisation of a C++ module such as Paddle does so."""
    words = ["run", "recipes/llama/sft.json", "--smoke", "--launch.num_devices=1", "--parallel={}"]
    done = subprocess.run(
        [sys.executable, "-c", CONVERTED.format(number=number), *words, "--train.max_steps=1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr


def test_nothing_is_imported_before_ctrl_c_is_caught() -> None:
    """Neither by `python -m llmsuite` nor by the script of that name, which imports the package before `__main__`."""
    words = "import sys; before = {*sys.modules}; import llmsuite.__main__; print(sorted({*sys.modules} - before))"
    found = subprocess.run([sys.executable, "-S", "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "['llmsuite', 'llmsuite.__main__']\n"


FORGETS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    print("forgotten", flush=True)
time.sleep(100)
"""


def test_ctrl_c_that_an_import_forgets(tmp_path: Path) -> None:
    """Modules that Cython made ask for `backports_abc` when they are imported, and clear any error of that."""
    (tmp_path / "late.py").write_text(FORGETS)
    start = time.monotonic()
    done = llmsuite("--plugin", "late.py", "list", "stages", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "forgotten\n", "")
    assert time.monotonic() - start < 90


def test_ctrl_c_is_not_repeated_to_what_cleans_up(tmp_path: Path) -> None:
    words = """
from llmsuite.__main__ import _install_interrupt_handler
_install_interrupt_handler()
try:
    import late
except KeyboardInterrupt:
    time.sleep(0.3)
    print("cleaned")
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    time.sleep(0.3)
    print("cleaned")
"""
    (tmp_path / "late.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    words = f"import os, signal, sys, time\nsys.path.insert(0, {str(tmp_path)!r}){words}"
    found = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "cleaned\ncleaned\n", "")


def test_ctrl_c_while_processes_of_a_pool_start(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a document"}\n')
    program = """
import multiprocessing.context, signal, sys
start = multiprocessing.context.SpawnProcess.start
def interrupted(process):
    start(process)
    signal.raise_signal(signal.SIGINT)
multiprocessing.context.SpawnProcess.start = interrupted
from llmsuite.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
    (tmp_path / "program.py").write_text(program)
    words = ["data", "index", "corpus.jsonl", "--tokenizer", str(ROOT / "data" / "tokenizer"), "-o", "out/corpus"]
    found = subprocess.run(
        [sys.executable, "program.py", *words, "--workers", "2"],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert found.returncode == 130, found.stderr
    assert "Traceback" not in found.stderr
    assert not list((tmp_path / "out").glob("corpus*"))


@pytest.mark.further
@pytest.mark.parametrize("moment", ["atexit.register(late)", "threading._register_atexit(late)", "object = Late()"])
def test_ctrl_c_while_python_ends(moment: str, tmp_path: Path) -> None:
    """The work of the command is done, and its exit code says so."""
    late = """
import atexit, os, signal, sys, threading
def late(): os.kill(os.getpid(), signal.SIGINT)
class Late:
    kill, pid, number = os.kill, os.getpid(), signal.SIGINT  # a module may be deleted by then
    def __del__(self): self.kill(self.pid, self.number)
"""
    program = f"{late}{moment}\nfrom llmsuite.__main__ import main\nsys.exit(main())"
    words = [sys.executable, "-c", program.replace("self.kill", "Late.kill"), "list", "stages"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sft" in done.stdout


def test_ctrl_c_within_code_that_is_text(tmp_path: Path) -> None:
    """Dataclasses and named tuples are made from text on import: CPython remembers the interrupt as unhandled."""
    (tmp_path / "late.py").write_text("exec('raise KeyboardInterrupt')\n")
    done = llmsuite("--plugin", "late.py", "list", "stages", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")
