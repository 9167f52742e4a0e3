"""How fast data becomes batches, and what packing saves.

    python benchmarks/data.py index CORPUS.txt TOKENIZER       # tokens/s against `tokenizers` in a single thread
    python benchmarks/data.py loader                           # samples/s against a bare numpy memmap
    python benchmarks/data.py packing ROWS.json TOKENIZER      # how full packs are, and what a step gains by them

CORPUS is what `llmsuite data index` takes, ROWS conversations in a shape the stage sft reads, TOKENIZER a directory.
Times are the best of several runs; those of the loader and of packing are seconds of CPU, which other work on the
machine does not lengthen.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
REPEATS = 5


@dataclasses.dataclass
class Spent:
    """Seconds, and seconds of CPU of this process and those it has started and ended."""

    wall: float
    cpu: float


def spent(work: Callable[[], object], repeats: int = REPEATS) -> Spent:
    """The least of several runs."""
    runs = []
    for _ in range(repeats):
        start = time.perf_counter()
        before = sum(os.times()[:4])
        work()
        runs.append(Spent(time.perf_counter() - start, sum(os.times()[:4]) - before))
    return Spent(min(run.wall for run in runs), min(run.cpu for run in runs))


def cpu_seconds(work: Callable[[], object]) -> float:
    """Seconds of CPU time of this process, the least of several runs."""
    runs = []
    for _ in range(REPEATS):
        before = time.process_time()
        work()
        runs.append(time.process_time() - before)
    return min(runs)


# index


def single_thread(corpus: Path, tokenizer: Path) -> None:
    """In a process of its own: prints tokens and seconds of `encode_batch` alone, reading left out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    from llmsuite.data.documents import read_documents

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [text for text, _ in read_documents(corpus, "blank_lines", "text")]
    start = time.perf_counter()
    before = time.process_time()
    num_tokens = sum(
        len(encoded.ids)
        for at in range(0, len(texts), 1000)
        for encoded in encoder.encode_batch(texts[at : at + 1000], add_special_tokens=False)
    )
    print(num_tokens, time.perf_counter() - start, time.process_time() - before)


def index(corpus: Path, tokenizer: Path) -> None:
    from llmsuite.data.corpus_builder import build_corpus
    from llmsuite.data.tokenizer import TextTokenizer

    command = [sys.executable, __file__, "single_thread", str(corpus), str(tokenizer)]
    printed = [subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split() for _ in range(3)]
    tokens, wall, cpu = (min(float(words[i]) for words in printed) for i in range(3))
    print(f"{tokens:,.0f} tokens, {os.cpu_count()} cores\n")
    print("| | tokens/s | against one thread | CPU seconds |\n|---|---|---|---|")
    print(f"| `tokenizers` encode_batch, one thread, nothing written | {tokens / wall:,.0f} | 1.00 | {cpu:.1f} |")
    with tempfile.TemporaryDirectory() as directory:
        made = iter(range(100))

        def build(workers: int | None) -> Callable[[], object]:
            return lambda: build_corpus(
                [corpus], Path(directory, str(next(made))), TextTokenizer(tokenizer), workers=workers
            )

        for workers in (None, 1, 2):
            took = spent(build(workers), 3)
            name = "as many workers as it thinks fit" if workers is None else f"--workers={workers}"
            rates = f"{tokens / took.wall:,.0f} | {wall / took.wall:.2f} | {took.cpu:.1f}"
            print(f"| `llmsuite data index`, {name} | {rates} |")


# loader


