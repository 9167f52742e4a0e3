"""Every token of a row is predicted from the ones before it."""

import numpy as np
import paddle
import paddle.nn.functional as F

from llmsuite.engine.stage import LossTerms, Stage


class NextTokenStage(Stage):
    row_kind = "text"

    def make_samples(self, rows, counts):
        samples = [[*ids, self.context.tokenizer.eos_id] for ids in self.context.encode(rows)]
        allowed = range(self.section.min_tokens, self.context.data.max_length + 1)
        return [ids for ids in samples if len(ids) in allowed or counts.drop("too short or too long")]

    def collate(self, samples):
        ids = np.full([len(samples), max(map(len, samples))], self.context.tokenizer.pad_id, dtype="int64")
        weight = np.zeros(ids.shape, dtype="float32")
        for row, sample in enumerate(samples):
            ids[row, : len(sample)] = sample
            weight[row, : len(sample)] = 1
        counts = {"num_tokens": int(weight.sum()), "num_supervised": int(weight[:, 1:].sum())}
        return {"ids": ids, "weight": weight[:, 1:], **counts}

    def loss(self, model, batch):
        ids = paddle.to_tensor(batch["ids"])
        nll = F.cross_entropy(model(ids[:, :-1]), ids[:, 1:].unsqueeze(-1), reduction="none").squeeze(-1)
        return LossTerms((nll * paddle.to_tensor(batch["weight"])).sum(), float(batch["num_supervised"]))
