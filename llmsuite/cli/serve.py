"""The command `llmsuite serve MODEL`: serves a model over HTTP with OpenAI's API."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.arguments import Port
from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.hub.names import hub_name
from llmsuite.base.progress import is_first_rank
from llmsuite.base.web.client import API_KEY
from llmsuite.cli.generate import (
    CONTROL_TOKENS_HELP,
    add_generation_config,
    add_model_arguments,
    add_template_kwargs,
    read_template_kwargs,
)
from llmsuite.cli.ranks import launch_ranks, settle_degrees
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.chat_templates import OF_TOKENIZER, TEMPLATE_HELP

if TYPE_CHECKING:
    from llmsuite.inference.generate import Generator
    from llmsuite.inference.prompts import Prompter
    from llmsuite.serving.loading import LoadingPort

_PREFILL_CHUNK_CPU = 256
_PREFILL_CHUNK = 2048
"""Tokens of prompts that a device prefills in the time of a few decoding steps."""


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

    add_model_arguments(parser)
    parser.add_argument(
        "--host", type=str, default="127.0.0.1", help="address to listen on; the default is this machine only"
    )
    parser.add_argument("--port", type=Port, default=8000, help="port to listen on; 0 for any free port")
    parser.add_argument(
        "--name",
        type=str,
        action="append",
        help="name of the model for clients (default: that of its directory); may be given several times",
    )
    parser.add_argument("--chat_template", type=str, default=OF_TOKENIZER, help=TEMPLATE_HELP)
    add_template_kwargs(parser)
    parser.add_argument("--control_tokens", action="store_true", help=CONTROL_TOKENS_HELP)
    add_generation_config(parser)
    parser.add_argument(
        "--leave_out_tools",
        action="store_true",
        help="ignore the tools of chat requests (off by default): for a model that supports none, with clients that "
        "always send some; a request that requires a tool call is still refused",
    )
    parser.add_argument(
        "--allowed_host",
        type=str,
        action="append",
        help="another host name of this server, for clients without a key; may be given several times",
    )
    parser.add_argument(
        "--proxy",
        type=str,
        action="append",
        help="an address or a network of trusted proxies, whose X-Forwarded-For header names the client; may be given "
        "several times",
    )
    parser.add_argument(
        "--api_key", type=str | None, default=None, help=f"key that clients must send; better set as {API_KEY}"
    )
    parser.add_argument("--batch_size", type=PositiveInt, default=8, help="answers decoded together")
    parser.add_argument(
        "--max_waiting", type=PositiveInt, default=256, help="requests that may wait for a place in the batch"
    )
    parser.add_argument(
        "--max_waiting_per_client",
        type=PositiveInt | None,
        default=None,
        help="waiting requests of one client (default: three quarters of --max_waiting)",
    )
    parser.add_argument(
        "--prompt_piece",
        type=PositiveInt | None,
        default=None,
        help="prefill chunk: most prompt tokens between two decoding steps (default: 256 on cpu, 2048 elsewhere)",
    )
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=1024, help="most tokens of an answer")
    parser.add_argument(
        "--prefix_cache_mb",
        type=NonNegativeInt,
        default=256,
        help="megabytes of the prefix cache: keys and values of prompts, reused by later prompts with the same prefix; "
        "0 for none",
    )
    parser.add_argument("--max_body_bytes", type=PositiveInt, default=1_000_000, help="largest body of a request")
    parser.add_argument("--body_timeout", type=PositiveFloat, default=10.0, help="seconds for a request to arrive")
    parser.add_argument("--request_timeout", type=PositiveFloat, default=600.0, help="seconds for an answer")
    parser.add_argument("--max_connections", type=PositiveInt, default=512, help="simultaneous connections of clients")
    parser.add_argument(
        "--header_timeout",
        type=PositiveFloat,
        default=10.0,
        help="seconds that a client may send no headers, or read no response",
    )
    parser.add_argument(
        "--adapters",
        type=str,
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="LoRA adapters of the model, each served under its own name",
    )
    parser.add_argument(
        "--rl",
        action="store_true",
        help="serve rollouts for a trainer (off by default): clients may replace the weights by those in a directory "
        "of this machine (/v1/pause, /v1/update_weights, /v1/resume), and get token ids (return_token_ids)",
    )


def run(args: Any, registry: Registry) -> int:
    settle_degrees(args)
    if args.num_devices > 1 and (args.rl or args.adapters):
        raise UserError("--num_devices: serve with --rl or --adapters runs on one device; leave out one of them")
    key = args.api_key or os.environ.get(API_KEY) or None
    if args.rl:
        _check_rl(args, key)
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve: {error.name} is missing; install it with: {install_command('serve')}") from error
    from llmsuite.cli.model import check_ranks
    from llmsuite.cli.model_paths import resolve_model_arguments
    from llmsuite.launch.launch import is_worker
    from llmsuite.serving.loading import LoadingPort

    _check_proxies(args.proxy or ())
    args.port = int(args.port)  # getaddrinfo accepts no subclass of int
    names = args.name or [_option_name(args.model)]
    with contextlib.ExitStack() as opened:
        port = None
        if is_first_rank():  # before a model is fetched and read, and before ranks are started
            port = opened.enter_context(contextlib.closing(LoadingPort(args.host, args.port)))
        resolve_model_arguments(args)
        adapters = _adapters(args, names)
        if args.num_devices > 1 and not is_worker():
            check_ranks(args, registry)
            opened.close()  # the first rank listens
            return launch_ranks(args, registry)
        if key is None and not _is_loopback(args.host):
            print(f"warning: {args.host} can be reached by others, and no --api_key is set", file=sys.stderr)
        if port is not None:
            # not as a URL: programs that start a server take the first URL that it prints as a sign that it is ready
            print(f"loading {names[0]}; {port.address} answers 503 until it is loaded", flush=True)
        return _serve(args, registry, names, adapters, key, port)


def _serve(
    args: Any,
    registry: Registry,
    names: Sequence[str],
    adapters: dict[str, Path],
    key: str | None,
    port: LoadingPort | None,
) -> int:
    """Load the model in this rank, and serve it until a signal comes. Returns the exit code.

    Args:
        args: the command line.
        registry: registered families and devices.
        names: names of the model for clients.
        adapters: the directories of adapters by their names.
        key: key that clients have to send; None for none.
        port: where the first rank listens; None in another rank.
    """
    from llmsuite.cli.model import open_generator

    opened = open_generator(args, registry, refreshable=args.rl, adapters=adapters)
    if port is None:
        return _follow(opened.generator.decoder)
    from llmsuite.inference.driver import as_driver
    from llmsuite.inference.sampling_defaults import read_defaults
    from llmsuite.serving.app import make_app
    from llmsuite.serving.limits import Limits
    from llmsuite.serving.metrics import Metrics
    from llmsuite.serving.server import make_server
    from llmsuite.serving.service import ServedModel, Service
    from llmsuite.serving.weights import ServedWeights

    leader = as_driver(opened.generator.decoder) if args.num_devices > 1 else None
    opened.generator.decoder = leader or opened.generator.decoder
    args.prompt_piece = args.prompt_piece or (_PREFILL_CHUNK_CPU if args.device == "cpu" else _PREFILL_CHUNK)
    limits = Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)})
    defaults = read_defaults(opened.configs, args.generation_config)
    prompter = _prompter(opened.generator, args, needs_template=not opened.adapter_generators)
    weights = ServedWeights(opened.refreshable, registry.models) if args.rl else None
    service = Service(opened.generator, prompter, names[0], limits, Metrics())
    service.aliases = tuple(names[1:])
    service.leaves_out_tools = args.leave_out_tools
    service.adapter_models = {
        name: ServedModel(generator, _prompter(generator, args, needs_template=False))
        for name, generator in opened.adapter_generators.items()
        if generator is not opened.generator
    }
    _check_templates(args, [prompter, *(model.prompter for model in service.adapter_models.values())])
    service.defaults = defaults.fill(service.defaults, ())
    if defaults.note:
        print(defaults.note, flush=True)
    hosts = None if key is not None else {args.host.lower(), *map(str.lower, args.allowed_host or ())}
    server = make_server(service, make_app(service, key, weights, hosts), args.proxy or ())
    server.run(port.hand_over())
    if leader is not None:
        leader.end()
    return 0


def _check_proxies(proxies: Sequence[str]) -> None:
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            raise UserError(f"--proxy {proxy}: is no address or network, such as 127.0.0.1 or 10.0.0.0/8") from None


def _prompter(generator: Generator, args: Any, needs_template: bool) -> Prompter:
    """The prompter of a model or of one of its adapters; without a chat template where it has none and
    `needs_template` is False, as other models that are served with it may have one."""
    from llmsuite.data.chat_template import tokenizer_template
    from llmsuite.inference.prompts import Prompter

    tokenizer = generator.tokenizer
    template = args.chat_template
    if not needs_template and template == OF_TOKENIZER and tokenizer_template(tokenizer.directory) is None:
        template = None
    kwargs = read_template_kwargs(args) if template is not None else None
    return Prompter(tokenizer, template, control_tokens=args.control_tokens, template_kwargs=kwargs)


def _check_templates(args: Any, prompters: Sequence[Prompter]) -> None:
    """Print the warnings about chat templates. Raise UserError where `--chat_template_kwargs` is given and no model
    that is served has one."""
    for warning in dict.fromkeys(prompter.warning for prompter in prompters):
        if warning is not None:
            print(warning, file=sys.stderr)
    if args.chat_template_kwargs and all(prompter.template_source is None for prompter in prompters):
        raise UserError(
            "--chat_template_kwargs: neither the model nor an adapter has a chat template to read them; leave them "
            "out, or choose a --chat_template"
        )


def _follow(decoder: Any) -> int:
    """Decode on a rank other than the first: the first rank has the server, sends the batches, and ends this loop."""
    from llmsuite.inference.driver import run_worker

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    run_worker(decoder)
    return 0


def _check_rl(args: Any, key: str | None) -> None:
    """Raise UserError if the weights cannot be replaced, or if anybody could replace them."""
    if args.engine == "static":
        raise UserError("--rl: the weights of an exported model cannot be replaced; use --engine dynamic")
    if key is None and not _is_loopback(args.host):
        raise UserError(f"--rl: {args.host} can be reached by others, who could replace the weights; set --api_key")


def _adapters(args: Any, names: list[str]) -> dict[str, Path]:
    """The directories of `--adapters` by their names. Raises UserError."""
    found: dict[str, Path] = {}
    for given in args.adapters:
        own, sign, place = given.partition("=")
        if not (own and sign and place):
            raise UserError(f"--adapters {given}: has to be NAME=DIR")
        if own in found or own in names:
            raise UserError(
                f"--adapters {given}: {own!r} is the name of the model or of another adapter; choose another"
            )
        found[own] = Path(place)
    if found and (args.rl or args.engine == "static" or args.precision != "fp32"):
        raise UserError("--adapters: with --engine dynamic and --precision fp32, and without --rl")
    return found


def _option_name(model: str) -> str:
    """The default name of a model for clients: the last part of its path or of its name on a hub."""
    name = hub_name(model)
    if name is None:
        return Path(model).absolute().name
    return name.repo.rpartition("/")[2]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
