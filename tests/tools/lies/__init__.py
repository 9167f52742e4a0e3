"""Lies in the layouts of strangers, and what reads them; see `python -m tests.tools.lies --help`."""
