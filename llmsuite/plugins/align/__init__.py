"""Comparison of two parallel strategies or two models, module by module: the command `llmsuite align`."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [
        Command.in_module(
            "llmsuite.plugins.align.command",
            name="align",
            help="compare two parallel strategies or two models, module by module",
            takes_overrides=True,
        )
    ]
