"""Interventions on hidden states (LoReFT, Wu et al. 2024, arXiv 2404.03592), for one card.

Shapes: B rows, L length, D hidden, R rank.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.parameters import is_trained
from llmsuite.adapters.reft_shapes import BIAS, MODULE, ROTATION, SOURCE, reft_shapes
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models import token_context
from llmsuite.models.rotation import positions


class Edit:
    """The edit of hidden states by an intervention, on one card."""

    def run(self, intervention: Intervention, x: Tensor) -> Tensor:
        """Hidden states [B, L, D] with the chosen tokens edited, [B, L, D]."""
        return intervene(x, chosen(), *intervention.parts())


class Intervention(nn.Layer):
    """h + R (W^T h + b - R^T h) for the chosen tokens, R [D, R] with orthonormal columns (LoReFT, eq. 2).

    The trained parameter is not R but any matrix of full rank, `reft_rotation`: R is the Q of its QR decomposition
    whose other factor has a positive diagonal. So R stays orthonormal whatever the optimizer does. (paddlenlp's
    `LoreftIntervention` only starts with an orthonormal R; pyreft has Householder reflections.)
    """

    edit = Edit()
    """One object for all interventions of a model: compiled layers have to be alike."""

    def __init__(self, size: int, rank: int):
        """
        Args:
            size: size of a hidden state.
            rank: rank of the edit.
        """
        super().__init__()
        shapes = reft_shapes(size, rank)
        self.reft_rotation = self.create_parameter(list(shapes[ROTATION]))
        self.reft_source = self.create_parameter(list(shapes[SOURCE]))
        self.reft_bias = self.create_parameter(list(shapes[BIAS]), is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, L, D] with the chosen tokens edited, [B, L, D]."""
        return self.edit.run(self, x)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parameters: the matrix whose Q is R, W and b."""
        return self.reft_rotation, self.reft_source, self.reft_bias


def intervene(x: Tensor, is_chosen: Tensor, rotation: Tensor, source: Tensor, bias: Tensor) -> Tensor:
    """The formula of `Intervention`, on plain tensors.

    Args:
        x: [B, L, D].
        is_chosen: [B, L], 1 for tokens that are edited, else 0.
        rotation: the matrix whose Q is R, [D, R].
        source: W, [D, R].
        bias: b, [R].
    """
    basis = orthonormal(rotation)
    difference = (source - basis).astype(x.dtype)
    edit = (paddle.matmul(x, difference) + bias) * is_chosen.unsqueeze(-1).astype(x.dtype)
    return x + paddle.matmul(edit, basis.astype(x.dtype), transpose_y=True)


def orthonormal(matrix: Tensor) -> Tensor:
    """Q [D, R], in float32, of the QR decomposition of a matrix [D, R] whose triangular factor has a positive diagonal.

    Computed by Cholesky factors of the Gram matrix, twice, as the first pass leaves an error that grows with the square
    of the condition number (CholeskyQR2, Yamamoto et al. 2015, ETNA 44): a few products, each with a gradient. A
    decomposition by reflections has signs that are not continuous in the matrix.
    """
    basis = matrix.astype("float32")
    for _ in range(2):
        gram = paddle.matmul(basis, basis, transpose_x=True)
        basis = paddle.linalg.triangular_solve(paddle.linalg.cholesky(gram), basis.t(), upper=False).t()
    return basis


def add_interventions(model: Any, layers: Collection[int], rank: int, ends: tuple[int, int]) -> None:
    """Add interventions after these decoder layers, and freeze the rest.

    Args:
        model: a `llmsuite.models.blocks.CausalLM`, materialised or not.
        layers: indices of the layers.
        rank: rank of the interventions.
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
    """Forward hook of a layer with an intervention: its output, edited."""
    edit: Intervention = layer.reft
    if isinstance(output, tuple):
        return edit(output[0]), *output[1:]
    return edit(output)


# which tokens


def chosen() -> Tensor:
    """Mask of the tokens of the current pass that are edited, [B, L].

    Raises:
        UserError: the pass does not say where prompts are.
    """
    keys = token_context.current()
    if keys is None:
        raise UserError(
            "reft: interventions edit tokens of a prompt, and these texts have no prompt. Use generate, serve or an "
            "evaluation of answers"
        )
    return keys


def chosen_tokens(prompt_lengths: Tensor, document_starts: Tensor | None, ends: tuple[int, int]) -> Tensor:
    """1 for each token that is edited, else 0, [B, L] in int32.

    Args:
        prompt_lengths: length of the prompt that each token's document begins with, [B, L].
        document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.
        ends: numbers of the first and of the last tokens of a prompt that are edited.
    """
    if document_starts is None:
        in_document = paddle.arange(prompt_lengths.shape[1])
    else:
        in_document = positions(document_starts)
    return at_ends(in_document, prompt_lengths, ends)


def chosen_columns(padding: Tensor, num_columns: int, is_prompt: bool, ends: tuple[int, int]) -> Tensor:
    """`chosen_tokens` of a pass of generation, over full prompts or over tokens after them, [B, columns] in int32.

    Args:
        padding: [B], how many of the first columns are padding.
        num_columns: number of columns of the pass.
        is_prompt: true for a pass over the prompts.
        ends: as in `chosen_tokens`.
    """
    if not is_prompt:
        return paddle.zeros([padding.shape[0], num_columns], "int32")
    first = padding.unsqueeze(1)
    return at_ends(paddle.arange(num_columns) - first, num_columns - first, ends)


def at_ends(at: Tensor, prompt_lengths: Tensor, ends: tuple[int, int]) -> Tensor:
    """`chosen_tokens` of tokens at the positions `at` of their documents: at most half of a prompt at each end, as in
    pyreft's `get_intervention_locations`."""
    half = prompt_lengths // 2
    first, last = (half.clip(max=count) for count in ends)
    at_begin = paddle.logical_and(at >= 0, at < first)
    at_end = paddle.logical_and(at >= prompt_lengths - last, at < prompt_lengths)
    return paddle.logical_or(at_begin, at_end).astype("int32")
