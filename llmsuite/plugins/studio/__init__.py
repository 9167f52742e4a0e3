"""A local web page from a recipe to a trained model: choose, change, plan, start, watch, chat."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [
        Command.in_module(
            "llmsuite.plugins.studio.command",
            name="studio",
            help="serve a web page to edit a recipe, start it, watch it and chat with the result",
        )
    ]
