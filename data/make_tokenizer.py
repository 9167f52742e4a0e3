"""Write data/tokenizer: a byte-level BPE of 512 tokens, trained on the preference rows.

Usage:

    python data/make_tokenizer.py            write the files
    python data/make_tokenizer.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The text is tiny: threads would save nothing, and make every later fork of the process print a warning.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import generated
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their positions are their ids."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "tokenizer_class": "PretrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 512,
    "chat_template": CHAT_TEMPLATE,
}


def texts() -> Iterator[str]:
    """Every message of the rows as the chat template renders it, without the special tokens around it."""
    for split in ("train", "eval"):
        for line in (HERE / "preference" / f"{split}.jsonl").read_text(encoding="ascii").splitlines():
            row = json.loads(line)
            # No row has a system message, but a chat may: its role should be one token like the others.
            yield "system\n"
            for message in row["prompt"] + row["chosen"] + row["rejected"]:
                yield f"{message['role']}\n{message['content']}"


def train() -> Tokenizer:
    """Train the tokenizer.

    Raises:
        ValueError: the text is too small for a vocabulary of this size.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that a sum is computed on digits instead of looked up in the vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        # All 256 bytes, whether the text has them or not: any input can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    tokenizer = json.dumps(json.loads(train().to_str()), separators=(",", ":")) + "\n"
    config = json.dumps(CONFIG, indent=2) + "\n"
    return {
        HERE / "tokenizer" / "tokenizer.json": tokenizer.encode("ascii"),
        HERE / "tokenizer" / "tokenizer_config.json": config.encode("ascii"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the tokenizer under data/tokenizer.", argv)


if __name__ == "__main__":
    sys.exit(main())