def loader() -> None:
    """Samples of pretraining to batches, in random order, from 40 MB of tokens that are in memory."""
    from llmsuite.data.loader import BatchSampler, Prefetcher, SampleOrder
    from llmsuite.data.token_windows import TokenWindows

    print("| length, micro-batch | bare memmap, samples/s | loader | part |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        np.random.default_rng(0).integers(0, 512, 20_000_000).astype("<u2").tofile(f"{directory}/tokens")
        tokens = np.memmap(f"{directory}/tokens", mode="r", dtype="<u2")
        for length, micro in ((512, 8), (2048, 4), (8192, 1)):
            samples = TokenWindows(tokens, length)
            stage = pretrain_stage(length)
            count = len(samples) // 64 * 64
            dealer = BatchSampler(SampleOrder(len(samples), 0), 64, micro, 1)
            rows = np.random.default_rng(0).permutation(len(samples))[:count]
            plain = np.asarray(tokens)

            def bare(length: int = length, micro: int = micro, rows: Any = rows, plain: Any = plain) -> None:
                for at in range(0, len(rows), micro):
                    batch = np.stack([plain[r * length : r * length + length + 1] for r in rows[at : at + micro]])
                    batch[:, :-1].astype("int64"), batch[:, 1:].astype("int64")

            def ours(samples: Any = samples, stage: Any = stage, dealer: Any = dealer, count: int = count) -> None:
                steps = (dealer.micro_batches(at, 0) for at in range(0, count, 64))
                with Prefetcher(samples, steps, stage.collate, 0) as reader:
                    for step in reader:
                        for batch in step:
                            stage.collate(batch)

            a, b = (count / cpu_seconds(work) for work in (bare, ours))
            print(f"| {length}, {micro} | {a:,.0f} | {b:,.0f} | {b / a:.0%} |")


# packing


def packing(rows: Path, tokenizer: Path, length: int, steps: int) -> None:
    """How full packs are; and tokens/s of training steps of a small Llama, packed and padded."""
    import paddle

    from llmsuite.data.loader import BatchSampler, SampleOrder
    from llmsuite.data.packing import pack_samples
    from llmsuite.stages.language_model import join

    stage = sft_stage(rows, tokenizer, length)
    samples = stage.reader.read(rows)
    start = time.perf_counter()
    packs, full = pack_samples(samples, stage.row_lengths, length, join)
    took = time.perf_counter() - start
    inputs = sum(sample.num_inputs for sample in samples)
    print(
        f"{len(samples)} rows of {inputs:,} tokens into {len(packs)} packs of {length} in {took * 1e3:.0f} ms: ", end=""
    )
    print(f"{full:.2%} full")

    model = small_llama(stage.context.tokenizer.vocab_size, length)
    optimizer = paddle.optimizer.SGD(1e-4, parameters=model.parameters())

    def step(micro_batches: Sequence[Sequence[Any]]) -> int:
        num_tokens = 0
        for batch in map(stage.collate, micro_batches):
            stage.loss(model, batch).total.backward()
            num_tokens += batch["num_tokens"]
        optimizer.step()
        optimizer.clear_grad()
        return num_tokens

    print("\n| | real tokens/s (CPU) | against padding | padding |\n|---|---|---|---|")
    widths = np.array([[sample.num_inputs] for sample in samples])
    per_pack = max(1, round(len(samples) / len(packs)))
    micro = {
        "padded, in random order": (samples, BatchSampler(SampleOrder(len(samples), 0), 4 * per_pack, per_pack, 1)),
        "padded, dealt out by length": (
            samples,
            BatchSampler(SampleOrder(len(samples), 0), 4 * per_pack, per_pack, 1, widths),
        ),
        "by tokens": (samples, BatchSampler(SampleOrder(len(samples), 0), 4 * per_pack, 1, 1, widths, length)),
        "packed": (packs, BatchSampler(SampleOrder(len(packs), 0), 4, 1, 1)),
    }
    first = 0.0
    for name, (source, dealer) in micro.items():
        size = 4 if source is packs else 4 * per_pack
        dealt = [[[source[i] for i in b] for b in dealer.micro_batches(at * size, 0)] for at in range(steps + 1)]
        step(dealt[0])
        before = time.process_time()
        num_tokens = sum(map(step, dealt[1:]))
        rate = num_tokens / (time.process_time() - before)
        first = first or rate
        shapes = [stage.collate(batch)["input_ids"].size for each in dealt[1:] for batch in each]
        real = sum(sample.num_inputs for each in dealt[1:] for batch in each for sample in batch)
        print(f"| {name} | {rate:,.0f} | {rate / first:.2f} | {1 - real / sum(shapes):.1%} |", flush=True)


# parts


def _context(stage: str, length: int, train: str, directory: Path) -> Any:
    from llmsuite.builtin import llmsuite_register_data_formats
    from llmsuite.contract.schema.recipe import DataSection, TrainSection
    from llmsuite.data.chat_template import load_template
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.engine.stage import StageContext

    tokenizer = TextTokenizer(directory)
    return StageContext(
        stage_name=stage,
        data=DataSection(train=train, max_length=length),
        train=TrainSection(max_steps=1, global_batch_size=1, micro_batch_size=1, learning_rate=1.0),
        seed=42,
        tokenizer=tokenizer,
        template=lambda: load_template("tokenizer", directory, tokenizer.special_tokens),
        data_formats={f.name: f for f in llmsuite_register_data_formats()},
        initial_digest=lambda: "none",
        length_multiple=1,
        report=print,
    )


def pretrain_stage(length: int) -> Any:
    from llmsuite.stages.pretrain import PretrainStage
    from llmsuite.stages.sections import PretrainSection

    return PretrainStage(PretrainSection(), _context("pretrain", length, "none", ROOT / "data" / "tokenizer"))


def sft_stage(rows: Path, tokenizer: Path, length: int) -> Any:
    from llmsuite.stages.sections import SftSection
    from llmsuite.stages.sft import SftStage

    return SftStage(SftSection(), _context("sft", length, str(rows), tokenizer))


def small_llama(vocab_size: int, length: int) -> Any:
    """The width of SmolLM2-135M in two layers."""
    from llmsuite.devices.ops import Ops
    from llmsuite.models.dense import DenseLM
    from llmsuite.models.families.llama import PRESETS, LlamaConfig
    from llmsuite.models.initial_values import initial_values

    shape = {**PRESETS["smollm2-135m"], "num_hidden_layers": 2, "vocab_size": vocab_size}
    model = DenseLM(LlamaConfig(**shape), Ops())
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(initial_values(0, name, parameter.shape, 0.02))
    model.train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "loader", "packing", "single_thread"])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what != "loader" and len(arguments.files) != 2:
        parser.error(f"{arguments.what} takes a file and the directory of a tokenizer")
    if arguments.what == "packing":
        packing(*arguments.files, arguments.length, arguments.steps)
    else:
        {"index": index, "loader": loader, "single_thread": single_thread}[arguments.what](*arguments.files)


if __name__ == "__main__":
    main()
