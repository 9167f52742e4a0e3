"""Frozen weights beside those that are trained, for a loss that compares with them: the initial ones of the run, or
those of a model directory.

They are sharded as the weights are, and take their place while a pre-pass runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.errors import UserError
from llmsuite.files import check_whole
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel import collective
from llmsuite.parallel.fill import read_local
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.vocabulary import pad_values
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.shape import ONLY_INITIAL, local_weights
from llmsuite.train.build import BuiltModel
from llmsuite.train.weights import read_from
from llmsuite.typing import Tensor


class FrozenCopy:
    """Values of what this rank holds of each parameter."""

    def __init__(self, kept: Sequence[tuple[ParameterShard, Tensor]], digest: str = ""):
        """`digest`: of the files that they are from; empty for initial weights."""
        self._kept, self.digest = kept, digest

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, on every rank, passes are those of the frozen model."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for shard, kept in self._kept:
            shard.swap_stored(kept)


def frozen_reference(plan: RunPlan, registry: Registry, built: BuiltModel, mesh: Mesh) -> FrozenCopy | None:
    """The weights for pre-passes of kind "reference"; None where there are none. Each rank reads its slices.

    Args:
        plan: of the run.
        registry: of the families a model directory may be of.
        built: the model, with its initial weights in place.
        mesh: this rank's place.

    Raises:
        UserError: the reference has another shape than the model.
    """
    profile = plan.profile
    if all(prepass.kind != "reference" for prepass in profile.prepasses):
        return None
    if profile.reference is None:
        return FrozenCopy([(shard, shard.copy_of_stored()) for shard in built.shards])
    place = local_weights(profile.reference)
    if collective.rank() == 0:
        check_whole(place)
    source = open_model(place, registry.models, mtp=num_mtp_layers(plan.model_config) > 0)
    _check_config(plan, source)
    check_shapes(source, {name: tuple(shape) for name, shape in built.shapes.items()})
    values, shard_plan = pad_values(read_from(source), built.shapes), plan.family.shard_plan or WHOLE
    kept = [
        (shard, shard.stored_form(read_local(shard.name, shard.shape, shard_plan, mesh, values)))
        for shard in built.shards
    ]
    digest = source.digest()
    report(f"reference: {source.path} ({source.description}), sha256 {digest[:12]}")
    return FrozenCopy(kept, digest)


def _check_config(plan: RunPlan, source: ModelDirectory) -> None:
    """Raise UserError for a model that would compute something else with the same weights."""
    here, there = plan.model_config, source.config
    if source.family.name != plan.family.name:
        differing = [f"it is a {source.family.name}, and the model a {plan.family.name}"]
    else:
        if hasattr(here, "kept"):  # keys of config.json that are for others
            there = dataclasses.replace(there, kept=here.kept)
        ours, theirs = here.to_hf(), there.to_hf()  # where defaults are written out
        differing = [
            f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} in the model"
            for name in sorted(ours.keys() | theirs.keys())
            if name not in ONLY_INITIAL and ours.get(name) != theirs.get(name)
        ]
    if differing:
        key = f"{plan.stage.section_name}.reference"
        raise UserError(f"{key}: {source.path} is not of the shape of the model: {'; '.join(differing)}")
