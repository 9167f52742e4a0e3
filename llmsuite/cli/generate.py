"""`llmsuite generate MODEL`: let a model answer prompts, the rows of a file, or a conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llmsuite.cli.ranks import add_degrees, launch_ranks, settle_degrees
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.regular import exists
from llmsuite.shown import printable
from llmsuite.specs import Command
from llmsuite.stages.sections import PENALTIES

_ENGINES = Literal["dynamic", "static"]
_OUTSIDE = {
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
CONTROL_TOKENS = "let what users write have control tokens, such as <|im_end|>; else they are text there"


def add_model_arguments(parser: Any) -> None:
    """Add the options that name the model, its device and its precision."""
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "model",
        type=str,
        help="a run, a checkpoint or model directory of any layout, an adapter (with --base), an exported model, or a "
        "name on a hub such as hf:ORG/NAME",
    )
    parser.add_argument("--base", type=str | None, default=None, help="for an adapter: the model it belongs to")
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not beside MODEL")
    parser.add_argument("--tokenizer", type=str | None, default=None, help="directory of the tokenizer, if not there")
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams; see: llmsuite merge --help")
    parser.add_argument("--device", type=str, default="cpu", help="see: llmsuite list devices")
    parser.add_argument(
        "--num_devices", type=PositiveInt, default=1, help="cut the model over this many devices of this machine"
    )
    add_degrees(parser)
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "bf16", "fp16", "int8", "nf4", "fp4", "int4"],
        default="fp32",
        help="of the model. On cpu, of its matrices, which are multiplied with as they are stored: bf16, int8, nf4, "
        "fp4 or int4 (these with embedding and head in int8); all else is float32, but keys and values with bf16",
    )
    parser.add_argument(
        "--engine", type=_ENGINES, default="dynamic", help="static: Paddle Inference, on what `llmsuite export` wrote"
    )


def add_generation_config(parser: Any) -> None:
    """Add the option that says whether a model's generation_config.json counts."""
    parser.add_argument(
        "--generation_config",
        type=Literal["auto", "ignore"],
        default="auto",
        help="auto: temperature, top_k, top_p, min_p and repetition_penalty that are not given are those of the "
        "model's generation_config.json; ignore: they are not. Tokens that end an answer are taken from it in any case",
    )


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

    add_model_arguments(parser)
    parser.add_argument("--prompt", type=str, action="append", help="what to say; may be repeated")
    parser.add_argument("--input", type=str | None, default=None, help='JSON Lines of {"prompt": …} or {"messages": …}')
    parser.add_argument("--output", type=str | None, default=None, help="JSON Lines to write; must not exist")
    parser.add_argument("--chat", action="store_true", help="hold a conversation in the terminal")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without chat template")
    parser.add_argument("--chat_template", type=str, default="tokenizer", help="or: chatml, llama3, plain")
    parser.add_argument("--control_tokens", action="store_true", help=CONTROL_TOKENS)
    parser.add_argument("--system", type=str | None, default=None, help="a system turn in front of conversations")
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=128)
    parser.add_argument("--min_new_tokens", type=NonNegativeInt, default=0)
    parser.add_argument("--stop", type=str, action="append", help="a text that ends the answer; may be repeated")
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
    parser.add_argument("--length_penalty", type=float, default=1.0, help="of beam search")
    parser.add_argument(
        "--logprobs", type=NonNegativeInt | None, default=None, help="of the tokens, and so many others"
    )
    parser.add_argument("--batch_size", type=PositiveInt, default=8, help="answers decoded together")
    parser.add_argument("--no_cache", action="store_true", help="read the whole text again for every token")


