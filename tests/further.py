"""What of `tests/multi` and `tests/unit` runs in which command, so that `make test` ends in 20 minutes on 2 cores.

| command | runs |
|---|---|
| `make test` | all but what follows |
| `make test-further` | files of FURTHER, tests marked `@pytest.mark.further`, and the other cases of SAMPLED |
| `make parity` | everything in files of ALIKE, and what `tests.parity.cases.few` takes out of tables of runs |

The first two share no case. Each command prints the slowest of what it runs. `python -m tests.further` prints the files
that have something for `make test-further`; with `--part 2/3`, the second of three parts of them. CI runs `make test`
and one part, which goes round with the number of commits: all of it takes longer than CI may.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from tests.support.paths import ROOT

FURTHER = {
    "multi": (
        "adamw_8bit adapter_plugin align all_to_all annotated annotated_programs annotated_styles answers "
        "bad_places bf16 bf16_lora bf16_programs bf16_rollouts buckets budgets chat_models chat_page chunked_loss "
        "doctor early_stopping expert_parallel family_contract fp8 fused_projections gemma hang interrupted "
        "interrupted_twice killed_rollouts large_files lattice longer_runs lora lora_further lora_ga machines "
        "matrix merge_distcp mtp mutations no_masters notebooks order overlap own_disks packing paddle_scripts "
        "pipelines plugin_examples ppo ppo_engine prefix program_expert_pipelines program_guard program_options "
        "program_pipelines program_rollouts programs python qat rank_programs reft rehearse rehearse_recipes "
        "removals report_page reported_resumes restarts rollout_engine rollouts saving serve_adapters serve_ranks "
        "sim_further sim_removals sim_stages split_kernels standin standin_further standin_programs studio_page "
        "token_accuracy traffic tutorials upstream vocabulary weighted_turns windows"
    ),
    "unit/benchmarks": "roofline",
    "unit/checkpoint/convert": "merge_families merge_memory paddlenlp_peft",
    "unit/data": "larger_than_memory",
    "unit/inference": "export pack_model packed_programs",
    "unit/parallel/program": "recompute",
}
"""Files that take long, and go further into something that others try too: directory within `tests`, and names
without `test_` and `.py`."""

SAMPLED = {
    3: {
        "unit/adapters": "adapters lora_further methods prefix",
        "unit/base": "supervisor",
        "unit/base/web": "client",
        "unit/checkpoint": "finite",
        "unit/checkpoint/convert": "gguf_export pdparams",
        "unit/cli": "adapters_tokenizer odd_names",
        "unit/contract": "registry",
        "unit/data": "tokenizer untrusted",
        "unit/engine": "full_weights row_samples",
        "unit/inference": (
            "batch bf16_cache chunked_prefill fused generate own_layers prefix_cache rank_shards refresh"
        ),
        "unit/models": "documents family_plans latent_attention llama_reference mtp quantised",
        "unit/parallel": "block_moments chunked_loss collective schedule static",
        "unit/plugins/align": "command",
        "unit/plugins/cpu_kernels": "bf16_attention",
        "unit/rl": "builtin_rewards remote",
        "unit/stages": "program_losses reference_cache rm",
    },
    5: {
        "unit/cli": "main",
        "unit/models": "family_references qat",
        "unit/parallel": "sharding",
        "unit/parallel/program": "clip experts",
        "unit/planning": "call_order memory plans",
        "unit/plugins/cpu_kernels": "bf16_products",
        "unit/recipe": "device_rules mutations schema smoke",
        "unit/rl": "episodes local",
    },
}
"""Files that multiply recipes by rules, families by layouts, or types by kernels, by n: `make test` runs one of n cases
of each of their tests, as `sample` chooses."""

ALIKE = {
    4: {"unit/checkpoint/convert": "merge_families"},
    8: {"unit/inference": "pack_model"},
}
"""Files with hundreds of similar cases, by n: `make test` and `make test-further` run one of n together."""


def paths(names: Mapping[str, str]) -> list[str]:
    """Paths of files by their directories and names."""
    return [f"tests/{place}/test_{name}.py" for place, listed in names.items() for name in listed.split()]


FURTHER_FILES = frozenset(paths(FURTHER))
SAMPLED_FILES = {path: n for n, names in SAMPLED.items() for path in paths(names)}
ALIKE_FILES = {path: n for n, names in ALIKE.items() for path in paths(names)}

RUNS_ALL = os.environ.get("LLMSUITE_TEST_MESHES") == "all"
"""Whether all cases run, as in `make parity`."""


def values(case: Mapping[str, Any]) -> Iterator[Hashable]:
    """Parameters of a case with their values. A path, such as llama/sft.json, is each of its parts too."""
    for name, value in case.items():
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        yield name, type(value), value
        if isinstance(value, (str, PurePath)) and len(parts := PurePath(value).parts) > 1:
            yield from ((name, part) for part in parts)


def sample(cases: Sequence[Mapping[str, Any]], n: int) -> set[int]:
    """Choose one of n cases, and more where values need them: each value that n cases or more share is in one. All of
    fewer than 2n are chosen.

    The case that comes next is the one with most values that no chosen one has, then with most pairs of values; of
    equal ones the first of every n-th case, then of those behind them.

    Args:
        cases: parameters of the cases of one test, in the order in which they run.
        n: 1 or more; 1 chooses all.

    Returns:
        Indices of the chosen ones.
    """
    if len(cases) < 2 * n or n == 1:
        return {*range(len(cases))}
    counts = Counter(value for case in cases for value in {*values(case)})
    shared = [sorted((v for v in {*values(case)} if counts[v] >= n), key=repr) for case in cases]
    left = [index for start in range(n) for index in range(start, len(cases), n)]
    wanted = -(-len(cases) // n)
    missing = {value for case in shared for value in case}
    paired: set[tuple[Hashable, Hashable]] = set()
    chosen: set[int] = set()
    while len(chosen) < wanted or missing:

        def gain(index: int) -> tuple[int, int]:
            pairs = {*itertools.combinations(shared[index], 2)}
            return len(missing.intersection(shared[index])), len(pairs - paired)

        best = max(left, key=gain)
        left.remove(best)
        chosen.add(best)
        missing.difference_update(shared[best])
        paired.update(itertools.combinations(shared[best], 2))
    return chosen


def files() -> list[str]:
    """Files with something that `make test` leaves to `make test-further`."""
    marked = {
        path.relative_to(ROOT).as_posix()
        for place in ("multi", "unit")
        for path in (ROOT / "tests" / place).rglob("test_*.py")
        if "pytest.mark.further" in path.read_text(encoding="utf-8")
    }
    return sorted(FURTHER_FILES | SAMPLED_FILES.keys() | marked)


def part_of(listed: Sequence[str], part: str) -> list[str]:
    """Every n-th file, so that parts of an ordered list hold as much of each room.

    Args:
        listed: paths of files.
        part: as in `2/3`: the second of three.

    Raises:
        ValueError: The part is written otherwise, or there is none of this number.
    """
    written = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    number, n = (int(text) for text in written.groups()) if written else (0, 0)
    if not 1 <= number <= n:
        raise ValueError(f"a part is written K/N, with K from 1 to N, as in 2/3; got {part!r}")
    return [*listed[number - 1 :: n]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the files that have something for `make test-further`.")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th of them, from the K-th on")
    try:
        print("\n".join(part_of(files(), parser.parse_args().part)))
    except ValueError as error:
        parser.error(str(error))
