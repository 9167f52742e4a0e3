"""The removals, each with the check that notices it; see `removals`."""

from __future__ import annotations

from tests.standin.removals import Removal


def _of(file: str, *rows: tuple[str, str, str]) -> list[Removal]:
    """Those of a file: what is in the text, what is there instead, and the check."""
    return [Removal(file, *row) for row in rows]


ALONE: tuple[Removal, ...] = (
    *_of(
        "devices/paddle_kernels.py",
        ('return ends.astype("int32").unsqueeze([1, 3])', "return ends.unsqueeze([1, 3])", "llama"),
        ("x, cos, sin = (t.reshape([1, -1, *t.shape[2:]]) for t in (x, cos, sin))", "pass", "llama"),
    ),
    *_of(
        "devices/masks.py",
        ("1e9)).astype(dtype)", "1e9))", "masks"),
    ),
    *_of(
        "devices/ops.py",
        ('wide = x.astype("float32")', "wide = x", "plain_norm"),
        ("return scaled.astype(x.dtype) * weight", "return scaled * weight", "plain_norm"),
    ),
    *_of(
        "models/blocks.py",
        ('cross_entropy(self.logits(hidden).astype("float32")', "cross_entropy(self.logits(hidden)", "of_tokens"),
        ('nll_and_entropy(self.logits(hidden).astype("float32")', "nll_and_entropy(self.logits(hidden)", "of_tokens"),
        ('logits = self.logits(hidden).astype("float32")\n        is_match',
         "logits = self.logits(hidden)\n        is_match", "of_tokens"),
        ('squeeze(-1).astype("float32")', "squeeze(-1)", "scores"),
    ),
    *_of(
        "models/rotation.py",
        ('.astype("float32")).astype(dtype) for f in (np', '.astype("float32")) for f in (np', "rotations"),
        ('.astype("float32").astype(dtype) for f in (paddle', '.astype("float32") for f in (paddle', "rotations"),
    ),
    *_of(
        "models/moe.py",
        ('paddle.matmul(x.astype("float32"),', "paddle.matmul(x,", "qwen_moe"),
        ('self.weight.astype("float32")', "self.weight", "qwen_moe"),
        ("F.softmax(logits, -1)", "F.softmax(logits.astype('bfloat16'), -1).astype('float32')", "routing"),
        ('(document_starts >= 0).astype("float32")', "document_starts >= 0", "deepseek"),
    ),
    *_of(
        "models/experts.py",
        ("weights.astype(rows.dtype)", "weights", "qwen_moe"),
    ),
    *_of(
        "adapters/layers/dora.py",
        ('self.get_delta_weight()).astype("float32")', "self.get_delta_weight())", "dora_of_small_weights"),
        ("1e-12).sqrt().astype(x.dtype)", "1e-12).sqrt()", "dora"),
    ),
    *_of(
        "adapters/layers/dora.py",
        ('(self.weight + update).astype("float32")', "(self.weight + update)", "dora_of_small_embeddings"),
        ("1e-12).sqrt().astype(y.dtype)", "1e-12).sqrt()", "dora_of_embeddings"),
    ),
    *_of(
        "adapters/layers/dora.py",
        ('wide.astype("float32").square()', "wide.square()", "dora_of_small_experts"),
        ("1e-12).sqrt().astype(dtype)", "1e-12).sqrt()", "dora_of_experts"),
    ),
    *_of(
        "adapters/layers/reft.py",
        ("- basis).astype(x.dtype)", "- basis)", "interventions"),
        ("is_chosen.unsqueeze(-1).astype(x.dtype)", "is_chosen.unsqueeze(-1)", "interventions"),
        ("basis.astype(x.dtype), transpose_y", "basis, transpose_y", "interventions"),
        ('basis = matrix.astype("float32")', "basis = matrix", "interventions"),
    ),
    *_of(
        "models/dropout.py",
        ("x * (ctx.mask.astype(x.dtype) * factor)", "x * (ctx.mask * factor)", "dropout"),
    ),
    *_of(
        "models/quantised.py",
        ("local = dequantise(_local(codes), self._scales(), self.format).astype(dtype)",
         "local = dequantise(_local(codes), self._scales(), self.format)", "qlora"),
        ("return dequantise(_local(self.codes)[number], self._scales(number), self.format).astype(dtype)",
         "return dequantise(_local(self.codes)[number], self._scales(number), self.format)", "qlora_of_experts"),
    ),
    *_of(
        "models/qat.py",
        ("scale) * scale).astype(weight.dtype)", "scale) * scale)", "fake_quantised"),
        ("LEVELS) * scale).astype(x.dtype)", "LEVELS) * scale)", "fake_quantised"),
        ("LEVELS * scale).astype(x.dtype)", "LEVELS * scale)", "fake_quantised"),
        ('else x.astype("float32")', "else x", "fake_quantised"),
        ('magnitudes.max().astype("float32")', "magnitudes.max()", "observed"),
    ),
    *_of(
        "parallel/materialize.py",
        ("local.astype(own_dtype)", "local", "llama"),
    ),
    *_of(
        "parallel/sharding.py",
        ('shard.astype("float32") if self.has_master else shard)', "shard)", "masters"),
        ("local = given.astype(self.parameter.dtype)", "local = given", "loaded_values"),
        ("self.main_param.copy_(shard.astype(self.main_param.dtype), False)",
         "self.main_param.copy_(shard, False)", "loaded_values"),
        ("shard = shard.astype(self.parameter.dtype)", "pass", "masters"),
        ("tensor_of(values).astype(self.parameter.dtype)", "tensor_of(values)", "loaded_values"),
        ("self._sum = self._widened(own)", "self._sum = own", "masters"),
        ("before = held.clone()", "before = held", "swapped"),
    ),
    *_of(
        "parallel/weight_gradients.py",
        ('flatten(0, -2).astype("float32")', "flatten(0, -2)", "weight_gradients"),
    ),
    *_of(
        "parallel/collective.py",
        ('number.astype("float64").reshape([1])', "number.reshape([1])", "ledger"),
    ),
    *_of(
        "stages/answers.py",
        ('nll.astype("float64")', "nll", "answers"),
        ('(logps - tensor(batch, "reference")).astype("float32")', '(logps - tensor(batch, "reference"))', "answers"),
    ),
    *_of(
        "engine/full_weights.py",
        ('read(f"{module}.{kind}").astype("float32") for', 'read(f"{module}.{kind}") for', "merged"),
        ("config.scale).astype(weight.dtype)", "config.scale)", "merged_mora"),
    ),
)  # fmt: skip

