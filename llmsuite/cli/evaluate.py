"""The command `llmsuite eval MODEL`: perplexity, exact match and preference accuracy on files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.safe_files import open_at_once
from llmsuite.cli.generate import add_model_arguments, add_template_kwargs, read_template_kwargs
from llmsuite.cli.ranks import settle_degrees
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.chat_templates import OF_TOKENIZER, TEMPLATE_HELP

if TYPE_CHECKING:
    from llmsuite.inference.prompts import Prompt, Prompter


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import NonNegativeInt, PositiveInt

    add_model_arguments(parser)
    parser.add_argument(
        "--perplexity", type=str | None, default=None, help="a .txt file, or JSON Lines with one text in each row"
    )
    parser.add_argument("--key", type=str, default="text", help="key of the text in the rows of --perplexity")
    parser.add_argument(
        "--exact_match",
        type=str | None,
        default=None,
        help='JSON Lines of prompts (as for generate --input) with an "answer"',
    )
    parser.add_argument(
        "--preference", type=str | None, default=None, help="preference pairs, in any format of training data"
    )
    parser.add_argument(
        "--tasks", type=str | None, default=None, help="tasks of lm-evaluation-harness, comma-separated"
    )
    parser.add_argument(
        "--include_path", type=str | None, default=None, help="directory with your own task definitions"
    )
    parser.add_argument(
        "--limit", type=PositiveInt | None, default=None, help="evaluate only the first rows of each task"
    )
    parser.add_argument(
        "--num_fewshot", type=NonNegativeInt | None, default=None, help="few-shot examples for each task"
    )
    parser.add_argument(
        "--max_length", type=PositiveInt | None, default=None, help="longest sequence in tokens (default: the model's)"
    )
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=64, help="longest answer of --exact_match")
    parser.add_argument("--raw", action="store_true", help="no chat template for --exact_match")
    parser.add_argument("--chat_template", type=str, default=OF_TOKENIZER, help=TEMPLATE_HELP)
    add_template_kwargs(parser)
    parser.add_argument("--batch_size", type=PositiveInt, default=8)
    parser.add_argument("--output", type=str | None, default=None, help="JSON file for the results")


def run(args: Any, registry: Registry) -> int:
    if not (args.perplexity or args.exact_match or args.preference or args.tasks):
        raise UserError("eval: give --perplexity, --exact_match, --preference or --tasks, at least one")
    settle_degrees(args)
    if args.num_devices > 1:
        raise UserError("--num_devices: eval runs on one device")
    if args.engine == "static" and (args.perplexity or args.preference or args.tasks):
        raise UserError("--engine static: an exported program gives the logits of the last token only; use dynamic")
    from llmsuite.cli.model import open_generator
    from llmsuite.cli.model_paths import check_files, resolve_model_arguments

    check_files(args, ("perplexity", "exact_match", "preference", "include_path"))
    resolve_model_arguments(args)
    opened = open_generator(args, registry)
    from llmsuite.data.chat_template import load_template
    from llmsuite.data.keys import ALL, ColumnRules
    from llmsuite.data.read import read_rows
    from llmsuite.inference import evaluate
    from llmsuite.inference.prompts import Prompter

    generator = opened.generator
    kwargs = read_template_kwargs(args)
    found = dict[str, Any]()
    tokenizer = generator.tokenizer
    longest = generator.decoder.max_length
    length = args.max_length or longest
    if not 2 <= length <= longest:
        raise UserError(f"--max_length: is {length}; it has to be from 2 to {longest}")
    if opened.model is not None:
        score = evaluate.scorer(opened.model, args.batch_size)
        if args.perplexity:
            texts = read_texts(Path(args.perplexity), args.key)
            found["perplexity"] = evaluate.perplexity(score, tokenizer, texts, length)
        if args.preference:
            template = load_template(
                args.chat_template, tokenizer.directory, tokenizer.special_tokens, kwargs, ignores_unknown=True
            )
            formats = registry.data_formats
            readers = registry.stages_by_row_kind()
            columns = ColumnRules(ignored=(ALL,))  # a file for several evaluations has the columns of all of them
            rows = read_rows(Path(args.preference), "preference", "auto", formats, columns=columns, readers=readers)
            found["preference"] = evaluate.preference_accuracy(score, tokenizer, template, rows, length)
    if args.exact_match:
        prompter = Prompter(
            tokenizer, None if args.raw else args.chat_template, template_kwargs=kwargs, ignores_unknown=True
        )
        prompts, answers = read_eval_prompts(Path(args.exact_match), prompter)
        found["exact_match"] = evaluate.exact_match(generator, prompts, answers, args.max_new_tokens, args.batch_size)
    numbers = {name: dataclasses.asdict(value) for name, value in found.items()}
    if args.tasks:
        numbers.update(_tasks(args, opened))
    for name, values in numbers.items():
        shown = []
        for key, value in values.items():
            if isinstance(value, float):
                shown.append(f"{key} {value:.4f}")
            elif not isinstance(value, list):
                shown.append(f"{key} {value}")
        print(f"{name}: {'  '.join(shown)}")
    if args.output:
        from llmsuite.base.files import write_text_atomic

        write_text_atomic(Path(args.output), json.dumps(numbers, indent=2, ensure_ascii=False) + "\n")
    return 0


def _tasks(args: Any, opened: Any) -> dict[str, dict[str, Any]]:
    try:
        from llmsuite.inference.harness import HarnessModel, evaluate_tasks
    except ImportError as error:
        raise UserError(f"--tasks: {error.name} is missing; install it with: {install_command('eval')}") from error
    model = HarnessModel(opened.model, opened.generator, args.batch_size, args.max_new_tokens)
    include = None
    if args.include_path:
        include = Path(args.include_path)
    return evaluate_tasks(model, args.tasks.split(","), include, args.limit, args.num_fewshot)


def read_texts(path: Path, key: str) -> list[str]:
    """The texts of a file: a text file as one text, JSON Lines as one text per row. Raises UserError with the line."""
    try:
        with io.TextIOWrapper(open_at_once(path), encoding="utf-8-sig") as file:
            content = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if path.suffix not in (".jsonl", ".json"):
        return [content]
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: is not a JSON line: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            raise UserError(f"{path}:{number}: has no text {key!r}; name another with --key")
        texts.append(row[key])
    return texts


def read_eval_prompts(path: Path, prompter: Prompter) -> tuple[list[Prompt], list[str]]:
    """Prompts and their reference answers. Raises UserError with the row that has no answer."""
    prompts = prompter.read(path)
    answers = [prompt.row.get("answer") for prompt in prompts]
    for number, answer in enumerate(answers, 1):
        if not isinstance(answer, str):
            raise UserError(f'{path}: row {number}: has no "answer", a text')
    return prompts, [str(answer) for answer in answers]
