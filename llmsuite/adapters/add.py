"""Adapters on the matrices of any family, for one card: which modules get one, and how they are added.

Most layers derive from those of `paddlenlp.peft`, which are imported only when a model gets adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from paddle import nn

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.parameters import is_trained
from llmsuite.adapters.shared_first import first_of
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.dropout import RowDropout, TokenDropout
from llmsuite.models.embedding import is_plain_embedding
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.linear import is_plain_linear
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.targets import has_own_head, pick_modules


def add_adapters(
    model: nn.Layer, modules: Sequence[str], config: AdapterConfig, seed: int = 0, full_modules: Collection[str] = ()
) -> None:
    """Put adapters on these modules (see `adapted_modules`) and freeze the rest.

    Args:
        model: materialised or not.
        modules: names of linear layers, stacks of routed experts, and the embedding.
        config: method, rank and scale of the adapters.
        seed: seed of their dropout.
        full_modules: names of modules that are trained in full.

    Raises:
        UserError: paddlenlp is not installed.
    """
    found = dict(model.named_sublayers(include_self=True))
    for name, parameter in model.named_parameters():
        trained = is_trained(name) or name.rpartition(".")[0] in full_modules
        parameter.stop_gradient = parameter.stop_gradient or not trained
    for name in modules:
        owner, _, attribute = name.rpartition(".")
        adapter = adapter_layer(found[name], config)
        dropped = first_of(name) if config.share_first else name  # one mask for all x of one A
        if config.dropout and isinstance(found[name], nn.Linear):
            adapter.lora_dropout = TokenDropout(config.dropout, dropped, seed, adapter.weight.shape[0])
        elif config.dropout and isinstance(found[name], GroupedLinear):
            adapter.lora_dropout = RowDropout(config.dropout, dropped, seed, adapter.weight.shape)
        setattr(found[owner], attribute, adapter)


def adapter_layer(layer: nn.Linear | nn.Embedding | GroupedLinear, config: AdapterConfig) -> Adapter:
    """The layer with an adapter that replaces a linear layer, an embedding, or a stack of experts."""
    layers = config.method.layers()  # imports paddlenlp, which other runs do not need
    if isinstance(layer, nn.Linear):
        kind: type | None = layers.linear
    elif isinstance(layer, GroupedLinear):
        kind = layers.experts
    else:
        kind = layers.embedding
    assert kind is not None, "the rules of the recipe refuse methods without such a layer"
    adapter: Adapter = kind(layer, config)
    return adapter


def adapters(model: nn.Layer) -> Iterator[Adapter]:
    """The adapters of a model; none where `add_adapters` was not called."""
    return (module for module in model.sublayers() if isinstance(module, Adapter))


def adapted_modules(model: nn.Layer, plan: ShardPlan, patterns: Sequence[str] | None) -> list[str]:
    """Names of the modules of an unsharded model that get adapters; see `pick_modules`."""
    embedding = plan.embedding if has_own_head(name for name, _ in model.named_parameters()) else None
    candidates = []
    for name, module in model.named_sublayers():
        is_embedding = name == embedding and is_plain_embedding(module)
        if is_plain_linear(module) or type(module) is GroupedLinear or is_embedding:
            candidates.append(name)
    return pick_modules(candidates, plan, patterns)
