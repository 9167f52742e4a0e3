"""Rehearsal of a recipe at its true size without a device: the command `llmsuite rehearse`."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl
from llmsuite.plugins.rehearse.command import COMMAND


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [COMMAND]
