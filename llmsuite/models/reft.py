"""Interventions on hidden states (LoReFT, Wu et al. 2024, arXiv 2404.03592), for one card.

Shapes: B rows, L length, D hidden, R rank.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import paddle
from paddle import nn

from llmsuite.errors import UserError
from llmsuite.models import token_values
from llmsuite.models.reft_shapes import BIAS, MODULE, ROTATION, SOURCE, reft_shapes
from llmsuite.models.rotation import positions
from llmsuite.models.targets import is_trained
from llmsuite.typing import Tensor


class Intervention(nn.Layer):
    """h + R (W^T h + b - R^T h) for the chosen tokens, R [D, R] with orthonormal columns (LoReFT, eq. 2).

    What is trained in place of R is any matrix of full rank, `reft_rotation`: R is its Q in a QR decomposition, the one
    whose other factor has a positive diagonal. So R stays orthonormal whatever the optimizer does. (paddlenlp's
    `LoreftIntervention` only begins with an orthonormal R; pyreft has Householder reflections.)
    """

    def __init__(self, size: int, rank: int):
        """
        Args:
            size: of a hidden state.
            rank: of the edit.
        """
        super().__init__()
        for name, shape in reft_shapes(size, rank).items():
            setattr(self, name, self.create_parameter(list(shape), is_bias=name == BIAS))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, L, D] to those with the chosen tokens edited."""
        return intervene(x, chosen(), *self.parts())

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What R is made of, W and b."""
        return getattr(self, ROTATION), getattr(self, SOURCE), getattr(self, BIAS)


def intervene(x: Tensor, is_chosen: Tensor, rotation: Tensor, source: Tensor, bias: Tensor) -> Tensor:
    """The formula of `Intervention`, on plain tensors.

    Args:
        x: [B, L, D].
        is_chosen: [B, L], 1 for tokens that are edited, else 0.
        rotation: [D, R].
        source: W, [D, R].
        bias: b, [R].
    """
    basis = orthonormal(rotation)
    further = (source - basis).astype(x.dtype)
    edit = (paddle.matmul(x, further) + bias) * is_chosen.unsqueeze(-1).astype(x.dtype)
    return x + paddle.matmul(edit, basis.astype(x.dtype), transpose_y=True)


def orthonormal(matrix: Tensor) -> Tensor:
    """Q [D, R] of the QR decomposition of a matrix [D, R] whose R has a positive diagonal, in float32.

    By Cholesky factors of the Gram matrix, twice, as the first leaves an error that grows with the square of the
    condition number (CholeskyQR2, Yamamoto et al. 2015, ETNA 44): a few products, each with a gradient, where a
    decomposition by reflections has no sign that is continuous.
    """
    found = matrix.astype("float32")
    for _ in range(2):
        gram = paddle.matmul(found, found, transpose_x=True)
        found = paddle.linalg.triangular_solve(paddle.linalg.cholesky(gram), found.t(), upper=False).t()
    return found


def add_interventions(model: Any, layers: Collection[int], rank: int, ends: tuple[int, int]) -> None:
    """Put interventions behind these decoder layers, and freeze the rest.

    Args:
        model: with or without memory; `llmsuite.models.blocks.CausalLM`.
        layers: their numbers.
        rank: of the interventions.
        ends: see `chosen_tokens`; kept in the attribute `edited_ends`.
    """
    model.edited_ends = ends
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = parameter.stop_gradient or not is_trained(name)
    for number, layer in enumerate(model.model.layers):
        if number in layers:
            setattr(layer, MODULE, Intervention(model.config.hidden_size, rank))
            layer.register_forward_post_hook(edited)


def edited(layer: Any, inputs: Any, output: Any) -> Any:
    """The hook of a layer that has an intervention: its output, edited."""
    edit = getattr(layer, MODULE)
    return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)


# which tokens


def chosen() -> Tensor:
    """Which tokens of the pass are edited, [B, L].

    Raises:
        UserError: nobody has said it.
    """
    keys = token_values.current()
    if keys is None:
        raise UserError(
            "reft: interventions edit tokens of a prompt, and here are texts that have none. Use generate, serve or an "
            "evaluation of answers"
        )
    return keys


def chosen_tokens(prompt_lengths: Tensor, document_starts: Tensor | None, ends: tuple[int, int]) -> Tensor:
    """1 for each token that is edited, else 0, [B, L] in int32.

    Args:
        prompt_lengths: length of the prompt that each token's document begins with, [B, L].
        document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.
        ends: how many of the first and of the last tokens of a prompt.
    """
    at = paddle.arange(prompt_lengths.shape[1]) if document_starts is None else positions(document_starts)
    return at_ends(at, prompt_lengths, ends)


def chosen_columns(padding: Tensor, num_columns: int, is_prompt: bool, ends: tuple[int, int]) -> Tensor:
    """As `chosen_tokens`, for a pass of generation: one over whole prompts, or over tokens behind them.

    Args:
        padding: [B], how many of the first columns are padding.
        num_columns: columns of the pass.
        is_prompt: whether they are those of the prompts.
        ends: as there.
    """
    if not is_prompt:
        return paddle.zeros([padding.shape[0], num_columns], "int32")
    first = padding.unsqueeze(1)
    return at_ends(paddle.arange(num_columns) - first, num_columns - first, ends)


def at_ends(at: Tensor, prompt_lengths: Tensor, ends: tuple[int, int]) -> Tensor:
    """As `chosen_tokens`, for tokens at the positions `at` of their documents: at most half of a prompt at each end, as
    `get_intervention_locations` of pyreft has it."""
    half = prompt_lengths // 2
    first, last = (half.clip(max=count) for count in ends)
    at_begin = paddle.logical_and(at >= 0, at < first)
    at_end = paddle.logical_and(at >= prompt_lengths - last, at < prompt_lengths)
    return paddle.logical_or(at_begin, at_end).astype("int32")
