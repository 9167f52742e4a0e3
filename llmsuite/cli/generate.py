"""The command `llmsuite generate MODEL`: generates answers to prompts, to the rows of a file, or in a conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import printable
from llmsuite.base.safe_files import exists
from llmsuite.cli.ranks import add_degrees, launch_ranks, settle_degrees
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.chat_templates import OF_TOKENIZER, TEMPLATE_HELP
from llmsuite.stages.sections import PENALTIES

_ENGINES = Literal["dynamic", "static"]
_UNSUPPORTED_IN_LOOP = {
    "chat": False,
    "no_cache": False,
    "min_new_tokens": 0,
    "stop": None,
    "temperature": 0.0,
    **PENALTIES,
    "num_return_sequences": 1,
    "num_beams": 1,
    "logprobs": None,
}
"""Options that a program with a decoding loop does not support, and the values that switch them off."""
CONTROL_TOKENS_HELP = "read control tokens such as <|im_end|> in the text of users; without it they are plain text"


def add_model_arguments(parser: Any) -> None:
    """Add the options for the model, its device and its precision."""
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "model",
        type=str,
        help="a run, a checkpoint or model directory of any layout, an adapter (with --base), an exported model, or a "
        "name on a hub such as hf:ORG/NAME",
    )
    parser.add_argument("--base", type=str | None, default=None, help="for an adapter: the model it belongs to")
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not with MODEL")
    parser.add_argument(
        "--tokenizer", type=str | None, default=None, help="directory of the tokenizer, if not with MODEL"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams; see: llmsuite merge --help")
    parser.add_argument("--device", type=str, default="cpu", help="see: llmsuite list devices")
    parser.add_argument(
        "--num_devices", type=PositiveInt, default=1, help="split the model over this many devices of this machine"
    )
    add_degrees(parser)
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "bf16", "fp16", "int8", "nf4", "fp4", "int4"],
        default="fp32",
        help="precision of the model. On cpu, of its weight matrices only, which are multiplied in the form in which "
        "they are stored: bf16, int8, nf4, fp4 or int4 (the last three with embedding and head in int8); all else is "
        "float32, except keys and values with bf16",
    )
    parser.add_argument(
        "--engine", type=_ENGINES, default="dynamic", help="static: Paddle Inference, for a model of `llmsuite export`"
    )


def add_generation_config(parser: Any) -> None:
    """Add the option that switches a model's generation_config.json on or off."""
    parser.add_argument(
        "--generation_config",
        type=Literal["auto", "ignore"],
        default="auto",
        help="auto: take defaults of temperature, top_k, top_p, min_p and repetition_penalty from the model's "
        "generation_config.json; ignore: do not. Tokens that end an answer are always taken from it",
    )


def add_template_kwargs(parser: Any) -> None:
    """Add the option for variables of the chat template."""
    parser.add_argument(
        "--chat_template_kwargs",
        type=str | None,
        default=None,
        help="variables of the chat template, a JSON object, such as '{\"enable_thinking\": false}'",
    )


