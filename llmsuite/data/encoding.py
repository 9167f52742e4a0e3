"""Token ids of a text that goes on from another one: of an answer behind its prompt.

A model is given the tokens of the prompt, encoded by itself, and writes the next ones. So the answer's tokens are those
that whole text has behind the prompt's. A text by itself may have others: tokenizers made by SentencePiece, such as
those of Llama 2 and Mistral, begin every text with a space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmsuite.data.tokenizer import TextTokenizer

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Texts to token ids, without special tokens."""


def encode_answers(
    texts: Sequence[tuple[str, str]], tokenizer: TextTokenizer, encode: Encode | None = None
) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and of the answers behind them.

    Args:
        texts: the text before each answer, and that text with the answer.
        tokenizer: of the model.
        encode: of this tokenizer, such as one that keeps what it has encoded.

    Returns:
        For each, the ids of the prompt as generation encodes it, and those of the answer.
    """
    encode = encode or tokenizer.encode_batch
    ids = encode([text for both in texts for text in both])
    prompts, wholes = ids[::2], ids[1::2]
    # A token may span the border, and generation has no such token: then the answer is encoded by itself.
    spanned = [i for i, prompt in enumerate(prompts) if wholes[i][: len(prompt)] != prompt]
    alone = encode_continuations([texts[i][1][len(texts[i][0]) :] for i in spanned], tokenizer, encode)
    answers = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes)]
    for i, answer in zip(spanned, alone):
        answers[i] = answer
    return list(zip(prompts, answers))


def encode_continuations(
    texts: Sequence[str], tokenizer: TextTokenizer, encode: Encode | None = None
) -> list[list[int]]:
    """Token ids of texts that others precede, whichever they are: as by themselves, but without what the tokenizer
    puts in front of a text."""
    encode = encode or tokenizer.encode_batch
    found: list[list[int] | None] = [None] * len(texts)
    for anchor in tokenizer.anchors:
        left = [i for i, ids in enumerate(found) if ids is None]
        begin = tokenizer.encode(anchor)
        for i, ids in zip(left, encode([anchor + texts[i] for i in left])):
            # where a text begins as the anchor does, both may be one token: the next anchor tells
            if ids[: len(begin)] == begin:
                found[i] = ids[len(begin) :]
    left = [i for i, ids in enumerate(found) if ids is None]
    for i, ids in zip(left, encode([texts[i] for i in left])):
        found[i] = ids
    return [ids for ids in found if ids is not None]
