"""The stage `infer`: a model answers the prompts of a file, with a line of `answers.jsonl` for each.

prompts -> prompts without an answer -> model -> answers
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import NO_ROOM, os_errors, read_json_object, write_text_atomic
from llmsuite.base.locks import OpenDirectory, lock_directory
from llmsuite.base.progress import report, track
from llmsuite.base.redaction import redacted_data
from llmsuite.base.safe_files import exists
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import as_plain
from llmsuite.contract.specs import JobSpec
from llmsuite.data.keys import ALL, ColumnRules
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.weights import random_values
from llmsuite.inference.beam import BeamParams
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.fused import fuse
from llmsuite.inference.generate import Answer, Generator
from llmsuite.inference.load import broadcast_tokens, build_model, load_model, open_any
from llmsuite.inference.prompts import Prompt, Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.sampling_defaults import read_defaults
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.plans import ModelPlan
from llmsuite.recipe.resolve import RunPlan
from llmsuite.stages.sections import InferSection

_DECISIVE = ("model", "data", "infer", "seed")
"""Sections of a recipe that determine the answers; precision and parallelism change them by rounding only."""


def work(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Answer the prompts of a plan, as one rank of a tensor parallel group. Returns the exit code.

    Raises:
        UserError: the input is invalid. Existing files are not changed.
    """
    recipe = plan.recipe
    section: InferSection = plan.train.stage_section
    backend = plan.parallel.device.factory()
    backend.activate(collective.local_rank())
    backend.check_precision(recipe.engine.precision)
    is_first = collective.rank() == 0
    lock = None
    if is_first:
        lock = lock_directory(plan.output_dir)
    mesh = collective.start(plan.parallel.degrees)
    plan.check_files()
    plan = plan.fetched(report)
    if recipe.source:
        report(f"recipe notes: {recipe.source}")

    generator, configs = _generator(plan.model, recipe.engine.precision, registry, backend, mesh)
    template = None if section.raw else recipe.data.chat_template
    data = recipe.data
    prompter = Prompter(
        generator.tokenizer,
        template,
        section.system,
        template_kwargs=data.chat_template_kwargs,
        ignores_unknown=ALL in data.ignore_columns,
    )
    prompts = prompter.read(plan.data.train_path, ColumnRules(data.columns, data.ignore_columns))
    given: dict[str, Any] = {
        "temperature": section.temperature,
        "top_k": section.top_k,
        "top_p": section.top_p,
        "min_p": section.min_p,
        "repetition_penalty": section.repetition_penalty,
    }
    given = {name: value for name, value in given.items() if value is not None}
    sampling = Sampling(
        **given,
        frequency_penalty=section.frequency_penalty,
        presence_penalty=section.presence_penalty,
        seed=recipe.seed,
        max_new_tokens=section.max_new_tokens,
        min_new_tokens=section.min_new_tokens,
        stop=tuple(section.stop),
        num_logprobs=section.logprobs,
    )
    if section.num_beams == 1:  # beam search does not sample
        defaults = read_defaults(configs, section.generation_config)
        sampling = defaults.fill(sampling, given)
        if defaults.note:
            report(defaults.note)
    beams = BeamParams(section.num_beams, section.length_penalty, section.max_new_tokens, section.min_new_tokens)
    count = section.num_return_sequences
    batch_size = section.batch_size

    assert isinstance(plan.train.stage, JobSpec)
    target = plan.output_dir / plan.train.stage.result
    done = 0
    if is_first and resume:
        done = _answered(plan.output_dir, recipe, target, prompts)
    # the file is on the first rank, and all ranks have to generate the same answers
    done = int(collective.broadcast_from_rank0([float(done)])[0])
    if is_first:
        write_text_atomic(
            plan.output_dir / "recipe.json", json.dumps(redacted_data(as_plain(recipe)), indent=2, ensure_ascii=False)
        )
    remaining = prompts[done:]
    results: Iterator[list[Answer]]
    if section.num_beams > 1:
        results = (generator.beam_answers(prompt.ids, beams, count) for prompt in remaining)
    else:
        results = generator.answers((prompt.ids for prompt in remaining), sampling, count, batch_size)
    if is_first:
        with (
            contextlib.closing(OpenDirectory(plan.output_dir)) as directory,
            os_errors(target, NO_ROOM),
            open(target, "a", encoding="utf-8") as file,
        ):
            for prompt, answers in zip(track(remaining, "answering"), results):
                row = {**prompt.row, "answers": [answer.row() for answer in answers]}
                directory.check()
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        report(f"wrote {target}: answers to {len(prompts)} prompts")
    else:
        for _ in results:  # the other ranks take part in the forward passes; the first one writes
            pass
    if lock is not None:
        lock.close()
    return 0


def _generator(
    model_plan: ModelPlan, precision: str, registry: Registry, backend: Any, mesh: Mesh
) -> tuple[Generator, list[Path]]:
    """The model of the recipe, from files or initialised from the seed; and the directories with its configs."""
    tokenizer = model_plan.tokenizer
    models = list[Path]()
    if model_plan.weights is not None:
        source = open_any(model_plan.weights, registry.models, runs=True)
        report(f"loading {model_plan.weights} ({source.description})")
        model = load_model(source, backend, precision, mesh)
        models = [source.path]
        if model_plan.section.tokenizer is None:
            tokenizer = source.tokenizer_directory
    else:
        seed = model_plan.seed
        std = model_plan.config.initializer_range
        report(f"no model.weights: parameters are initialised from seed {seed}")
        model = build_model(
            model_plan.family,
            model_plan.config,
            backend,
            precision,
            mesh,
            lambda model: random_values([model], seed, std),
        )
    if mesh.degrees.num_ranks == 1:
        fuse(model, backend.ops(precision))
    assert tokenizer is not None  # recipes without one are refused
    text_tokenizer = TextTokenizer(tokenizer)
    if text_tokenizer.vocab_size > model_plan.config.vocab_size:
        raise UserError(
            f"model.tokenizer: {tokenizer} has {text_tokenizer.vocab_size} tokens, more than the "
            f"{model_plan.config.vocab_size} of the model"
        )
    decoder = ModelDecoder(model, mesh)
    return Generator(decoder, text_tokenizer, text_tokenizer.stop_token_ids(*models), broadcast_tokens), [
        tokenizer,
        *models,
    ]


def _answered(output_dir: Path, recipe: Recipe, target: Path, prompts: Sequence[Prompt]) -> int:
    """Number of prompts that already have answers in the file. A partial last line is removed.

    Raises:
        UserError: the file has answers to other prompts, or was written by another recipe.
    """
    if not exists(target):
        return 0
    started = read_json_object(output_dir / "recipe.json")
    now = redacted_data(as_plain(recipe))
    if differing := [key for key in _DECISIVE if started.get(key) != now[key]]:
        raise UserError(
            f"{target}: was written by a recipe with another {', '.join(differing)}; continue with "
            f"{output_dir / 'recipe.json'}, or choose another --output_dir"
        )
    content = target.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    rows = [json.loads(line) for line in content.splitlines()]  # of bytes, where U+2028 ends no line
    if len(rows) > len(prompts) or any(
        _without_answers(row) != _without_answers(prompt.row) for row, prompt in zip(rows, prompts)
    ):
        raise UserError(f"{target}: has answers to other prompts; choose another --output_dir")
    with open(target, "r+b") as file:
        file.truncate(len(content))
    report(f"{len(rows)} of {len(prompts)} prompts are answered")
    return len(rows)


def _without_answers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "answers"}
