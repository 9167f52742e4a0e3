"""A local web page from a recipe to a trained model: choose, change, plan, start, watch, chat."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl
from llmsuite.plugins.studio.command import COMMAND


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [COMMAND]
