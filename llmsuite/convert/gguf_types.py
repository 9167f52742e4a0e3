"""What the tensors of a GGUF file are stored as, and their bytes.

The blocks of 32 are the library gguf's, those of 256 (K-quants) libgguf's; both are llama.cpp's to the byte. Q4_K_M is
a mixture of them by the rules of llama.cpp's `llama-quant.cpp` (`llama_tensor_get_type_impl`), without an importance
matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.threads import in_threads, num_threads

DTYPES = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q5_1": "Q5_1",
    "q4_1": "Q4_1",
    "q4_k_m": "Q4_K_M",
}
"""What matrices are stored as, by the words of the command line and of GGUF."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 7, "Q5_1": 9, "Q4_K_M": 15, "BF16": 32}
"""Numbers of gguf.LlamaFileType."""
_FEW_BITS = ("Q5_1", "Q4_1")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What has blocks of 32 where rows are no whole blocks of 256."""
K_BLOCK, BLOCK = 256, 32


def stored_as(dtype: str, tensor: str, row: int, config: Any, is_tied: bool) -> str:
    """The type of a matrix, a name of gguf.GGMLQuantizationType.

    Args:
        dtype: a value of `DTYPES`.
        tensor: its name in the file.
        row: length of its rows.
        config: of the model.
        is_tied: whether the embedding is the output projection too.
    """
    kind = dtype
    if dtype in _FEW_BITS and tensor in (_EMBEDDING, _OUTPUT):
        kind = "Q8_0"
    if dtype == "Q4_K_M":
        kind = _of_mixture(tensor, config, is_tied)
        if row % K_BLOCK:
            kind = _NARROW[kind]
    return kind if kind in ("F32", "F16", "BF16") or not row % BLOCK else "F16"


def _of_mixture(tensor: str, config: Any, is_tied: bool) -> str:
    """Q4_K, but for the matrices that a model suffers from most."""
    if tensor == _OUTPUT or (is_tied and tensor == _EMBEDDING):
        return "Q6_K"
    number, _, part = tensor.removeprefix("blk.").partition(".")
    if part not in ("attn_v.weight", "ffn_down.weight"):
        return "Q4_K"
    layer, layers = int(number), config.num_hidden_layers
    eighth = layers // 8
    if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
        return "Q6_K"
    return "Q5_K" if part == "attn_v.weight" and _is_70b(config) else "Q4_K"


def _is_70b(config: Any) -> bool:
    """Whether llama.cpp takes a model for one of 70B, whose queries share so few values that these get a bit more."""
    kind, shares = config.to_hf()["model_type"], config.num_attention_heads != config.num_key_value_heads
    return config.num_hidden_layers == 80 and kind != "qwen3" and (shares or kind == "qwen2")


def quantised(value: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of a matrix [outputs, inputs] of float32, in rows; K-quants by several threads.

    Args:
        value: whole blocks in each row.
        kind: a gguf.GGMLQuantizationType that is neither F32 nor F16.
    """
    if kind.name not in _NARROW:
        import gguf

        return np.ascontiguousarray(gguf.quantize(value, kind))
    library = k_quants()
    parts = np.array_split(value, min(len(value), 4 * num_threads()))
    return np.concatenate(list(in_threads(lambda rows: library.quantize_rows(rows, int(kind)), parts)))


def largest(kind: Any) -> float:
    """The weight up to which every block of a gguf.GGMLQuantizationType has a scale and a least value in fp16."""
    fp16 = float(np.finfo("float16").max)
    return {"BF16": float("inf"), "Q8_0": 127 * fp16}.get(kind.name, fp16)


def k_quants() -> Any:
    """The library that quantises to K-quants. Raises UserError where it is missing."""
    try:
        import libgguf
    except ImportError as error:
        raise UserError(
            f"--dtype q4_k_m needs the package libgguf; install it with: {install_command('gguf')}. Or write fp16, and "
            "give that file to llama.cpp's llama-quantize"
        ) from error
    return libgguf
