"""Pretraining: next-token prediction over samples of equal length, cut from documents joined together.

corpus on disk -> windows of data.max_length + 1 tokens -> one forward pass -> negative log-likelihood of each token

Documents stay in their order and a window may hold several, as in GPT-2 and Megatron-LM: attention sees all of it, or
with `pretrain.document_mask` a token's own document; a document ends with the end-of-sequence token. Window i is tokens
i L to (i + 1) L, so each token but the first is predicted once. `SampleOrder` shuffles the windows by the seed.

Shapes: B sequences, L length, D hidden.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.cache import cache_root
from llmsuite.data.corpus import TokenWindows, split_bounds
from llmsuite.data.documents import check_has_columns, text_key
from llmsuite.data.index import cached_corpus
from llmsuite.data.indexed import IndexedCorpus, index_path
from llmsuite.data.mixture import Mixture, mixed_file
from llmsuite.errors import UserError
from llmsuite.progress import track_bytes
from llmsuite.stages import language_model
from llmsuite.stages.sections import PretrainSection
from llmsuite.train.stage import Batch, DropCounts, LossTerms, Question, Stage, StageContext
from llmsuite.typing import Tensor


class PretrainStage(Stage[np.ndarray]):
    """Every token is predicted from those before it in its sample; every token weighs 1."""

    def __init__(self, section: PretrainSection, context: StageContext):
        super().__init__(section, context)
        self._length = context.recipe.data.max_length
        self._padded = -(-self._length // context.length_multiple) * context.length_multiple
        self._mix, self._split, self._max_eval_samples = section.mix, section.split, section.max_eval_samples
        self._division = section.documents
        self._columns, self._max_samples = context.recipe.data.columns, context.recipe.data.max_samples
        self._key = text_key(self._columns, section.key)
        self._is_masked, self._mtp_weight = section.document_mask, context.recipe.train.mtp_loss_weight
        self._num_generated = context.recipe.generation.max_new_tokens or 0

    # data

    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """Windows of the files; those that `pretrain.split` holds back are for evaluation."""
        corpora: list[tuple[Path, float | None]] = [(train, 1.0)]
        corpora += [(self._mixed_file(name), weight) for name, weight in self._mix.items()]
        parts: list[TokenWindows] = []
        held_back: list[TokenWindows] = []
        for path, _ in corpora:
            corpus = self._corpus(path)
            tokens = corpus.tokens
            if self._split is not None and evaluation is None:
                begin, end = (corpus.first_token(n) for n in split_bounds(corpus.num_documents, self._split))
                held_back.append(self._windows(tokens[begin:end], f"the evaluation part of {path}"))
                tokens = tokens[:begin]
            parts.append(self._windows(tokens, str(path)))
        weights = [weight for _, weight in corpora]
        samples: Sequence[np.ndarray] = parts[0] if len(parts) == 1 else Mixture(parts, weights)
        if evaluation is not None:
            held_back = [self._windows(self._corpus(evaluation).tokens, str(evaluation))]
        return samples, self._evaluated(held_back)

    def read(self, path: Path) -> TokenWindows:
        """Windows of one file."""
        return self._windows(self._corpus(path).tokens, str(path))

    def document_lengths(self, path: Path) -> np.ndarray:
        """Tokens of each document of a file."""
        corpus = self._corpus(path)
        return np.diff([corpus.first_token(number) for number in range(corpus.num_documents + 1)])

    def digest(self, path: Path) -> str:
        """Digest of the tokens of a file and of the corpora in `pretrain.mix`."""
        digests = [self._corpus(found).digest() for found in (path, *map(self._mixed_file, self._mix))]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    @functools.cache  # noqa: B019  (one stage a run)
    def _corpus(self, path: Path) -> IndexedCorpus:
        check_has_columns(path, self._columns)
        if path.suffix in (".idx", ".bin"):
            corpus = IndexedCorpus(index_path(path))
            if self._is_masked:
                self._check_ends(corpus)
            return corpus
        corpus, faults = cached_corpus(
            path,
            cache_root() / "corpora",
            self.context.tokenizer,
            self._division,
            self._key,
            lambda size: track_bytes(size, f"indexing {path}"),
            self.context.recipe.data.on_bad_row,
        )
        if faults.total:
            self.counts[path] = DropCounts(path, corpus.num_documents, faults.total, faults=faults)
            self.context.report(f"{path}: left out {faults.summary()}")
        return corpus

    def _check_ends(self, corpus: IndexedCorpus) -> None:
        """Raises UserError unless documents end with the end-of-sequence token, which is where the mask parts them."""
        eos = self.context.tokenizer.eos_id
        first = [corpus.document(i) for i in range(min(corpus.num_documents, 100))]
        if not any(len(document) and document[-1] == eos for document in first):
            raise UserError(
                f"pretrain.document_mask: {corpus.path}: none of its first {len(first)} documents ends with token "
                f"{eos}, the end-of-sequence token of model.tokenizer; index the text with it"
            )

    def _mixed_file(self, name: str) -> Path:
        return mixed_file(name, "pretrain.mix", self.context.report)

    def _windows(self, tokens: np.ndarray, what: str) -> TokenWindows:
        found = TokenWindows(tokens, self._length)[: self._max_samples]
        self.context.report(f"{what}: {len(tokens):,} tokens, {len(found):,} samples of {self._length}")
        if not found:
            raise UserError(
                f"{what}: has {len(tokens)} tokens; one sample takes data.max_length {self._length} and one more"
            )
        return found

    def _evaluated(self, held_back: Sequence[TokenWindows]) -> Sequence[np.ndarray]:
        """The samples to evaluate on: at most about `pretrain.max_eval_samples`, spread evenly."""
        limit = self._max_eval_samples
        if len(held_back) == 1:
            return held_back[0].spread(limit) if limit else held_back[0]
        total = sum(map(len, held_back))
        count = min(total, limit or total)
        return [sample for part in held_back for sample in part.spread(max(1, count * len(part) // total))]

    def collate(self, samples: Sequence[np.ndarray]) -> Batch:
        """Inputs and targets; padding on the right where lengths have to be a multiple."""
        ids = np.stack(samples)  # [B, L + 1], as the corpus has them
        vocab_size = self.context.tokenizer.vocab_size
        if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
            raise UserError(
                f"data.train or data.eval: has token {wrong[0]}, and model.tokenizer knows {vocab_size}; index the "
                "text with it"
            )
        input_ids = np.empty([len(ids), self._padded], "int64")
        input_ids[:, : self._length] = ids[:, :-1]
        if self._padded != self._length:
            input_ids[:, self._length :] = self.context.tokenizer.pad_id
        targets = ids[:, 1:].astype("int64").reshape(-1)
        batch = {
            "input_ids": input_ids,
            "targets": targets,
            "weight": float(targets.size),
            "lengths": np.full(len(ids), self._length),
            "num_tokens": targets.size,
            "num_supervised": targets.size,
        }
        if not self._is_masked:
            return batch | self._further(input_ids, targets, np.ones(targets.shape, "float32"))
        ends = ids[:, :-1] == self.context.tokenizer.eos_id
        begins = np.where(np.roll(ends, 1, axis=1), np.arange(self._length), 0)  # the first one is 0 in any case
        starts = np.full_like(input_ids, self._length)  # the padding is one too
        starts[:, : self._length] = np.maximum.accumulate(begins, axis=1)
        weights = 1.0 - ends.reshape(-1).astype("float32")
        num_supervised = int(weights.sum())
        return (
            batch
            | self._further(input_ids, targets, weights)
            | {
                "document_starts": starts,
                "weights": weights,
                "weight": float(num_supervised),
                "num_supervised": num_supervised,
            }
        )

    def _further(self, input_ids: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Batch:
        """What `language_model.mtp_nll` takes, where it is asked for; `targets` and `weights` are [B L]."""
        if not self._mtp_weight:
            return {}
        next_ids = np.full_like(input_ids, self.context.tokenizer.pad_id)
        next_ids[:, : self._length] = targets.reshape(-1, self._length)
        # a target whose predecessor begins a document has one token of its own before it
        deep = np.zeros([len(input_ids), self._length], bool)
        deep[:, 1:] = (weights.reshape(-1, self._length)[:, 1:] * weights.reshape(-1, self._length)[:, :-1]) > 0
        (deep,) = np.nonzero(deep.reshape(-1))
        rows, columns = np.divmod(deep, self._length)
        return language_model.further_targets(next_ids, rows * self._padded + columns, targets[deep], weights[deep])

    def questions(self, sample: np.ndarray) -> Sequence[Question]:
        """The last tokens of a sample, as many as are generated, behind all before them; of one document where that is
        all that a token sees. A sample in which a document begins just there has none."""
        eos, cut = self.context.tokenizer.eos_id, self._length - self._num_generated
        prompt, answer = sample[:cut].tolist(), sample[cut : self._length].tolist()
        if self._is_masked and eos in prompt:
            prompt = prompt[len(prompt) - prompt[::-1].index(eos) :]
        if eos in answer:  # where the model ends too
            answer = answer[: answer.index(eos)]
        return [Question(tuple(prompt), tuple(answer))] if prompt else []

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; every one weighs 1. With the document mask the first token of a document weighs 0."""
        starts = {"document_starts": paddle.to_tensor(batch["document_starts"])} if self._is_masked else {}
        hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]), **starts)  # [B, L, D]
        at = np.arange(len(batch["input_ids"]))[:, None] * self._padded + np.arange(self._length)
        further = None
        if self._mtp_weight:
            nll, further, _ = language_model.mtp_nll(model, hidden, at.reshape(-1), batch)
        else:
            flat = hidden.flatten(0, 1)
            if self._padded != self._length:
                flat = flat.index_select(paddle.to_tensor(at.reshape(-1)), 0)
            nll = model.token_nll(flat, paddle.to_tensor(batch["targets"]))  # [B L]
        if self._is_masked:
            nll = nll * paddle.to_tensor(batch["weights"])
        terms = LossTerms(nll.sum(), batch["weight"])
        return terms if further is None else language_model.with_mtp(terms, further, self._mtp_weight)

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """Ids, targets and weights, [B, length]; those of padding weigh 0."""
        positions = np.arange(len(batch["input_ids"]))[:, None] * self._padded + np.arange(self._length)
        ones = np.ones(batch["targets"].shape, "float32")
        given = {"positions": positions.reshape(-1), "weights": batch.get("weights", ones)}
        return language_model.program_inputs({**batch, **given}, length, self._is_masked)

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over the tokens."""
        return language_model.program_loss(model, inputs, tells_likely=False)
