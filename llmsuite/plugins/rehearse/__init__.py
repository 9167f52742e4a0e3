"""Rehearsal of a recipe at its true size without a device: the commands `llmsuite rehearse` and
`llmsuite recipe tune`."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl
from llmsuite.plugins.rehearse import command, tune


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [command.COMMAND]


@hookimpl
def llmsuite_register_recipe_commands() -> list[Command]:
    return [tune.COMMAND]
