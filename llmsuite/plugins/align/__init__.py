"""Comparison of two parallel strategies or two models, module by module: the command `llmsuite align`."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl
from llmsuite.plugins.align.command import COMMAND


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [COMMAND]