def read_template_kwargs(args: Any) -> dict[str, Any]:
    """Return the variables of `--chat_template_kwargs`. Raises UserError if it is no JSON object."""
    from llmsuite.data.turns import parse_template_kwargs

    try:
        text = parse_template_kwargs({"chat_template_kwargs": args.chat_template_kwargs})
    except ValueError as error:
        raise UserError(f"--chat_template_kwargs: {error}") from error
    found: dict[str, Any] = json.loads(text or "{}")
    return found


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

    add_model_arguments(parser)
    parser.add_argument("--prompt", type=str, action="append", help="a prompt; may be repeated")
    parser.add_argument("--input", type=str | None, default=None, help='JSON Lines of {"prompt": …} or {"messages": …}')
    parser.add_argument("--output", type=str | None, default=None, help="JSON Lines file to write; must not exist")
    parser.add_argument("--chat", action="store_true", help="chat in the terminal")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without chat template")
    parser.add_argument("--chat_template", type=str, default=OF_TOKENIZER, help=TEMPLATE_HELP)
    add_template_kwargs(parser)
    parser.add_argument("--control_tokens", action="store_true", help=CONTROL_TOKENS_HELP)
    parser.add_argument("--system", type=str | None, default=None, help="a system message before each conversation")
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=128)
    parser.add_argument("--min_new_tokens", type=NonNegativeInt, default=0)
    parser.add_argument("--stop", type=str, action="append", help="a string that ends the answer; may be repeated")
    add_generation_config(parser)
    parser.add_argument(
        "--temperature", type=NonNegativeFloat | None, default=None, help="0 is greedy (default: the model's, else 0)"
    )
    parser.add_argument(
        "--top_k", type=NonNegativeInt | None, default=None, help="0 is off (default: the model's, else 0)"
    )
    parser.add_argument(
        "--top_p", type=ClosedUnitInterval | None, default=None, help="1 is off (default: the model's, else 1)"
    )
    parser.add_argument(
        "--min_p", type=ClosedUnitInterval | None, default=None, help="0 is off (default: the model's, else 0)"
    )
    parser.add_argument(
        "--repetition_penalty",
        type=PositiveFloat | None,
        default=None,
        help="1 is off (default: the model's, else 1)",
    )
    parser.add_argument("--frequency_penalty", type=float, default=0.0)
    parser.add_argument("--presence_penalty", type=float, default=0.0)
    parser.add_argument("--seed", type=NonNegativeInt, default=0)
    parser.add_argument("--num_return_sequences", type=PositiveInt, default=1)
    parser.add_argument(
        "--decoding_loop",
        action="store_true",
        help="with --engine static: greedy answers by the program of `llmsuite export --decoding_loop`",
    )
    parser.add_argument("--num_beams", type=PositiveInt, default=1, help="above 1: beam search")
    parser.add_argument("--length_penalty", type=float, default=1.0, help="length penalty of beam search")
    parser.add_argument(
        "--logprobs",
        type=NonNegativeInt | None,
        default=None,
        help="return the log-probability of each token, and of this many alternatives",
    )
    parser.add_argument("--batch_size", type=PositiveInt, default=8, help="answers decoded together")
    parser.add_argument(
        "--no_cache", action="store_true", help="use no KV cache: compute all tokens again at each step"
    )


