"""Rehearsal of a recipe at its true size without a device: the commands `llmsuite rehearse` and
`llmsuite recipe tune`."""

from __future__ import annotations

from llmsuite.contract.hookspecs import Command, hookimpl


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [
        Command.in_module(
            "llmsuite.plugins.rehearse.command",
            name="rehearse",
            help="run a recipe's training step at its true size without a device",
            takes_overrides=True,
        )
    ]


@hookimpl
def llmsuite_register_recipe_commands() -> list[Command]:
    return [
        Command.in_module(
            "llmsuite.plugins.rehearse.tune",
            name="tune",
            help="find the fastest layout of a recipe on given devices, and write the recipe with it",
            takes_overrides=True,
        )
    ]
