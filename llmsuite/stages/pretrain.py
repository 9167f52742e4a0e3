"""Pretraining: next-token prediction over samples of equal length, cut from concatenated documents.

corpus on disk -> windows of data.max_length + 1 tokens -> one forward pass -> negative log-likelihood of each token

Documents keep their order, each ends with the end-of-sequence token, and a window may hold several, as in GPT-2 and
Megatron-LM. A token attends to all earlier ones of its window, or with `pretrain.document_mask` of its document. Window
i is tokens i L to (i + 1) L, so each token but the first is predicted once. `SampleOrder` shuffles the windows by the
seed.

Shapes: B sequences, L length, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.cache import cache_root
from llmsuite.base.errors import UserError
from llmsuite.base.progress import track_bytes
from llmsuite.data.corpus_builder import build_cached_corpus
from llmsuite.data.documents import check_has_columns, text_key
from llmsuite.data.indexed_corpus import IndexedCorpus, index_path
from llmsuite.data.mixture import Mixture, find_mixture_file
from llmsuite.data.token_windows import TokenWindows, split_bounds
from llmsuite.engine.row_reader import SampleReader
from llmsuite.engine.stage import Batch, BatchLayout, DropCounts, EvalPrompt, GeneratingStage, LossTerms, StageContext
from llmsuite.stages import language_model
from llmsuite.stages.sections import PretrainSection


class CorpusReader(SampleReader[np.ndarray]):
    """Reads corpora: text that is indexed first, or indexed corpora. The samples are windows of their tokens."""

    def __init__(self, stage: PretrainStage):
        super().__init__()
        self._stage = stage
        section: PretrainSection = stage.section
        data = stage.context.data
        self._length = data.max_length
        self._mix = section.mix
        self._split = section.split
        self._max_eval_samples = section.max_eval_samples
        self._division = section.documents
        self._columns = data.columns
        self._max_samples = data.max_samples
        self._key = text_key(self._columns, section.key)
        self._is_masked = section.document_mask

    def read_all(
        self, train: Path, evaluations: Mapping[str, Path]
    ) -> tuple[Sequence[np.ndarray], Mapping[str, Sequence[np.ndarray]]]:
        """Windows of the files for training and for evaluation; `pretrain.split` may hold back a part for
        evaluation."""
        corpora: list[tuple[Path, float | None]] = [(train, 1.0)]
        corpora += [(self._mixed_file(name), weight) for name, weight in self._mix.items()]
        parts: list[TokenWindows] = []
        held_back: list[TokenWindows] = []
        for path, _ in corpora:
            corpus = self._corpus(path)
            tokens = corpus.tokens
            if self._split is not None and not evaluations:
                begin, end = (corpus.first_token(n) for n in split_bounds(corpus.num_documents, self._split))
                held_back.append(self._windows(tokens[begin:end], f"the evaluation part of {path}"))
                tokens = tokens[:begin]
            parts.append(self._windows(tokens, str(path)))
        weights = [weight for _, weight in corpora]
        samples: Sequence[np.ndarray] = parts[0] if len(parts) == 1 else Mixture(parts, weights)
        found = {
            name: self._evaluated([self._windows(self._corpus(path).tokens, str(path))])
            for name, path in evaluations.items()
        }
        return samples, found or {"": self._evaluated(held_back)}

    def read(self, path: Path) -> TokenWindows:
        """Windows of one file."""
        return self._windows(self._corpus(path).tokens, str(path))

    def document_lengths(self, path: Path) -> np.ndarray:
        """The number of tokens of each document of a file."""
        corpus = self._corpus(path)
        return np.diff([corpus.first_token(number) for number in range(corpus.num_documents + 1)])

    def digest(self, path: Path) -> str:
        """Digest of the tokens of a file."""
        return self._corpus(path).digest()

    def mixed_files(self) -> dict[str, Path]:
        """Files of `pretrain.mix`."""
        return {f"pretrain.mix {name}": self._mixed_file(name) for name in self._mix}

    @functools.cache  # noqa: B019  (one reader a run)
    def _corpus(self, path: Path) -> IndexedCorpus:
        check_has_columns(path, self._columns)
        if path.suffix in (".idx", ".bin"):
            corpus = IndexedCorpus(index_path(path))
            if self._is_masked:
                self._check_ends(corpus)
            return corpus
        corpus, faults = build_cached_corpus(
            path,
            cache_root() / "corpora",
            self._stage.context.tokenizer,
            self._division,
            self._key,
            lambda size: track_bytes(size, f"indexing {path}"),
            self._stage.context.data.on_bad_row,
        )
        if faults.total:
            self.counts[path] = DropCounts(path, corpus.num_documents, faults.total, faults=faults)
            self._stage.context.report(f"{path}: left out {faults.summary()}")
        return corpus

    def _check_ends(self, corpus: IndexedCorpus) -> None:
        """Raise UserError unless documents end with the end-of-sequence token, by which the mask separates them."""
        eos = self._stage.context.tokenizer.eos_id
        first = [corpus.document(i) for i in range(min(corpus.num_documents, 100))]
        if not any(len(document) and document[-1] == eos for document in first):
            raise UserError(
                f"pretrain.document_mask: {corpus.path}: none of its first {len(first)} documents ends with token "
                f"{eos}, the end-of-sequence token of model.tokenizer; index the text with it"
            )

    def _mixed_file(self, name: str) -> Path:
        return find_mixture_file(name, "pretrain.mix", self._stage.context.report)

    def _windows(self, tokens: np.ndarray, what: str) -> TokenWindows:
        found = TokenWindows(tokens, self._length)[: self._max_samples]
        self._stage.context.report(f"{what}: {len(tokens):,} tokens, {len(found):,} samples of {self._length}")
        if not found:
            raise UserError(
                f"{what}: has {len(tokens)} tokens; one sample takes data.max_length {self._length} and one more"
            )
        return found

    def _evaluated(self, held_back: Sequence[TokenWindows]) -> Sequence[np.ndarray]:
        """The samples for evaluation: at most about `pretrain.max_eval_samples`, evenly spaced."""
        limit = self._max_eval_samples
        if len(held_back) == 1:
            return held_back[0].spread(limit) if limit else held_back[0]
        total = sum(map(len, held_back))
        count = min(total, limit or total)
        return [sample for part in held_back for sample in part.spread(max(1, count * len(part) // total))]


class PretrainStage(GeneratingStage[np.ndarray]):
    """Predicts every token from the earlier ones of its sample, with weight 1."""

    def __init__(self, section: PretrainSection, context: StageContext):
        super().__init__(section, context)
        self._length = context.data.max_length
        self._padded = -(-self._length // context.length_multiple) * context.length_multiple
        self._is_masked = section.document_mask
        self._mtp_weight = context.train.mtp_loss_weight
        self._num_generated = context.generation.max_new_tokens or 0
        self.reader = CorpusReader(self)

    def collate(self, samples: Sequence[np.ndarray]) -> Batch:
        """Inputs and targets, padded on the right to `length_multiple`."""
        ids = np.stack(samples)  # [B, L + 1], in the integer type of the corpus
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
            "weights": np.ones(targets.shape, "float32"),
            "weight": float(targets.size),
            "lengths": np.full(len(ids), self._length),
            "num_tokens": targets.size,
            "num_supervised": targets.size,
        }
        if self._padded != self._length:  # else every position has a target
            rows = np.arange(len(ids))[:, None] * self._padded
            batch["positions"] = (rows + np.arange(self._length)).reshape(-1)
        if self._is_masked:
            batch |= self._mask_documents(ids[:, :-1], input_ids)
        return batch | self._mtp_inputs(input_ids, targets, batch["weights"])

    def _mask_documents(self, ids: np.ndarray, input_ids: np.ndarray) -> Batch:
        """The entries of a batch that the document mask changes or adds. `ids` [B, L] are the inputs without
        padding."""
        ends = ids == self.context.tokenizer.eos_id
        begins = np.where(
            np.roll(ends, 1, axis=1), np.arange(self._length), 0
        )  # the first position starts a document in any case
        starts = np.full_like(input_ids, self._length)  # the padding is a document too
        starts[:, : self._length] = np.maximum.accumulate(begins, axis=1)
        weights = 1.0 - ends.reshape(-1).astype("float32")
        num_supervised = int(weights.sum())
        return {
            "document_starts": starts,
            "weights": weights,
            "weight": float(num_supervised),
            "num_supervised": num_supervised,
        }

    def _mtp_inputs(self, input_ids: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Batch:
        """`language_model.mtp_inputs` of a batch; empty without `train.mtp_loss_weight`. `targets` and `weights` are [B
        L]."""
        if not self._mtp_weight:
            return {}
        next_ids = np.full_like(input_ids, self.context.tokenizer.pad_id)
        next_ids[:, : self._length] = targets.reshape(-1, self._length)
        # a target needs two tokens of its document before it, so neither it nor its predecessor may start a document
        deep = np.zeros([len(input_ids), self._length], bool)
        deep[:, 1:] = (weights.reshape(-1, self._length)[:, 1:] * weights.reshape(-1, self._length)[:, :-1]) > 0
        (deep,) = np.nonzero(deep.reshape(-1))
        rows, columns = np.divmod(deep, self._length)
        return language_model.mtp_inputs(next_ids, rows * self._padded + columns, targets[deep], weights[deep])

    def eval_prompts(self, sample: np.ndarray) -> Sequence[EvalPrompt]:
        """The last tokens of a sample, as many as are generated, with all tokens before them as the prompt; with the
        document mask only those of the same document. No prompt where a document starts at that position."""
        eos = self.context.tokenizer.eos_id
        cut = self._length - self._num_generated
        prompt = sample[:cut].tolist()
        answer = sample[cut : self._length].tolist()
        if self._is_masked and eos in prompt:
            prompt = prompt[len(prompt) - prompt[::-1].index(eos) :]
        if eos in answer:  # where generation stops too
            answer = answer[: answer.index(eos)]
        return [EvalPrompt(tuple(prompt), tuple(answer))] if prompt else []

    # loss

    @property
    def batch_layout(self) -> BatchLayout:
        return BatchLayout(tokens=["weights"], has_documents=self._is_masked)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens, each with weight 1. With the document mask the first token of a document has weight
        0."""
        return language_model.weighted_loss(model, batch, self._mtp_weight, has_shares=False)
