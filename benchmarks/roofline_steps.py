"""A process of `roofline.py`: trains as a recipe says, and tells what its steps take their time for.

    python benchmarks/roofline_steps.py RECIPE --rounds N [--smoke] [OVERRIDES]

After a first step come, in each round, a step that is timed alone, a step under Paddle's profiler, and the products of
that step by themselves: the same shapes, one kind after the other. A line of JSON on stdout tells all.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import roofline_parts as parts  # noqa: E402
from roofline_parts import WHOLE, WITHIN, Product, Seconds, forward_and_back  # noqa: E402

from llmsuite.devices.cpu import CpuBackend  # noqa: E402

MARK = "ROOFLINE "
_LEAST_SECONDS = 0.05
_LEAST_TIMES = 3
"""How long a product is repeated by itself."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--smoke", action="store_true", help="as that of llmsuite run")
    arguments, overrides = parser.parse_known_args()
    from llmsuite.contract.registry import load_plugins
    from llmsuite.devices.start import start_paddle
    from llmsuite.recipe.resolve import plan_run

    start_paddle(CpuBackend(), 1)
    registry = load_plugins()
    words = [*overrides, f"--train.max_steps={1 + 2 * arguments.rounds}", "--checkpoint.save_steps=null"]
    plan = plan_run(arguments.recipe, words, registry, arguments.smoke)
    print("\n" + MARK + json.dumps(measure(plan, registry)), flush=True)
    return 0


def measure(plan: Any, registry: Any) -> dict[str, Any]:
    """Train as planned; returns the seconds of the steps that were timed alone, and what was found of the others."""
    from llmsuite.engine.passes import MicroBatchLoader
    from llmsuite.engine.trainer import Trainer

    precision = plan.parallel.engine.precision
    backend = CpuBackend()
    if not set(parts.OF_KERNELS) - {"round_activation", "bf16_attention"} <= backend.fused(precision):
        raise SystemExit("the parts are told by the kernels' names, and there are none: install g++")
    recorder = _Recorder(backend.ops(precision).matmuls, plan.model.config.vocab_size)
    device = dataclasses.replace(plan.parallel.device, factory=functools.partial(_RecordedBackend, recorder))
    plan = dataclasses.replace(plan, parallel=dataclasses.replace(plan.parallel, device=device))

    class Measured(Trainer):
        """Records what its steps take."""

        def init_adapters(self) -> None:
            super().init_adapters()
            model = self.built.part.model
            recorder.watch(model)
            engine: Any = self.engine
            engine.optimizer = _Recorded(
                engine.optimizer, {"finish_gradients": parts.GRADIENTS, "step": parts.OPTIMIZER}
            )
            run_step = engine.step

            collate = _recorded(self.data.collate, WITHIN + parts.ROWS)

            def recorded(step: int, batches: MicroBatchLoader, *rest: Any) -> dict[str, float]:
                recorder.rows_are_there()
                return run_step(step, MicroBatchLoader(batches.samples, collate), *rest)

            engine.step = recorded
            recorder.begin()

        def log(self, metrics: dict[str, float], is_recorded: bool) -> None:
            super().log(metrics, is_recorded)
            recorder.end()
            recorder.begin()

    assert Measured(plan, registry).train() == 0, "a run that ends"
    return {"alone": recorder.plain[1:], "recorded": recorder.recorded}


def _event(name: str) -> Any:
    from paddle.profiler import RecordEvent

    return RecordEvent(name)


class _Recorded:
    """Something whose methods are events."""

    def __init__(self, inner: Any, ranges: dict[str, str]):
        self._inner = inner
        self._ranges = ranges

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _recorded(found, WITHIN + self._ranges[name]) if name in self._ranges else found


def _recorded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _event(name):
            return call(*args, **kwargs)

    return recorded


