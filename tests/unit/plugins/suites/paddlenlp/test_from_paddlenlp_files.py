"""Files of PaddleNLP's arguments, and the family of the model they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST, Registry
from llmsuite.plugins.suites.conversion.arguments import read_arguments
from llmsuite.plugins.suites.conversion.family import family_of
from llmsuite.plugins.suites.paddlenlp.convert import convert
from tests.support.paddlenlp_arguments import SFT, Convert


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen"),
        ("deepseek-ai/deepseek-llm-7b-base", "llama"),
        ("Qwen/Qwen1.5-7B", "qwen"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen"),
        ("Qwen/QwQ-32B", "qwen"),
        ("Qwen/Qwen3-8B", "qwen"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek"),
        ("deepseek-ai/DeepSeek-R1", "deepseek"),
        ("gpt2-medium-en", "gpt"),
    ],
)
def test_the_family_follows_the_model(name: str, family: str, registry: Registry) -> None:
    assert family_of(name, registry).name == family


SHELL = """#!/bin/bash
# --learning_rate 9 in a comment
name="llama2-13b"
export XPU_SIZE=1 # 94 MB
strings ${lib}/x.so | grep COM
PYTHONPATH=../:$PYTHONPATH  \\
python -u -m paddle.distributed.launch --xpus "0,1,2,3" --nnodes 2 --log_dir "output/$name" \\
    run_pretrain_auto.py \\
    --model_name_or_path "meta-llama/Llama-2-13b" \\
    --input_dir "./data" --output_dir=output/$name --split 949,50,1 \\
    --bf16 --learning_rate 0.00003 --do_train --to_static 1 --max_steps 10 --sharding "stage1" \\
    --pipeline_parallel_degree 4 --max_seq_length 4096 --odd a b 2>&1 | tee log
"""


def test_a_shell_script_is_read_as_its_arguments(converted: Convert, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SHELL)
    arguments = read_arguments(path)
    assert (arguments.num_devices, arguments.nnodes, arguments.device) == (4, 2, "xpu")
    assert arguments.values["odd"] == "a b"
    found = convert(arguments, path.name, registry, leave_out=["odd"])
    recipe = found.recipe
    assert recipe["stage"] == "pretrain"
    assert recipe["output_dir"] == "output/llama2-13b"
    assert recipe["engine"] == {"mode": "to_static", "precision": "bf16", "recompute": "none"}
    assert recipe["train"]["learning_rate"] == 3e-5
    assert recipe["launch"] == {"num_devices": 4, "nnodes": 2}
    assert recipe["device"] == "xpu"
    assert recipe["pretrain"]["split"] == "949,50,1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python run_dpo.py ./llama/dpo_argument.json", "the arguments are in ./llama/dpo_argument.json"),
        ("echo nothing", "no line starts a Python file"),
        ("python a.py --x 1\npython b.py --x 2", "2 lines start a Python file"),
        ('{"a": 1,}', "trailing comma"),
        ("python a.py 'x", "No closing quotation"),
    ],
)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_arguments(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_arguments(tmp_path / "absent")


def test_the_command_writes_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")  # what is installed here plays no part
    path = tmp_path / "sft_argument.json"
    target = tmp_path / "made" / "sft.json"
    path.write_text(json.dumps(SFT))
    assert main(["recipe", "from-paddlenlp", str(path), "-o", str(target)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {target}" in out
    assert "use_flash_attention = True: the device backend chooses its fused kernels" in out
    assert "to do: data.train: data/train.json is not a file" in out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train.json", "dev.json"):
        (tmp_path / "data" / name).write_text('{"src": "a", "tgt": "b"}\n' * 2)
    assert main(["validate", str(target)]) == 0
    capsys.readouterr()
    assert main(["recipe", "from-paddlenlp", str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(target.read_text())  # the report goes to stderr
    assert "have no counterpart" in captured.err
    assert main(["recipe", "from-paddlenlp", str(path), "-o", str(target)]) == 2
    path.write_text(json.dumps({**SFT, "max_length": 10**6}))
    assert main(["recipe", "from-paddlenlp", str(path)]) == 0
    assert "to do: data.max_length: is 1000000" in capsys.readouterr().err
    for words in (
        ["from-paddlenlp"],
        ["from-paddlenlp", str(path), "--preset", "x"],
        ["new", "--leave_out", "x"],
    ):
        assert main(["recipe", *words]) == 2
    path.write_text(json.dumps({**SFT, "reft": True}))
    assert main(["recipe", "from-paddlenlp", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, "add --leave_out reft" in captured.err) == ("", True)
    assert main(["recipe", "from-paddlenlp", str(path), "--leave_out", "reft"]) == 0
    assert "so the training differs:\n  reft = True" in capsys.readouterr().err
