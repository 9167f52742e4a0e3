"""The stage `infer`: a model answers the prompts of a file, one line of `answers.jsonl` for each.

prompts -> those without an answer yet -> model -> answers
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import RecipeError, UserError
from llmsuite.files import NO_ROOM, os_errors, read_json_object, write_text_atomic
from llmsuite.inference.beam import Beams
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.defaults import NAMES, read_defaults
from llmsuite.inference.fused import fuse
from llmsuite.inference.generate import Answer, Generator
from llmsuite.inference.load import as_first_rank, build_model, load_model, open_any
from llmsuite.inference.prompts import Prompt, Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.locks import OpenDirectory, lock_directory
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report, track
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.unread import unread_keys
from llmsuite.regular import exists
from llmsuite.schema.section import as_plain
from llmsuite.shown import redacted_data
from llmsuite.stages.sections import InferSection
from llmsuite.train.weights import draw

_DECIDING = ("model", "data", "infer", "seed")
"""Sections of a recipe that decide the answers; precision and strategy change them by rounding only."""


def work(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Answer the prompts of a plan, as one rank of a tensor parallel group. Returns the exit code.

    Raises:
        UserError: the input is wrong; nothing that existed was changed.
    """
    recipe = plan.recipe
    section: InferSection = plan.section
    backend = plan.device.factory()
    backend.activate(collective.local_rank())
    is_first = collective.rank() == 0
    lock = lock_directory(plan.output_dir) if is_first else None
    mesh = collective.start(plan.degrees)
    plan.check_files()
    plan = plan.fetched(report)
    if recipe.source:
        report(f"numbers from {recipe.source}")

    generator, configs = _generator(plan, registry, backend, mesh)
    template = None if section.raw else recipe.data.chat_template
    prompts = Prompter(generator.tokenizer, template, section.system).read(plan.train_path, recipe.data.columns)
    given = {name: value for name in NAMES if (value := getattr(section, name)) is not None}
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
    if section.num_beams == 1:  # beam search draws nothing
        defaults = read_defaults(configs, section.generation_config)
        sampling = defaults.fill(sampling, given)
        if defaults.note:
            report(defaults.note)
    beams = Beams(section.num_beams, section.length_penalty, section.max_new_tokens, section.min_new_tokens)
    count, batch_size = section.num_return_sequences, section.batch_size
    if unread := unread_keys(plan.loaded):
        raise RecipeError(unread)

    target = plan.output_dir / plan.stage.result
    done = _answered(plan, target, prompts) if is_first and resume else 0
    done = int(collective.from_first_rank([float(done)])[0])
    if is_first:
        write_text_atomic(
            plan.output_dir / "recipe.json", json.dumps(redacted_data(as_plain(recipe)), indent=2, ensure_ascii=False)
        )
    left = prompts[done:]
    found: Iterator[list[Answer]]
    if section.num_beams > 1:
        found = (generator.beam_answers(prompt.ids, beams, count) for prompt in left)
    else:
        found = generator.answers((prompt.ids for prompt in left), sampling, count, batch_size)
    if is_first:
        with (
            contextlib.closing(OpenDirectory(plan.output_dir)) as directory,
            os_errors(target, NO_ROOM),
            open(target, "a", encoding="utf-8") as file,
        ):
            for prompt, answers in zip(track(left, "answering"), found):
                row = {**prompt.row, "answers": [answer.row() for answer in answers]}
                directory.check()
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        report(f"wrote {target}: answers to {len(prompts)} prompts")
    else:
        for _ in found:  # the other ranks compute, the first one writes
            pass
    if lock is not None:
        lock.close()
    return 0


def _generator(plan: RunPlan, registry: Registry, backend: Any, mesh: Mesh) -> tuple[Generator, list[Path]]:
    """The model of the recipe, from files or initialised from the seed; and the directories whose configs are about
    it."""
    precision = plan.recipe.engine.precision
    tokenizer, models = plan.tokenizer, list[Path]()
    if plan.weights is not None:
        source = open_any(plan.weights, registry.models, runs=True)
        report(f"loading {plan.weights} ({source.description})")
        model, models = load_model(source, backend, precision, mesh), [source.path]
        if plan.recipe.model.tokenizer is None:
            tokenizer = source.tokenizer_directory
    else:
        seed, std = plan.recipe.seed, plan.model_config.initializer_range
        report(f"no model.weights: parameters are drawn from seed {seed}")
        model = build_model(
            plan.family, plan.model_config, backend, precision, mesh, lambda model: draw([model], seed, std)
        )
    if mesh.degrees.num_ranks == 1:
        fuse(model, backend.ops(precision))
    assert tokenizer is not None  # a rule of recipes has seen to it
    words = TextTokenizer(tokenizer)
    if words.vocab_size > plan.model_config.vocab_size:
        raise UserError(
            f"model.tokenizer: {tokenizer} has {words.vocab_size} tokens, more than the "
            f"{plan.model_config.vocab_size} of the model"
        )
    decoder = ModelDecoder(model, mesh)
    return Generator(decoder, words, words.ends(*models), as_first_rank), [tokenizer, *models]


def _answered(plan: RunPlan, target: Path, prompts: Sequence[Prompt]) -> int:
    """Number of prompts that have answers in the file already; a line that is half written is removed.

    Raises:
        UserError: the file has answers to other prompts, or was written by another recipe.
    """
    if not exists(target):
        return 0
    started, now = read_json_object(plan.output_dir / "recipe.json"), redacted_data(as_plain(plan.recipe))
    if differing := [key for key in _DECIDING if started.get(key) != now[key]]:
        raise UserError(
            f"{target}: was written by a recipe with another {', '.join(differing)}; go on with "
            f"{plan.output_dir / 'recipe.json'}, or choose another --output_dir"
        )
    whole = target.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    rows = [json.loads(line) for line in whole.splitlines()]  # of bytes: U+2028 ends no line there
    if len(rows) > len(prompts) or any(
        {key: value for key, value in row.items() if key != "answers"}
        != {key: value for key, value in prompt.row.items() if key != "answers"}
        for row, prompt in zip(rows, prompts)
    ):
        raise UserError(f"{target}: has answers to other prompts; choose another --output_dir")
    with open(target, "r+b") as file:
        file.truncate(len(whole))
    report(f"{len(rows)} of {len(prompts)} prompts are answered")
    return len(rows)