def _recorded_with_gradient(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Of what returns its output and a function for its gradient."""

    def recorded(*args: Any) -> Any:
        with _event(name):
            output, gradient = call(*args)
        return output, _recorded(gradient, name)

    return recorded


class _RecordedBackend(CpuBackend):
    """The CPU, whose kernels are events: Paddle's profiler names the backward pass of an operation of ours, and not the
    operation. Products of float32 are Paddle's own, which it names."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def loaded_kernels(self, precision: str) -> dict[str, Callable[..., Any]]:
        kernels = super().loaded_kernels(precision)
        found = {
            operation: _recorded(kernels[operation], WHOLE + part)
            for operation, part in parts.OF_KERNELS.items()
            if operation in kernels
        }
        found["attention"] = self._recorder.attention_of(found["attention"])
        if "matmul" in kernels:
            found["matmul"] = self._recorder.matmul
        if "rounded_grad_cross_entropy" in kernels:
            found["rounded_grad_cross_entropy"] = _recorded_with_gradient(
                kernels["rounded_grad_cross_entropy"], WHOLE + parts.LOSS
            )
        sums = [operation for operation in ("sum_matmul", "rounded_output_matmul") if operation in kernels]
        return {**kernels, **found, **{operation: self._recorder.sum_of(operation) for operation in sums}}


class _Recorder:
    """Times steps, every second one under the profiler."""

    def __init__(self, matmuls: Any, num_words: int):
        """
        Args:
            matmuls: `MatmulOps` of the device, for the precision of the run.
            num_words: of the vocabulary; no other size of the model is the same.
        """
        self._matmuls = matmuls
        self._num_words = num_words
        self._has_device_matmul = matmuls.has_device_matmul
        """Whether products are Paddle's own."""
        self._rounds = matmuls.rounds_inputs
        """Whether they take matrices that are rounded."""
        self._number = 0
        self._products = collections.Counter[Product]()
        self._attention = 0
        """FLOPs of attention in this step."""
        self._profiler: Any = None
        self._events: list[Any] = []
        self._passes_of_head = 0
        self.plain: list[float] = []
        """Seconds of the steps without the profiler, the first of all included."""
        self.recorded: list[dict[str, Any]] = []

    # what the model calls

    def matmul(self, x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
        """The device's own product of two matrices, as an event."""
        with self._noted(x, y, transpose_x, transpose_y):
            return self._matmuls.matmul(x, y, transpose_x, transpose_y)

    def attention_of(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """The device's own attention, whose products are counted."""
        import paddle

        def counted(q: Any, k: Any, v: Any, mask: Any) -> Any:
            rows, length, heads, head_size = q.shape
            if mask is None:
                pairs = rows * length * (length + 1) // 2
            else:  # `ops.document_spans`
                begin, end, own = mask.unbind(1)
                pairs = int(((end - begin) + (paddle.arange(length) - own + 1)).sum()) * (rows // mask.shape[0])
            has_gradient = paddle.is_grad_enabled() and not q.stop_gradient
            self._attention += parts.attention_flops(pairs, heads, head_size, v.shape[-1], has_gradient)
            return attend(q, k, v, mask)

        return counted

    def sum_of(self, operation: str) -> Callable[..., Any]:
        """The device's own sum of products, as an event of the first one's part."""
        add = getattr(self._matmuls, operation)

        def recorded(pairs: Any, transpose_y: bool) -> Any:
            first, *_ = [self._noted(x, y, False, transpose_y) for x, y in pairs]
            with first:
                return add(pairs, transpose_y)

        return recorded

    def _noted(self, x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> Any:
        wide = x.shape[-1]
        left = (int(x.size) // wide, wide)
        right = (int(y.shape[0]), int(y.shape[1]))
        dtypes = (str(x.dtype).rpartition(".")[2], str(y.dtype).rpartition(".")[2])
        product = Product(left, right, transpose_x, transpose_y, dtypes, self._num_words in (*left, *right))
        self._products[product] += 1
        return _event(WHOLE + product.part)

    def watch(self, model: Any) -> None:
        """Note the products of Paddle's own in the forward passes of a model, and which of them are the head's."""
        import paddle

        from llmsuite.models.linear import is_matrix

        if self._has_device_matmul:  # those of the device are noted where they are made
            return
        logits = model.logits

        def is_frozen(matrix: Any) -> bool:
            return bool(getattr(matrix, "stop_gradient", True))  # one that is quantised is no tensor

        def note(x: Any, matrix: Any, transposed: bool = False, head: bool = False, has_gradient: bool = False) -> None:
            """`has_gradient`: x has one, whatever the tensor that is given says."""
            rows = int(x.size) // int(x.shape[-1])
            back = paddle.is_grad_enabled()
            shape = (int(matrix.shape[0]), int(matrix.shape[1]))
            of_input = back and (has_gradient or not x.stop_gradient)
            of_matrix = back and not is_frozen(matrix)
            self._products.update(forward_and_back(rows, shape, transposed, of_input, of_matrix, head))

        def of_head(hidden: Any) -> Any:
            self._passes_of_head += paddle.is_grad_enabled()
            tied = model.lm_head is None
            note(hidden, model.model.embed_tokens.weight if tied else model.lm_head.weight, tied, True)
            with _event(WITHIN + parts.HEAD):
                return logits(hidden)

        def of_adapter(layer: Any, inputs: tuple[Any, ...], y: Any) -> None:
            (x,) = inputs
            note(x, layer.weight)
            if (factors := layer.factors()) is not None:
                note(x, factors.first)
                note(x[..., : factors.first.shape[1]], factors.second, has_gradient=True)  # of the shape that x A has

        model.__dict__["logits"] = of_head
        for layer in model.sublayers():
            if is_matrix(layer) and layer is not model.lm_head:
                layer.register_forward_post_hook(lambda layer, x, y: note(x[0], layer.weight))
            elif hasattr(layer, "is_low_rank"):
                layer.register_forward_post_hook(of_adapter)

    # what the trainer calls

    def begin(self) -> None:
        """Before a step."""
        from paddle.profiler import Profiler, ProfilerTarget

        self._products.clear()
        self._attention = 0
        self._passes_of_head = 0
        self._profiler = None
        if self._number and self._number % 2 == 0:
            self._profiler = Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda profiler: None)
            self._profiler.start()
        self._events = [_event(parts.STEP), _event(WITHIN + parts.ROWS)]
        for event in self._events:
            event.begin()
        self._since = time.perf_counter()

    def rows_are_there(self) -> None:
        """In a step, when its rows have been read."""
        self._events.pop().end()

    def end(self) -> None:
        """Behind a step."""
        seconds = time.perf_counter() - self._since
        self._events.pop().end()
        self._number += 1
        if self._profiler is None:
            self.plain.append(seconds)
            return
        self._profiler.stop()
        self.recorded.append(self._told(seconds))

    def _told(self, seconds: float) -> dict[str, Any]:
        found = Seconds(_find(self._profiler.profiler_result.get_data().values(), parts.STEP))
        # else the first product of Paddle's on the way back is not the head's
        assert self._has_device_matmul or found.num_passes_back == self._passes_of_head, found.num_passes_back
        products = self._products.copy()
        attention = self._attention
        told = {}
        times = {product: self._alone(product) for product in products}
        narrow = times if not self._rounds else {product: self._alone(product.rounded) for product in products}
        for part in parts.PRODUCTS:
            own = {product: count for product, count in products.items() if product.part == part}
            told[part] = {
                "flops": sum(product.flops * count for product, count in own.items()),
                "alone": sum(times[product] * count for product, count in own.items()),
                "of_rounded": sum(narrow[product] * count for product, count in own.items()),
            }
        others = dict(found.others.most_common(12))
        return {"seconds": seconds, "parts": found.parts, "products": told, "attention": attention, "others": others}

    def _alone(self, product: Product) -> float:
        """Seconds of a product that is repeated."""
        import paddle

        x, y = (
            paddle.randn(shape).astype(dtype) for shape, dtype in zip((product.left, product.right), product.dtypes)
        )
        times: list[float] = []
        with paddle.no_grad():
            self._matmuls.matmul(x, y, product.transpose_left, product.transpose_right)
            while len(times) < _LEAST_TIMES or sum(times) < _LEAST_SECONDS:
                start = time.perf_counter()
                self._matmuls.matmul(x, y, product.transpose_left, product.transpose_right)
                times.append(time.perf_counter() - start)
        return statistics.median(times)


def _find(trees: Any, name: str) -> Any:
    """The event of a name in the trees of all threads."""
    waiting = list(trees)
    while waiting:
        event = waiting.pop()
        if event.name == name:
            return event
        waiting += event.children_node
    raise AssertionError(f"the profile has no event {name!r}")


if __name__ == "__main__":
    sys.exit(main())
