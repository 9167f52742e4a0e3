"""Command lines that are wrong: what is said, and the exit code."""

from __future__ import annotations

import pytest

from llmsuite.cli.main import main
from llmsuite.plugins.manager import ALLOW_LIST, Registry

HELP = "--help tells more"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate", "generate: MODEL is missing. llmsuite generate"),
        ("convert model", "convert: --layout and --output are missing. llmsuite convert"),
        ("merge", "merge: SOURCE and --output are missing. llmsuite merge"),  # not MORE, of which there may be none
        ("data", "data: ACTION and INPUTS are missing. llmsuite data"),
        ("serve m --port x", "--port: expected a number of a port, 0 to 65535, found 'x'. llmsuite serve"),
        ("serve m --port 99999", "--port: expected a number of a port, 0 to 65535, found '99999'. llmsuite serve"),
        ("studio --port -1", "--port: expected a number of a port, 0 to 65535, found '-1'. llmsuite studio"),
        ("generate m --temperature x", "--temperature: expected a number of at least 0, found 'x'. llmsuite generate"),
        ("generate m --top_p 2", "--top_p: expected a number from 0 to 1, found '2'. llmsuite generate"),
        (
            "generate m --temperature -1",
            "--temperature: expected a number of at least 0, found '-1'. llmsuite generate",
        ),
        ("generate m --num_devices 0", "--num_devices: expected a whole number above 0, found '0'. llmsuite generate"),
        (
            "generate m --num_devices 1.5",
            "--num_devices: expected a whole number above 0, found '1.5'. llmsuite generate",
        ),
        ("generate m --engine fast", "--engine: expected one of dynamic, static, found 'fast'. llmsuite generate"),
        (
            "merge a -o b --dtype fp7",
            "--dtype: expected one of fp32, bf16, fp16, fp8, int8, q8_0, q5_1, q4_1, q4_k_m, found 'fp7'.",
        ),
        ("data foo x", "ACTION: expected one of explain, stats, index, prepare, found 'foo'. llmsuite data"),
        ("serve m --prot 3", "--prot: this command has no such option; did you mean --port? llmsuite serve"),
        ("runs list --x", "--x: this command has no such option. llmsuite runs"),
        ("serve m n o", "n o: this command takes no further words. llmsuite serve"),
        ("serve m --host", "--host: is without a value. llmsuite serve"),
        ("serve m --adapters", "--adapters: is without a value. llmsuite serve"),
    ],
)
def test_what_is_wrong_and_what_would_be_right(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    first = err.splitlines()[0]
    assert (out, first.startswith(said), first.endswith(HELP)) == ("", True, True), err
    assert "Literal" not in err
    assert "usage:" not in err


def test_what_is_missing_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(["merge", "a"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "merge: --output is missing. llmsuite merge --help tells more",
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
