"""Frozen reference weights, for losses that compare with them: the initial weights of the run, or a model directory.

They are sharded like the trained weights, and are swapped in while a pre-pass runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from llmsuite.base.errors import UserError
from llmsuite.base.files import check_intact
from llmsuite.base.progress import report
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.registry import Registry
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.weights import read_from
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.parallel import collective
from llmsuite.parallel.materialize import read_local_values
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.vocabulary import pad_values
from llmsuite.recipe.plans import ModelPlan, TrainPlan
from llmsuite.recipe.shape import ONLY_INITIAL, local_weights


class ReferenceWeights:
    """Reference values of this rank's shard of each parameter."""

    def __init__(self, kept: Sequence[tuple[ParameterShard, Tensor]], digest: str = ""):
        """`kept` has a reference value for each shard; `digest` is that of the files, empty for initial weights."""
        self._kept = kept
        self.digest = digest

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Swap the reference weights into the model. Every rank has to enter the context, as passes are collective."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for shard, kept in self._kept:
            shard.swap_stored(kept)


def load_reference_weights(
    model_plan: ModelPlan,
    train_plan: TrainPlan,
    registry: Registry,
    built: BuiltModel,
    mesh: Mesh,
    has_values: bool = True,
) -> ReferenceWeights | None:
    """Load the weights for pre-passes of kind "reference"; None without such a pre-pass. Each rank reads its slices.

    Args:
        model_plan: plan of the model.
        train_plan: plan of the training, with the profile of the stage.
        registry: model families that the model directory may belong to.
        built: the model, which has its initial weights.
        mesh: coordinates of this rank.
        has_values: False on a device that computes nothing, where no file is opened.

    Raises:
        UserError: the reference has another shape than the model.
    """
    profile = train_plan.profile
    if all(prepass.kind != "reference" for prepass in profile.prepasses):
        return None
    if profile.reference is None or not has_values:
        return ReferenceWeights([(shard, shard.copy_of_stored()) for shard in built.shards])
    path = local_weights(profile.reference)
    if collective.rank() == 0:  # one rank hashes the files: each byte is read once
        check_intact(path)
    source = open_model(path, registry.models, mtp=num_mtp_layers(model_plan.config) > 0)
    _check_config(f"{train_plan.stage.section_name}.reference", model_plan, source)
    check_shapes(source, {name: tuple(shape) for name, shape in built.shapes.items()})
    values = pad_values(read_from(source), built.shapes)
    shard_plan = model_plan.shard_plan
    kept = [
        (shard, shard.stored_form(read_local_values(shard.name, shard.shape, shard_plan, mesh, values)))
        for shard in built.shards
    ]
    digest = source.digest()
    report(f"reference: {source.path} ({source.description}), sha256 {digest[:12]}")
    return ReferenceWeights(kept, digest)


def _check_config(key: str, model_plan: ModelPlan, source: ModelDirectory) -> None:
    """Raise UserError, at a key of the recipe, unless the reference model computes the same function as the trained
    one, given the same weights."""
    own = model_plan.config
    other = source.config
    if source.family.name != model_plan.family.name:
        differing = [f"it is a {source.family.name}, and the model a {model_plan.family.name}"]
    else:
        if hasattr(own, "kept"):  # keys of config.json that the model does not use
            other = dataclasses.replace(other, kept=own.kept)
        ours = own.to_hf()  # with all defaults
        theirs = other.to_hf()
        differing = [
            f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} in the model"
            for name in sorted(ours.keys() | theirs.keys())
            if name not in ONLY_INITIAL and ours.get(name) != theirs.get(name)
        ]
    if differing:
        raise UserError(f"{key}: {source.path} is not of the shape of the model: {'; '.join(differing)}")
