"""The reward `model`: scores by a reward model of stage `rm`, with a full copy on each rank that samples
completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.files import check_intact
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.specs import Score
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.inference.frozen import build_frozen
from llmsuite.models.head import head_of
from llmsuite.recipe.shape import local_weights
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import ModelRewardSection
from llmsuite.rl.reward_services import RewardServices

_KEY = "reward.model.weights"


def model(section: ModelRewardSection, services: RewardServices) -> Score:
    """The score of the last token of each completion, after its prompt.

    Raises:
        UserError: there is no reward model, or its tokenizer is not that of the trained model.
    """
    size = section.batch_size
    if section.weights is None:
        raise UserError(f"{_KEY}: is required with the reward model; set it to the directory of a run of stage rm")
    path = local_weights(section.weights)
    check_intact(path)
    source = open_model(path, services.families)
    if head_of(source.config) != "score":
        raise UserError(f"{_KEY}: {path} is a language model, which has no score head; train one with stage rm")
    scoring = build_frozen(source, services.device, services.precision)
    tokenizer = TextTokenizer(path)
    checked = False

    @paddle.no_grad()
    def score(completions: Sequence[Completion]) -> list[float]:
        nonlocal checked
        if completions and not checked:
            _check_tokens(completions[0], tokenizer)
            checked = True
        order = sorted(range(len(completions)), key=lambda i: len(completions[i].prompt_ids) + len(completions[i].ids))
        found = [0.0] * len(completions)
        for begin in range(0, len(order), size):
            part = order[begin : begin + size]
            rows = [[*completions[i].prompt_ids, *completions[i].ids] for i in part]
            for i, value in zip(part, _scores(scoring, rows, tokenizer.pad_id)):
                found[i] = value
        return found

    return score


def _check_tokens(completion: Completion, tokenizer: TextTokenizer) -> None:
    """Raise UserError when the reward model's tokenizer encodes the prompt to other tokens than it is given."""
    if list(completion.prompt_ids) != tokenizer.encode(completion.prompt):
        raise UserError(
            f"{_KEY}: {tokenizer.directory} has another tokenizer than the trained model, whose token ids would have "
            "another meaning for it"
        )


def _scores(scoring: Any, rows: Sequence[Sequence[int]], pad_id: int) -> list[float]:
    """Scores of the last tokens of rows. They are padded on the right, which causal attention never sees."""
    longest = max(map(len, rows))
    ids = np.full([len(rows), longest], pad_id, "int64")
    for row, given in zip(ids, rows):
        row[: len(given)] = given
    hidden, _ = scoring.hidden_states(tensor_of(ids))  # [B, L, D]
    last = tensor_of([number * longest + len(row) - 1 for number, row in enumerate(rows)])
    return [float(value) for value in array_of(scoring.scores(hidden.flatten(0, 1).index_select(last, 0)))]
