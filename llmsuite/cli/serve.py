"""`llmsuite serve MODEL`: answer over HTTP, as OpenAI's API does."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.cli.generate import CONTROL_TOKENS, add_generation_config, add_model_arguments
from llmsuite.cli.parser import Port
from llmsuite.cli.ranks import launch_ranks, settle_degrees
from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.hub.names import hub_name
from llmsuite.plugins.manager import Registry
from llmsuite.specs import Command
from llmsuite.web.client import API_KEY

if TYPE_CHECKING:
    from llmsuite.inference.generate import Generator
    from llmsuite.inference.prompts import Prompter

_PIECE_ON_CPU, _PIECE = 256, 2048
"""Tokens of prompts that a device reads in the time of a few passes over answers."""


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

    add_model_arguments(parser)
    parser.add_argument(
        "--host", type=str, default="127.0.0.1", help="where to listen; the default is this machine only"
    )
    parser.add_argument("--port", type=Port, default=8000, help="0 for any that is free")
    parser.add_argument(
        "--name",
        type=str,
        action="append",
        help="what clients call the model (default: its directory); may be given several times",
    )
    parser.add_argument("--chat_template", type=str, default="tokenizer", help="or: chatml, llama3, plain")
    parser.add_argument("--control_tokens", action="store_true", help=CONTROL_TOKENS)
    add_generation_config(parser)
    parser.add_argument(
        "--leave_out_tools",
        action="store_true",
        help="answer chats without the tools that they may call (off by default): for a model that knows none, and "
        "clients that always send some; tools that have to be called are still refused",
    )
    parser.add_argument(
        "--allowed_host", type=str, action="append", help="a name of this server that clients without a key may use"
    )
    parser.add_argument(
        "--proxy",
        type=str,
        action="append",
        help="an address, or a network, that is believed whose requests it passes on (X-Forwarded-For); may be given "
        "several times",
    )
    parser.add_argument("--api_key", type=str | None, default=None, help=f"ask for it; better given as {API_KEY}")
    parser.add_argument("--batch_size", type=PositiveInt, default=8, help="answers decoded together")
    parser.add_argument("--max_waiting", type=PositiveInt, default=256, help="answers that may wait for a place")
    parser.add_argument(
        "--max_waiting_per_client",
        type=PositiveInt | None,
        default=None,
        help="of one client; default: three quarters of --max_waiting",
    )
    parser.add_argument(
        "--prompt_piece",
        type=PositiveInt | None,
        default=None,
        help="tokens of prompts that are read between two passes over the answers; default: 256 on cpu, 2048 on others",
    )
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=1024, help="most tokens of an answer")
    parser.add_argument(
        "--prefix_cache_mb",
        type=NonNegativeInt,
        default=256,
        help="megabytes for keys and values of prompts, which later prompts that begin alike do not compute again; "
        "0 for none",
    )
    parser.add_argument("--max_body_bytes", type=PositiveInt, default=1_000_000, help="of a request")
    parser.add_argument("--body_timeout", type=PositiveFloat, default=10.0, help="seconds for a request to arrive")
    parser.add_argument("--request_timeout", type=PositiveFloat, default=600.0, help="seconds for an answer")
    parser.add_argument("--max_connections", type=PositiveInt, default=512, help="of clients, at once")
    parser.add_argument(
        "--header_timeout", type=PositiveFloat, default=10.0, help="seconds a client may be silent, or read nothing"
    )
    parser.add_argument(
        "--adapters",
        type=str,
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="LoRA adapters over the model, each of which answers requests for its name",
    )
    parser.add_argument(
        "--rl",
        action="store_true",
        help="be the engine of a trainer (off by default): let clients replace the weights by those in a directory of "
        "this machine (/v1/pause, /v1/update_weights, /v1/resume), and give them token ids (return_token_ids)",
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
    from llmsuite.cli.model import check_ranks, open_generator
    from llmsuite.cli.places import find_model_arguments
    from llmsuite.launch.launch import is_worker

    _check_proxies(args.proxy or ())
    args.port = int(args.port)  # getaddrinfo takes no class of its own
    if args.num_devices == 1 or not is_worker():  # ranks are started when that is known
        _check_address(args.host, args.port)
    names = args.name or [_name(args.model)]
    find_model_arguments(args)
    adapters = _adapters(args, names)
    if args.num_devices > 1 and not is_worker():
        check_ranks(args, registry)
        return launch_ranks(args, registry)
    opened = open_generator(args, registry, refreshable=args.rl, adapters=adapters)
    if not opened.speaks:
        return _follow(opened.generator.decoder)
    from llmsuite.inference.defaults import read_defaults
    from llmsuite.inference.followed import lead
    from llmsuite.serving.app import make_app
    from llmsuite.serving.limits import Limits
    from llmsuite.serving.metrics import Metrics
    from llmsuite.serving.server import make_server
    from llmsuite.serving.service import Service, Speaker
    from llmsuite.serving.weights import ServedWeights

    leader = lead(opened.generator.decoder) if args.num_devices > 1 else None
    opened.generator.decoder = leader or opened.generator.decoder
    args.prompt_piece = args.prompt_piece or (_PIECE_ON_CPU if args.device == "cpu" else _PIECE)
    limits = Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)})
    if key is None and not _is_loopback(args.host):
        print(f"warning: {args.host} can be reached by others, and no --api_key is set", file=sys.stderr)
    defaults = read_defaults(opened.configs, args.generation_config)
    prompter = _prompter(opened.generator, args, needs_template=not opened.of_adapters)
    weights = ServedWeights(opened.refreshable, registry.models) if args.rl else None
    service = Service(opened.generator, prompter, names[0], limits, Metrics())
    service.aliases = tuple(names[1:])
    service.leaves_out_tools = args.leave_out_tools
    service.speakers = {
        name: Speaker(generator, _prompter(generator, args, needs_template=False))
        for name, generator in opened.of_adapters.items()
        if generator is not opened.generator
    }
    service.defaults = defaults.fill(service.defaults, ())
    if defaults.note:
        print(defaults.note, flush=True)
    hosts = None if key is not None else {args.host.lower(), *map(str.lower, args.allowed_host or ())}
    server = make_server(service, make_app(service, key, weights, hosts), args.host, args.port, args.proxy or ())
    try:
        server.run()
    except SystemExit as error:  # it could not listen, and has said why
        raise UserError(f"--host {args.host} --port {args.port}: cannot listen there") from error
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
    """What makes prompts for a model, or for one of its adapters; without a template where it has none and need not
    have any, as others that are served with it may."""
    from llmsuite.data.chat_template import tokenizer_template
    from llmsuite.inference.prompts import Prompter

    tokenizer, template = generator.tokenizer, args.chat_template
    if not needs_template and template == "tokenizer" and tokenizer_template(tokenizer.directory) is None:
        template = None
    return Prompter(tokenizer, template, control_tokens=args.control_tokens)


def _follow(decoder: Any) -> int:
    """Decode what the first rank says, which has the server; it also says when that ends."""
    from llmsuite.inference.followed import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(decoder)
    return 0


def _check_rl(args: Any, key: str | None) -> None:
    """Raise UserError if the weights cannot be replaced, or anybody could do it."""
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


def _name(model: str) -> str:
    """What clients call a model unless they are told otherwise: the last word of its path or of its name on a hub."""
    name = hub_name(model)
    return Path(model).absolute().name if name is None else name.repo.rpartition("/")[2]


def _check_address(host: str, port: int) -> None:
    """Raise UserError where another process listens or there is no such host, before a model is fetched and read."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # both as the server has it
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise UserError(f"--host {host} --port {port}: cannot listen there: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


COMMAND = Command(name="serve", help="answer over HTTP, as OpenAI's API does", add_arguments=add_arguments, run=run)
