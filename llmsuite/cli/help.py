"""Help texts of commands: the purpose and the default of each option, without the names of types."""

from __future__ import annotations

import argparse

from jsonargparse import DefaultHelpFormatter


class PlainHelp(DefaultHelpFormatter):
    """jsonargparse's formatter, without types and without trivial defaults (None, False)."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.default in (None, False, argparse.SUPPRESS) or "%(default)" in text:
            return text
        # such a text names its default in words already
        return text if "default" in text else f"{text} (default: %(default)s)"
