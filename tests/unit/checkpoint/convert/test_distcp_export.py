"""`--layout distcp`: what Paddle's own functions for distributed checkpoints read of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_merged_state_dict

from llmsuite.base.files import broken_file
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from tests.support import tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILIES, TOKENIZER


def written(tmp_path: Path, *options: str) -> tuple[Path, dict[str, np.ndarray]]:
    values = tiny_llama.write(tmp_path / "model", tokenizer=TOKENIZER)
    command = ["convert", str(tmp_path / "model"), "-o", str(tmp_path / "saved"), "--layout", "distcp", *options]
    assert main(command) == 0
    return tmp_path / "saved", values


@pytest.mark.parametrize(("dtype", "stored"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_paddle_merges_an_exported_model(tmp_path: Path, dtype: str, stored: str) -> None:
    saved, values = written(tmp_path, "--dtype", dtype, "--max-shard-size", "4KB")
    assert len([*saved.glob("*_0.distcp")]) > 2, "several files"
    assert all(path.stat().st_size < 8000 for path in saved.glob("*.distcp"))
    found = load_merged_state_dict(str(saved), offload=True, prefix="model")
    assert found.keys() == {tiny_llama.to_paddlenlp(name) for name in values}
    for name, value in values.items():
        tensor = found[tiny_llama.to_paddlenlp(name)]
        assert tensor.dtype == getattr(paddle, stored)
        expected = paddle.to_tensor(value).astype(stored)
        np.testing.assert_array_equal(tensor.astype("float32").numpy(), expected.astype("float32").numpy())


@pytest.mark.parametrize("options", [(), ("--split-num", "3")], ids=["one file", "several"])
def test_a_model_loads_an_exported_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    saved, values = written(tmp_path, *options)
    # of a nested dict Paddle 3.3.1 saves these keys, and it loads none
    state = {f"model.{tiny_llama.to_paddlenlp(name)}": paddle.zeros(value.shape) for name, value in values.items()}
    dist.load_state_dict(state, str(saved))
    for name, value in values.items():
        np.testing.assert_array_equal(state[f"model.{tiny_llama.to_paddlenlp(name)}"].numpy(), value)


def test_an_exported_model_is_read_again(tmp_path: Path) -> None:
    saved, values = written(tmp_path, "--split-num", "3")
    assert broken_file(saved) is None
    assert main(["merge", str(saved), "-o", str(tmp_path / "back")]) == 0
    assert tiny_llama.same(tiny_llama.read(tmp_path / "back"), values)
    assert open_model(tmp_path / "back", FAMILIES).config == CONFIG
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_fused_matrices(tmp_path: Path) -> None:
    saved, values = written(tmp_path, "--fused")
    found = load_merged_state_dict(str(saved), offload=True, prefix="model")
    assert found["llama.layers.0.self_attn.qkv_proj.weight"].shape == [24, 32]
    np.testing.assert_array_equal(found["lm_head.weight"].numpy(), values["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["fp8", "int8", "q8_0"])
def test_formats_that_distcp_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    tiny_llama.write(tmp_path / "model")
    command = ["convert", str(tmp_path / "model"), "-o", str(tmp_path / "saved"), "--layout", "distcp"]
    assert main([*command, "--dtype", dtype]) == 2
    assert f"--dtype {dtype}" in capsys.readouterr().err
    assert not (tmp_path / "saved").exists()