def run(args: Any, registry: Registry) -> int:
    settle_degrees(args)
    _check(args)
    from llmsuite.cli.model import check_ranks
    from llmsuite.cli.places import check_files, find_model_arguments
    from llmsuite.launch.launch import is_worker

    check_files(args, ("input",))
    find_model_arguments(args)
    if args.num_devices > 1 and not is_worker():
        check_ranks(args, registry)
        return launch_ranks(args, registry)
    from llmsuite.cli.model import open_generator
    from llmsuite.inference.defaults import read_defaults
    from llmsuite.inference.prompts import Prompter
    from llmsuite.inference.sampling import Sampling

    options = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Sampling)}
    given = {name: value for name, value in options.items() if value is not None and name != "stop"}
    sampling = Sampling(stop=tuple(args.stop or ()), num_logprobs=args.logprobs, **given)
    opened = open_generator(args, registry, cached=not args.no_cache)
    if args.num_beams == 1 and not args.decoding_loop:  # which draw nothing
        defaults = read_defaults(opened.configs, args.generation_config)
        sampling = defaults.fill(sampling, given)
        if defaults.note and opened.speaks:
            print(defaults.note, file=sys.stderr)
    prompter = Prompter(
        opened.generator.tokenizer, None if args.raw else args.chat_template, args.system, args.control_tokens
    )
    if args.chat:
        return _chat(opened.generator, prompter, sampling)
    prompts = prompter.read(Path(args.input)) if args.input else [prompter.text(text) for text in args.prompt]
    answers = _answers(opened.generator, prompts, sampling, args)
    if args.output is None:
        for prompt, found in zip(prompts, answers):
            if opened.speaks:
                print("> " + str(prompt.row.get("prompt", json.dumps(prompt.row.get("messages"), ensure_ascii=False))))
                print(_shown("\n".join(answer.text for answer in found)), flush=True)
        return 0
    target = Path(args.output)
    if not opened.speaks:
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
    """What a model says, as a terminal gets it; a file or a pipe gets the very characters."""
    return printable(text) if sys.stdout.isatty() else text


def _check(args: Any) -> None:
    """Raise UserError if options contradict each other."""
    if (bool(args.prompt) + bool(args.input) + args.chat) != 1:
        raise UserError("generate: give --prompt TEXT, --input FILE or --chat, one of them")
    if args.output and exists(Path(args.output)):
        raise UserError(f"--output: {args.output} exists; choose another, or remove it first")
    if args.chat and (args.num_devices > 1 or args.num_beams > 1 or args.raw or args.output):
        raise UserError("--chat: works without --num_devices, --num_beams, --raw and --output")
    if args.raw and (args.system is not None or args.chat_template != "tokenizer"):
        raise UserError("--raw: continues plain text, which has no turns; leave out --system and --chat_template")
    if args.num_beams > 1 and (args.temperature or args.stop or args.logprobs is not None):
        raise UserError("--num_beams: beam search draws nothing; leave out --temperature, --stop and --logprobs")
    penalties = [f"--{name}" for name, off in PENALTIES.items() if getattr(args, name) not in (None, off)]
    if args.num_beams > 1 and penalties:
        raise UserError(
            f"--num_beams: beam search has no penalty but --length_penalty; leave out {', '.join(penalties)}"
        )
    if args.num_beams == 1 and args.length_penalty != 1:
        raise UserError("--length_penalty: is of beam search; add --num_beams, or leave it out")
    if args.decoding_loop and args.engine != "static":
        raise UserError("--decoding_loop: is part of an exported program; add --engine static")
    if args.decoding_loop and (
        set_ := [name for name, off in _OUTSIDE.items() if getattr(args, name) not in (None, off)]
    ):
        raise UserError(f"--decoding_loop: its answers are greedy, one to a prompt; leave out --{', --'.join(set_)}")


def _answers(generator: Any, prompts: Any, sampling: Any, args: Any) -> Iterator[Any]:
    from llmsuite.inference.beam import Beams
    from llmsuite.inference.generate import greedy_answers

    if args.decoding_loop:
        return iter(greedy_answers(generator, [prompt.ids for prompt in prompts], args.max_new_tokens, args.batch_size))
    if args.num_beams == 1:
        ids = (prompt.ids for prompt in prompts)
        return iter(generator.answers(ids, sampling, args.num_return_sequences, args.batch_size))
    beams = Beams(args.num_beams, args.length_penalty, args.max_new_tokens, args.min_new_tokens)
    return (generator.beam_answers(prompt.ids, beams, args.num_return_sequences) for prompt in prompts)


def _chat(generator: Any, prompter: Any, sampling: Any) -> int:
    """Hold a conversation: answer each line from the terminal, with the turns before it."""
    from llmsuite.data.rows import Message

    turns: list[Message] = []
    print("Type a message; /new starts again, /quit or end of input leaves.", file=sys.stderr)
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
            print(f"{error}; /new starts again", end="")
            answer = []
        print(flush=True)
        if answer:
            turns = [*question, Message("assistant", "".join(answer))]


COMMAND = Command(name="generate", help="let a model answer prompts", add_arguments=add_arguments, run=run)
