"""Help of commands in plain words: what an option is for and its default, without the names of types."""

from __future__ import annotations

import argparse

from jsonargparse import DefaultHelpFormatter


class PlainHelp(DefaultHelpFormatter):
    """jsonargparse's, without types and without defaults that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.default in (None, False, argparse.SUPPRESS) or "%(default)" in text:
            return text
        # most texts that name their default do so in words
        return text if "default" in text else f"{text} (default: %(default)s)"
