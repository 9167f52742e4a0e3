"""Wrong command lines: the message and the exit code."""

from __future__ import annotations

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST, Registry

HELP = "--help"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("generate", "generate: MODEL is missing. For help: llmsuite generate"),
        ("convert model", "convert: --layout and --output are missing. For help: llmsuite convert"),
        (
            "merge",
            "merge: SOURCE and --output are missing. For help: llmsuite merge",
        ),  # not MORE, of which there may be none
        ("data", "data: ACTION and INPUTS are missing. For help: llmsuite data"),
        ("serve m --port x", "--port: expected a number of a port, 0 to 65535, found 'x'. For help: llmsuite serve"),
        (
            "serve m --port 99999",
            "--port: expected a number of a port, 0 to 65535, found '99999'. For help: llmsuite serve",
        ),
        ("studio --port -1", "--port: expected a number of a port, 0 to 65535, found '-1'. For help: llmsuite studio"),
        (
            "generate m --temperature x",
            "--temperature: expected a number of at least 0, found 'x'. For help: llmsuite generate",
        ),
        ("generate m --top_p 2", "--top_p: expected a number from 0 to 1, found '2'. For help: llmsuite generate"),
        (
            "generate m --temperature -1",
            "--temperature: expected a number of at least 0, found '-1'. For help: llmsuite generate",
        ),
        (
            "generate m --num_devices 0",
            "--num_devices: expected a whole number above 0, found '0'. For help: llmsuite generate",
        ),
        (
            "generate m --num_devices 1.5",
            "--num_devices: expected a whole number above 0, found '1.5'. For help: llmsuite generate",
        ),
        (
            "generate m --engine fast",
            "--engine: expected one of dynamic, static, found 'fast'. For help: llmsuite generate",
        ),
        (
            "merge a -o b --dtype fp7",
            "--dtype: expected one of fp32, bf16, fp16, fp8, int8, q8_0, q5_1, q4_1, q4_k_m, found 'fp7'.",
        ),
        ("data foo x", "ACTION: expected one of explain, stats, index, prepare, found 'foo'. For help: llmsuite data"),
        ("serve m --prot 3", "--prot: this command has no such option; did you mean --port? For help: llmsuite serve"),
        ("runs list --x", "--x: this command has no such option. For help: llmsuite runs"),
        ("serve m n o", "n o: this command takes no more arguments. For help: llmsuite serve"),
        ("serve m --host", "--host: is without a value. For help: llmsuite serve"),
        ("serve m --adapters", "--adapters: is without a value. For help: llmsuite serve"),
    ],
)
def test_an_error_says_how_to_correct_it(
    words: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    first = err.splitlines()[0]
    assert (out, first.startswith(output), first.endswith(HELP)) == ("", True, True), err
    assert "Literal" not in err
    assert "usage:" not in err


def test_missing_arguments_are_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(["merge", "a"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "merge: --output is missing. For help: llmsuite merge --help",
        "  --output: directory to write; must not exist",
    ]


def test_no_command(registry: Registry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("give a command, one of align, calibrate, ")
    assert all(name in err for name in registry.commands)


@pytest.mark.parametrize("more", [["--system", "Be brief."], ["--chat_template", "chatml"]])
def test_plain_text_has_no_turns(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "--prompt", "Hi", "--raw", *more]) == 2
    assert "--raw: continues plain text, which has no turns; leave out" in capsys.readouterr().err
