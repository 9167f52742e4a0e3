"""Registers the stage `next_token` and the rows it trains on. Imports no Paddle: `list` and `validate` stay fast."""

import dataclasses

import llmsuite
from llmsuite.contract.hookspecs import DataFormat, Section, StageSpec


@dataclasses.dataclass(kw_only=True)
class NextTokenSection(Section):
    min_tokens: int = 2
    """Shorter rows are dropped."""


def _stage():
    from llmsuite_next_token.stage import NextTokenStage

    return NextTokenStage


@llmsuite.hookimpl
def llmsuite_register_stages():
    return [
        StageSpec(
            name="next_token",
            help="next tokens of a text",
            config_cls=NextTokenSection,
            factory=_stage,
            row_kind="text",
        )
    ]


@llmsuite.hookimpl
def llmsuite_register_data_formats():
    return [
        DataFormat(
            name="next_token_text",
            help="rows with a text",
            kind="text",
            matches=lambda row: "text" in row,
            convert=lambda row: row["text"],
        )
    ]
