"""Adapters on the matrices of any family, for one card: which modules get one, and how.

The layers are those of `paddlenlp.peft`, see `lora_layers.py`, which is imported where a model gets adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paddle import nn

from llmsuite.models.adapter import Adapter, is_plain_linear
from llmsuite.models.dropout import RowDropout, TokenDropout
from llmsuite.models.experts import Stacked
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.targets import has_own_head, is_trained, pick_modules


def add_adapters(model: nn.Layer, modules: Sequence[str], config: Any, seed: int = 0) -> None:
    """Put adapters on these modules, see `adapted_modules`, and freeze the rest.

    Args:
        model: with or without memory.
        modules: names of linear layers, stacks of routed experts, and the embedding.
        config: a `paddlenlp.peft.LoRAConfig`.
        seed: of their dropout.

    Raises:
        UserError: paddlenlp is not installed.
    """
    from llmsuite.models.lora_layers import adapter_layer

    found = dict(model.named_sublayers(include_self=True))
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = parameter.stop_gradient or not is_trained(name)
    for name in modules:
        owner, _, attribute = name.rpartition(".")
        adapter = adapter_layer(found[name], config)
        if config.lora_dropout and isinstance(found[name], nn.Linear):
            adapter.lora_dropout = TokenDropout(config.lora_dropout, name, seed, adapter.weight.shape[0])
        elif config.lora_dropout and isinstance(found[name], Stacked):
            adapter.lora_dropout = RowDropout(config.lora_dropout, name, seed, adapter.weight.shape)
        setattr(found[owner], attribute, adapter)


def adapters(model: nn.Layer) -> Iterator[Adapter]:
    """The adapters of a model; none where `add_adapters` was not called."""
    return (module for module in model.sublayers() if isinstance(module, Adapter))


def adapted_modules(model: nn.Layer, plan: ShardPlan, patterns: Sequence[str] | None) -> list[str]:
    """Names of the modules of a whole model that get adapters; see `pick_modules`."""
    embedding = plan.embedding if has_own_head(name for name, _ in model.named_parameters()) else None
    found = [
        name
        for name, module in model.named_sublayers()
        if is_plain_linear(module) or type(module) is Stacked or (name == embedding and type(module) is nn.Embedding)
    ]
    return pick_modules(found, plan, patterns)
