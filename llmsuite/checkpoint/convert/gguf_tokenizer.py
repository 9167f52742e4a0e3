"""Byte-pair tokenizers in GGUF (`tokenizer.ggml.model = gpt2`), read and written.

GGUF has the vocabulary and the merges. For the splitting of text before merging it has only a name,
`tokenizer.ggml.pre`, which llama.cpp implements in code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, write_json
from llmsuite.base.safe_files import is_file

NORMAL = 1  # of gguf.TokenType
CONTROL = 3
USER = 4
UNUSED = 5

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(numbers: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": _WORDS % numbers}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """The splitting that a name in `tokenizer.ggml.pre` stands for, in terms of tokenizer.json."""

    steps: list[dict[str, Any]]
    normalizer: Literal["NFC"] | None = None
    """The normalizer. llama.cpp has none: texts in another Unicode form become other tokens there."""
    ignores_merges: bool = False
    """True where a word in the vocabulary becomes one token without applying merges."""


_SPLITTINGS = {
    "smollm": _Splitting([_DIGITS, _BYTES]),
    "gpt-2": _Splitting([_BYTES]),
    "default": _Splitting([_BYTES]),
    "llama-bpe": _Splitting(_split(r"\p{N}{1,3}"), ignores_merges=True),
    "qwen2": _Splitting(_split(r"\p{N}"), normalizer="NFC"),
}


def read_tokenizer(source: Path, fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tokenizer of a GGUF file, and the content of its tokenizer_config.json.

    Raises:
        UserError: it is not byte-pair, has an unknown splitting, or lacks a field.
    """
    kind = fields.get("tokenizer.ggml.model")
    split = fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _SPLITTINGS:
        raise UserError(
            f"{source}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported; supported: gpt2 with "
            f"{', '.join(_SPLITTINGS)}. Put the model's own tokenizer.json next to the weights instead"
        )
    try:
        return _tokenizer(source, fields, _SPLITTINGS[split])
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception, and the fields may have any type
        raise UserError(f"{source}: its tokenizer fields are invalid: {error}") from error


def field(source: Path, fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A field of a GGUF file. Raises UserError when it has none."""
    value = fields.get(name, default)
    if value is None:
        raise UserError(f"{source}: lacks the field {name}")
    return value


def save_tokenizer(tokenizer: Any, config: dict[str, Any], directory: Path) -> None:
    """Write the two results of `read_tokenizer`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", config)


def _tokenizer(source: Path, fields: Mapping[str, Any], splitting: _Splitting) -> tuple[Any, dict[str, Any]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens = field(source, fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(source, fields, "tokenizer.ggml.merges")]
    kinds = field(source, fields, "tokenizer.ggml.token_type")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED}
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignores_merges)
    tokenizer = Tokenizer(model)
    steps = [_step(step) for step in splitting.steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if splitting.normalizer == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
    user_defined = [token for token, kind in zip(tokens, kinds) if kind == USER]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])

    config: dict[str, Any] = {"tokenizer_class": "PretrainedTokenizerFast"}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    config["chat_template"] = fields.get("tokenizer.chat_template")
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in config:
        bos = config["bos_token"]
        begin = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
        tokenizer.post_processor = begin
    return tokenizer, config


def _step(step: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if step["type"] == "Digits":
        return pre_tokenizers.Digits(individual_digits=step["individual_digits"])
    if step["type"] == "Split":
        return pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), behavior=step["behavior"].lower())
    return pre_tokenizers.ByteLevel(add_prefix_space=step["add_prefix_space"], use_regex=step["use_regex"])


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as the fields of a GGUF file."""

    split: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]


def read_vocabulary(directory: Path, size: int) -> Vocabulary:
    """The GGUF fields of the tokenizer.json of a model directory.

    Args:
        directory: of the model.
        size: vocabulary size of the model; ids after those of the tokenizer are unused.

    Raises:
        UserError: there is none, it is no byte-level BPE, or splits text in a way that llama.cpp does not implement.
    """
    path = directory / "tokenizer.json"
    if not is_file(path):
        raise UserError(f"{directory}: has no tokenizer.json, from which a GGUF file gets its tokenizer")
    try:
        return _vocabulary(path, read_json_object(path), size)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: is no tokenizer of the library tokenizers: {error!r}") from error


def _vocabulary(path: Path, data: Any, size: int) -> Vocabulary:
    model = data["model"]
    added = data.get("added_tokens") or []
    split = _name_of(path, data)
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if (most := max(ids.values())) >= size:
        raise UserError(f"{path}: has a token with the id {most}, and the model has {size} tokens")
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for token, i in ids.items():
        tokens[i] = token
        kinds[i] = NORMAL
    for token in added:
        kinds[token["id"]] = CONTROL if token["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(split, tokens, kinds, merges)


def _name_of(path: Path, data: Any) -> str:
    """The name of the splitting of a tokenizer.json in llama.cpp."""
    model = data["model"]
    normalizer = data.get("normalizer")
    kind = model.get("type", "BPE")
    decoder = (data.get("decoder") or {}).get("type")
    if kind != "BPE" or decoder != "ByteLevel" or model.get("byte_fallback"):
        raise UserError(
            f"{path}: is a {kind} tokenizer with decoder {decoder}; GGUF is written only with byte-level BPE, as in "
            "Llama 3, Qwen, SmolLM and GPT-2"
        )
    steps = _steps(data.get("pre_tokenizer"))
    form = normalizer["type"] if normalizer else None
    for name, known in _SPLITTINGS.items():
        fits = form in (None, known.normalizer) and bool(model.get("ignore_merges")) == known.ignores_merges
        if steps == known.steps and fits and name != "default":
            return name
    raise UserError(
        f"{path}: splits text like none of {', '.join(sorted(_SPLITTINGS))}, which llama.cpp implements: "
        f"pre_tokenizer {steps}, normalizer {form}, ignore_merges {bool(model.get('ignore_merges'))}"
    )


def _steps(step: Any) -> list[dict[str, Any]]:
    """The steps of a pre_tokenizer, in the form of `_SPLITTINGS`."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step["pretokenizers"] for inner in _steps(part)]
    # trim_offsets concerns positions, not tokens
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]
