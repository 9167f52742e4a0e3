"""Completions of a shell when Tab is pressed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST, Registry
from tests.support.paths import ROOT

_ASK = """
import json, os, sys
from llmsuite.cli.main import main

for line in json.load(sys.stdin):
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 8)
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line.encode()))}
        main([])  # which ends the process
    os.close(write)
    with open(read) as answer:
        print(json.dumps([word.strip() for word in answer.read().split(chr(11)) if word.strip()]))
    assert os.wait()[1] == 0, line
"""
ENVIRONMENT = {
    **os.environ, ALLOW_LIST: "", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip


def complete(*lines: str, cwd: Path = ROOT) -> list[list[str]]:
    """The words that bash gets for each line."""
    variables = {"_ARGCOMPLETE": "1", "COMP_TYPE": "9", "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:"}
    process = subprocess.run(
        [sys.executable, "-c", _ASK], input=json.dumps(lines), cwd=cwd, env={**ENVIRONMENT, **variables},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_commands_are_completed(registry: Registry) -> None:
    every, some, shells = complete("llmsuite ", "llmsuite comp", "llmsuite completion f")
    assert {*registry.commands} <= {*every}
    assert (some, shells) == (["completion"], ["fish"])


def test_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    options, mine, ours = complete(
        "llmsuite run x.json --", "llmsuite run mi", "llmsuite run recipes/llama/dp", cwd=tmp_path
    )
    assert {"--smoke", "--resume"} <= {*options}
    assert (mine, ours) == (["mine.json"], ["recipes/llama/dpo.json"])


def test_keys_of_the_recipe_and_their_values() -> None:
    line = "llmsuite run recipes/llama/dpo.json --seed=1 "
    expected = {
        f"{line}--train.learning_r": ["--train.learning_rate"],
        f"{line}--dpo.be": ["--dpo.beta"],
        "llmsuite run recipes/llama/sft.json --dpo.be": [],
        f"{line}--model.config.num_hidden_l": ["--model.config.num_hidden_layers"],
        f"{line}--engine.precision=": ["fp32", "bf16", "fp16"],
        f"{line}--checkpoint.async_save ": ["true", "false"],
        f"{line}--train.log_": ["--train.log_steps"],
        "llmsuite list stages --train.log_": [],  # it takes no overrides
        "llmsuite list st": ["stages"],
        "llmsuite recipe new --method ": ["full", "lora", "qlora"],
        "llmsuite recipe from-t": ["from-trl"],
    }
    assert dict(zip(expected, complete(*expected))) == expected


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    lines = "llmsuite run bad.json --train.max_s", "llmsuite run 'bad.json --train.max_s"
    assert complete(*lines, cwd=tmp_path) == [["--train.max_steps"], []]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-plugins", "completion", shell]) == 0
    script = capsys.readouterr().out
    assert "llmsuite" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    """The complete path: the script in a bash, and its completions of a line."""
    executable = tmp_path / "llmsuite"
    executable.write_text(f"#!{sys.executable}\nimport sys\nfrom llmsuite.__main__ import main\nsys.exit(main())\n")
    executable.chmod(0o755)
    variables = """
eval "$(llmsuite completion bash)"
COMP_LINE="llmsuite run recipes/llama/dpo.json --train.learning_r"
COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
COMP_WORDS=(llmsuite run recipes/llama/dpo.json --train.learning_r); COMP_CWORD=3
function=$(complete -p llmsuite | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function llmsuite --train.learning_r recipes/llama/dpo.json 2>/dev/null
echo "${COMPREPLY[@]}"
"""
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["bash", "--norc", "-c", variables], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "--train.learning_rate", found.stderr