def run(args: Any, registry: Registry) -> int:
    settle_degrees(args)
    _check(args)
    from llmsuite.cli.model import check_ranks
    from llmsuite.cli.model_paths import check_files, resolve_model_arguments
    from llmsuite.launch.launch import is_worker

    check_files(args, ("input",))
    resolve_model_arguments(args)
    if args.num_devices > 1 and not is_worker():
        check_ranks(args, registry)
        return launch_ranks(args, registry)
    from llmsuite.cli.model import open_generator
    from llmsuite.inference.prompts import Prompter
    from llmsuite.inference.sampling import Sampling
    from llmsuite.inference.sampling_defaults import read_defaults

    options = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Sampling)}
    given = {name: value for name, value in options.items() if value is not None and name != "stop"}
    sampling = Sampling(stop=tuple(args.stop or ()), num_logprobs=args.logprobs, **given)
    opened = open_generator(args, registry, cached=not args.no_cache)
    if args.num_beams == 1 and not args.decoding_loop:  # those two do not sample
        defaults = read_defaults(opened.configs, args.generation_config)
        sampling = defaults.fill(sampling, given)
        if defaults.note and opened.is_main_rank:
            print(defaults.note, file=sys.stderr)
    template = None if args.raw else args.chat_template
    kwargs = read_template_kwargs(args)
    prompter = Prompter(opened.generator.tokenizer, template, args.system, args.control_tokens, kwargs)
    if prompter.warning is not None and opened.is_main_rank:
        print(prompter.warning, file=sys.stderr)
    if args.chat:
        return _chat(opened.generator, prompter, sampling)
    prompts = prompter.read(Path(args.input)) if args.input else [prompter.text(text) for text in args.prompt]
    answers = _answers(opened.generator, prompts, sampling, args)
    if args.output is None:
        for prompt, found in zip(prompts, answers):
            if opened.is_main_rank:
                print("> " + str(prompt.row.get("prompt", json.dumps(prompt.row.get("messages"), ensure_ascii=False))))
                print(_shown("\n".join(answer.text for answer in found)), flush=True)
        return 0
    target = Path(args.output)
    if not opened.is_main_rank:
        for _ in answers:  # all ranks compute, the first one writes
            pass
        return 0
    written = 0
    try:
        with open(target, "x", encoding="utf-8") as file:
            for prompt, found in zip(prompts, answers):
                row = {**prompt.row, "answers": [answer.row() for answer in found]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                written += 1
    except OSError as error:
        raise UserError(f"--output {target}: cannot be written: {error.strerror}") from error
    except KeyboardInterrupt:
        print(f"stopped: {target} has answers to {written} of {len(prompts)} prompts", file=sys.stderr)
        raise
    print(f"wrote {target}: answers to {len(prompts)} prompts")
    return 0


def _shown(text: str) -> str:
    """Generated text for printing: without control characters on a terminal, unchanged in a file or a pipe."""
    return printable(text) if sys.stdout.isatty() else text


def _check(args: Any) -> None:
    """Raise UserError if options contradict each other."""
    if (bool(args.prompt) + bool(args.input) + args.chat) != 1:
        raise UserError("generate: give one of --prompt TEXT, --input FILE and --chat")
    if args.output and exists(Path(args.output)):
        raise UserError(f"--output: {args.output} exists; choose another, or remove it first")
    if args.chat and (args.num_devices > 1 or args.num_beams > 1 or args.raw or args.output):
        raise UserError("--chat: works without --num_devices, --num_beams, --raw and --output")
    if args.raw and (args.system is not None or args.chat_template != OF_TOKENIZER or args.chat_template_kwargs):
        raise UserError(
            "--raw: continues plain text, which has no turns; leave out --system, --chat_template and "
            "--chat_template_kwargs"
        )
    if args.num_beams > 1 and (args.temperature or args.stop or args.logprobs is not None):
        raise UserError("--num_beams: beam search does not sample; leave out --temperature, --stop and --logprobs")
    given = vars(args)
    penalties = [f"--{name}" for name, off in PENALTIES.items() if given[name] not in (None, off)]
    if args.num_beams > 1 and penalties:
        raise UserError(
            f"--num_beams: beam search has no penalty but --length_penalty; leave out {', '.join(penalties)}"
        )
    if args.num_beams == 1 and args.length_penalty != 1:
        raise UserError("--length_penalty: belongs to beam search; add --num_beams, or leave it out")
    if args.decoding_loop and args.engine != "static":
        raise UserError("--decoding_loop: is part of an exported program; add --engine static")
    if args.decoding_loop:
        unsupported = [name for name, off in _UNSUPPORTED_IN_LOOP.items() if given[name] not in (None, off)]
        if unsupported:
            raise UserError(
                f"--decoding_loop: its answers are greedy, one per prompt; leave out --{', --'.join(unsupported)}"
            )


def _answers(generator: Any, prompts: Any, sampling: Any, args: Any) -> Iterator[Any]:
    from llmsuite.inference.beam import BeamParams
    from llmsuite.inference.generate import greedy_answers

    if args.decoding_loop:
        return iter(greedy_answers(generator, [prompt.ids for prompt in prompts], args.max_new_tokens, args.batch_size))
    if args.num_beams == 1:
        ids = (prompt.ids for prompt in prompts)
        return iter(generator.answers(ids, sampling, args.num_return_sequences, args.batch_size))
    beams = BeamParams(args.num_beams, args.length_penalty, args.max_new_tokens, args.min_new_tokens)
    return (generator.beam_answers(prompt.ids, beams, args.num_return_sequences) for prompt in prompts)


def _chat(generator: Any, prompter: Any, sampling: Any) -> int:
    """Chat: answer each line from the terminal, with the turns before it as context."""
    from llmsuite.data.rows import Message

    turns: list[Message] = []
    print("Type a message; /new starts a new conversation, /quit or end of input exits.", file=sys.stderr)
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            print()
            return 0
        if line.strip() == "/new":
            turns = []
        if line.strip() in ("", "/new"):
            continue
        question = [*turns, Message("user", line.strip())]
        answer: list[str] = []
        try:
            for piece in generator.stream(prompter.turns(question), sampling):
                answer.append(piece)
                print(_shown(piece), end="", flush=True)
        except UserError as error:  # no room left, or refused by the template: the conversation so far stays
            print(f"{error}; /new starts a new conversation", end="")
            answer = []
        print(flush=True)
        if answer:
            turns = [*question, Message("assistant", "".join(answer))]
