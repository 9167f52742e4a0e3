"""`llmsuite generate MODEL --prompt TEXT`: what does a model answer?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import Command
from llmsuite.plugins.manager import Registry


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveInt

    parser.add_argument("model", type=str, help="a model or LoRA adapter, such as RUN/checkpoints/step-60, or a run")
    parser.add_argument(
        "--base",
        type=str | None,
        default=None,
        help="for a LoRA adapter: the model it belongs to, where it does not say",
    )
    parser.add_argument("--prompt", type=str, action="append", required=True, help="what to say; may be repeated")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without chat template")
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=128)
    parser.add_argument("--temperature", type=NonNegativeFloat, default=0.0, help="0 is greedy")
    parser.add_argument("--top_k", type=NonNegativeInt, default=0, help="0 is off")
    parser.add_argument("--top_p", type=ClosedUnitInterval, default=1.0)
    parser.add_argument("--seed", type=NonNegativeInt, default=0)
    parser.add_argument("--device", type=str, default="cpu", help="see: llmsuite list devices")


def run(args: Any, registry: Registry) -> int:
    if args.device not in registry.devices:
        raise UserError(registry.unknown("device", args.device))
    backend = registry.devices[args.device].factory()
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    from llmsuite.checkpoint.adapter import add_adapter
    from llmsuite.checkpoint.adapter_dir import Base, base_path, check_base
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.checkpoint.train_state import find_adapter, find_model
    from llmsuite.data.chat_template import load_template
    from llmsuite.data.rows import Message
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.inference.generate import Sampling, generate
    from llmsuite.inference.load import load_model

    if reason := backend.unavailable(1):
        raise UserError(f"--device {args.device}: {reason}")
    backend.activate(0)
    path, adapter = Path(args.model), find_adapter(Path(args.model))
    if adapter is None and args.base:
        raise UserError(f"--base: {path} is no LoRA adapter")
    if adapter is None:
        path = find_model(path)
        source = open_model(path, registry.models)
    else:
        base = find_model(Path(args.base) if args.base else base_path(adapter))
        source = open_model(base, registry.models)
        if not args.base:
            check_base(adapter, Base(str(base), source.digest()))
        source = add_adapter(source, adapter)
        path = adapter if (adapter / "tokenizer_config.json").is_file() else base
    tokenizer = TextTokenizer(path)
    model = load_model(source, backend)
    stop_ids = {tokenizer.eos_id}
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    template = None if args.raw else load_template("tokenizer", path, tokenizer.special_tokens)
    for prompt in args.prompt:
        text = template.render([Message("user", prompt)], add_generation_prompt=True) if template else prompt
        prompt_ids, longest = tokenizer.encode(text), source.config.max_position_embeddings
        if not prompt_ids or len(prompt_ids) + args.max_new_tokens > longest:
            raise UserError(
                f"--prompt {prompt[:40]!r} is {len(prompt_ids)} tokens, and --max_new_tokens asks for "
                f"{args.max_new_tokens} more; the model needs at least one and has room for {longest} together"
            )
        ids, shown = [], ""
        print(f"> {prompt}")
        for token in generate(model, prompt_ids, stop_ids, args.max_new_tokens, sampling):
            ids.append(token)
            whole = tokenizer.decode(ids)
            if not whole.endswith("\ufffd"):  # half of a character: wait for the rest of its bytes
                print(whole[len(shown) :], end="", flush=True)
                shown = whole
        print()
    return 0


COMMAND = Command(name="generate", help="let a model answer prompts", add_arguments=add_arguments, run=run)
