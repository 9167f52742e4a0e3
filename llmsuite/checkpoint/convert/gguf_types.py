"""Types of the tensors of a GGUF file, and quantisation to them.

Types with blocks of 32 are quantised by the library gguf, those of 256 (K-quants) by libgguf; both equal llama.cpp to
the byte. Q4_K_M is a mixture of them by the rules of llama.cpp's `llama-quant.cpp` (`llama_tensor_get_type_impl`),
without an importance matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.threads import map_in_threads, num_threads

DTYPES = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q5_1": "Q5_1",
    "q4_1": "Q4_1",
    "q4_k_m": "Q4_K_M",
}
"""Types of matrices: GGUF's names by those of the command line."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 7, "Q5_1": 9, "Q4_K_M": 15, "BF16": 32}
"""Numbers of gguf.LlamaFileType."""
_FEW_BITS = ("Q5_1", "Q4_1")
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The types with blocks of 32 that are used where rows are no multiple of 256."""
K_BLOCK = 256
BLOCK = 32


def tensor_type(dtype: str, tensor: str, row: int, config: Any, is_tied: bool) -> str:
    """The type of a matrix, a name of gguf.GGMLQuantizationType.

    Args:
        dtype: a value of `DTYPES`.
        tensor: its name in the file.
        row: length of its rows.
        config: of the model.
        is_tied: the embedding is also the output projection.
    """
    kind = dtype
    if dtype in _FEW_BITS and tensor in (_EMBEDDING, _OUTPUT):
        kind = "Q8_0"
    if dtype == "Q4_K_M":
        kind = _q4_k_m_type(tensor, config, is_tied)
        if row % K_BLOCK:
            kind = _FALLBACK[kind]
    if kind in ("F32", "F16", "BF16") or not row % BLOCK:
        return kind
    return "F16"


def _q4_k_m_type(tensor: str, config: Any, is_tied: bool) -> str:
    """The type of a matrix in Q4_K_M: Q4_K, except for the matrices to which a model is most sensitive."""
    if tensor == _OUTPUT or (is_tied and tensor == _EMBEDDING):
        return "Q6_K"
    number, _, part = tensor.removeprefix("blk.").partition(".")
    if part not in ("attn_v.weight", "ffn_down.weight"):
        return "Q4_K"
    layer = int(number)
    layers = config.num_hidden_layers
    eighth = layers // 8
    if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
        return "Q6_K"
    if part == "attn_v.weight" and _is_70b(config):
        return "Q5_K"
    return "Q4_K"


def _is_70b(config: Any) -> bool:
    """True where llama.cpp treats a model as one of 70B: many of its queries share a value head, which gets more
    bits."""
    kind = config.to_hf()["model_type"]
    shares = config.num_attention_heads != config.num_key_value_heads
    return config.num_hidden_layers == 80 and kind != "qwen3" and (shares or kind == "qwen2")


def quantised(value: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of a matrix [outputs, inputs] of float32, in rows; K-quants by several threads.

    Args:
        value: rows are multiples of the block.
        kind: a gguf.GGMLQuantizationType that is neither F32 nor F16.
    """
    if kind.name not in _FALLBACK:
        import gguf

        return np.ascontiguousarray(gguf.quantize(value, kind))
    library = k_quants()
    parts = np.array_split(value, min(len(value), 4 * num_threads()))
    return np.concatenate(list(map_in_threads(lambda rows: library.quantize_rows(rows, int(kind)), parts)))


def max_magnitude(kind: Any) -> float:
    """The largest weight for which scale and minimum of every block of a gguf.GGMLQuantizationType fit into fp16."""
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