OF_RANKS: tuple[Removal, ...] = (
    *_of(
        "parallel/p2p.py",
        ("recv(value, group.get_group_rank(peer), True).wait()",
         "recv(value, group.get_group_rank(peer), True)", "messages"),
        ("                task.wait()", "                pass", "messages"),
        ("copy = value.clone()", "copy = value", "messages"),
        ("self._open(edges.channels(own, ring))", "pass", "channels"),
    ),
    *_of(
        "parallel/buckets.py",
        ("            self._pending.wait()", "            pass", "sums"),
        ("                pending.wait()", "                pass", "scattered_sums"),
        ("        self.settle()\n        # over the", "\n        # over the", "scattered_sums"),
        ("self._reduce_scatters.settle()", "pass", "scattered_sums"),
        ("def settle(read: Tensor = flat)", "def settle(read: Tensor = part)", "scattered_sums"),
    ),
    *_of(
        "parallel/experts.py",
        ("rows = _Permute.apply(rows, (by_expert, by_rank))", "pass", "experts"),
        ("rows = _Permute.apply(rows, (by_rank, by_expert))", "pass", "experts"),
    ),
    *_of(
        "parallel/overlap.py",
        ("            pending.wait()", "            pass", "tensor_parallel"),
    ),
    *_of(
        "parallel/sharding.py",
        ("self._sum = self._widened(own)", "self._sum = own", "sums"),
        ("own = self._widened(own).flatten()", "own = own.flatten()", "scattered_sums"),
    ),
    *_of(
        "parallel/collective.py",
        ('_AsyncCollective(task, "all_reduce", tensor, group)', "task", "busy"),
        ('part, _AsyncCollective(task, "reduce_scatter", flat, group)', "part, task", "busy"),
        ('_AsyncCollective(task, "all_gather", sent, group)', "task", "busy"),
        ("        pending.wait()", "        pass", "gathered"),
        ("    part = part.contiguous()", "    pass", "transposed"),
        ("if value is None else value.contiguous()", "if value is None else value", "transposed"),
    ),
)  # fmt: skip
