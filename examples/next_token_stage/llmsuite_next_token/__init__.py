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
    return [StageSpec(name="next_token", help="text", config_cls=NextTokenSection, factory=_stage, row_kind="text")]


@llmsuite.hookimpl
def llmsuite_register_data_formats():
    text = DataFormat(name="line", help="text", kind="text", matches=lambda r: "text" in r, convert=lambda r: r["text"])
    return [text]
