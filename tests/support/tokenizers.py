"""Small tokenizers of the kinds that people use, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("Hello", "world", "the", "capital", "of", "France", "is", "Paris", "true", "INST")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"{}[]()-_/<>|=+*#\n"
MARKS = ("<unk>", "<s>", "</s>")


def _merges(words: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that make words of letters, whose parts join the vocabulary."""
    merges: list[tuple[str, str]] = []
    for word in words:
        left = word[0]
        for letter in word[1:]:
            if (left, letter) not in merges:
                merges.append((left, letter))
            left += letter
            vocabulary.setdefault(left, len(vocabulary))
    return merges


def sentencepiece_like(prefix: str) -> Tokenizer:
    """As Llama 2's and Mistral's: pieces with ▁, and bytes for letters that it does not know.

    `prefix` says where ▁ is put in front: "normalizer" (of each part between special tokens), "always" or "first" (by
    the pre-tokenizer), or "never".
    """
    vocabulary = {mark: number for number, mark in enumerate(MARKS)}
    vocabulary |= {f"<0x{byte:02X}>": len(MARKS) + byte for byte in range(256)}
    for letter in f"▁{LETTERS}":
        vocabulary.setdefault(letter, len(vocabulary))
    merges = _merges([*(f"▁{word}" for word in WORDS), *WORDS], vocabulary)
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prefix == "normalizer":
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    strips = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    found.add_special_tokens(list(MARKS))
    return found


def byte_level(add_prefix_space: bool) -> Tokenizer:
    """As GPT-2's, Qwen's and Llama 3's: pieces of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate((*MARKS, *letters))}
    merges = _merges([*(f"Ġ{word}" for word in WORDS), *WORDS], vocabulary)
    found = Tokenizer(models.BPE(vocabulary, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(MARKS))
    return found


def kinds() -> dict[str, Tokenizer]:
    """All of them, by name."""
    found = {
        f"sentencepiece-{prefix}": sentencepiece_like(prefix) for prefix in ("normalizer", "always", "first", "never")
    }
    return found | {"bytes": byte_level(False), "bytes-space": byte_level(True)}


def write(directory: Path, tokenizer: Tokenizer, template: str | None = None, adds_bos: bool = False) -> Path:
    """A tokenizer directory; with `adds_bos`, its post-processor puts <s> in front of texts."""
    directory.mkdir(parents=True, exist_ok=True)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
