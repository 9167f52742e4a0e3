"""Shards of a model, whose outputs are summed by ranks in one process: the logits are those of the full model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference import rank_shards
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.export import export
from llmsuite.inference.export_manifest import ExportManifest, read_manifest
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.rank_shards import add_collectives, load_shard, ring_of
from llmsuite.inference.static_experts import make_static
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from tests.support import many
from tests.support.families import FAMILIES, LINEAR
from tests.support.written_family import write_family

IDS = np.asarray([[7, 300, 12, 9], [0, 5, 41, 8]])
PADDING = np.asarray([0, 1])


@pytest.fixture(scope="module", params=sorted({*FAMILIES} - {*LINEAR}))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    shape = {"vocab_size": 515} if request.param == "llama" else {}
    directory = write_family(tmp_path_factory.mktemp("parts") / "model", request.param, **shape)
    return open_model(directory, FAMILIES)


def is_uncut(source: ModelDirectory) -> bool:
    """True for a model without tensor parallel."""
    return getattr(source.config, "uncut", None) is not None


def _passes(decoder: Any) -> list[np.ndarray]:
    """Logits of a prompt, and of a token after it."""
    first, cache = decoder.forward(IDS, PADDING, None)
    return [first, decoder.forward(IDS[:, :1], PADDING, cache)[0]]


def _joined(source: ModelDirectory, degrees: Degrees, monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """The logits that each rank of a mesh has, with what programs send sent by ranks in one process."""

    def total(part: Any, ring: int) -> Any:
        copy = part.clone()
        collective.sum_in_group(copy, collective.mesh().tensor_group)
        return copy

    def columns(part: Any, count: int, ring: int) -> Any:
        return collective.all_gather(part, collective.mesh().tensor_group, 1)

    monkeypatch.setattr(rank_shards, "_all_reduce", total)
    monkeypatch.setattr(rank_shards, "_gather_columns", columns)

    def work(mesh: Mesh) -> list[np.ndarray]:
        model = load_shard(source, CpuBackend(), "fp32", mesh)
        fuse(model)
        add_collectives(model, source.family.shard_plan or UNSHARDED, mesh, ring_of(mesh))
        make_static(model)
        model.decoding = dataclasses.replace(model.decoding, accepts_buffer=False)
        return _passes(ModelDecoder(model, _Alone(mesh)))

    return many.run(degrees, work)


class _Alone(Mesh):
    """A mesh whose tensors are plain."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh.degrees, mesh.rank, mesh.ep_size, mesh.groups)

    @property
    def tensor(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("degrees", [Degrees(1, 1, 1, 2), Degrees(2, 1, 1, 1), Degrees(2, 1, 1, 2)], ids=str)
def test_parts_make_the_logits_of_the_whole(
    source: ModelDirectory, degrees: Degrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_uncut(source) and degrees.tp > 1:
        with pytest.raises(UserError, match="norms all heads of queries, and of keys, together"):
            _joined(source, degrees, monkeypatch)
        return
    expected = _passes(ModelDecoder(load_model(source, CpuBackend())))
    for found in _joined(source, degrees, monkeypatch):
        for logits, full in zip(found, expected, strict=True):
            assert np.abs(logits - full).max() <= 1e-5 * np.abs(full).max()


def test_a_rank_holds_its_part_only(source: ModelDirectory) -> None:
    if is_uncut(source):
        with pytest.raises(UserError, match="norms all heads of queries, and of keys, together"):
            load_shard(source, CpuBackend(), "fp32", Mesh(Degrees(1, 1, 1, 2), 0))
        return
    full = sum(p.size for p in load_model(source, CpuBackend()).parameters())
    degrees = Degrees(1, 1, 1, 2)
    parts = [
        sum(p.size for p in load_shard(source, CpuBackend(), "fp32", Mesh(degrees, r)).parameters()) for r in (0, 1)
    ]
    assert parts[0] == parts[1] < 0.75 * full


def test_programs_say_what_ranks_add_up(source: ModelDirectory, tmp_path: Path) -> None:
    degrees = Degrees(1, 1, 1, 2)
    if is_uncut(source):
        with pytest.raises(UserError, match="norms all heads of queries, and of keys, together"):
            export(source, tmp_path / "static", CpuBackend(), source.path, degrees=degrees)
        return
    exported = export(source, tmp_path / "static", CpuBackend(), source.path, degrees=degrees)
    assert read_manifest(tmp_path / "static") == exported
    layers = source.config.num_hidden_layers
    for rank in range(2):
        program = (tmp_path / "static" / f"rank_{rank}" / "model.json").read_text()
        assert program.count('"1.all_reduce"') == 1 + 2 * layers  # after the embedding, attention and the MLP
        assert program.count('"1.all_gather"') == 1
    with pytest.raises(UserError, match=r"was exported for 2 devices; add --num_devices 2"):
        Predictor(tmp_path / "static")


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    source = open_model(write_family(tmp_path / "model", "llama"), FAMILIES)
    for degrees, message in (
        (Degrees(1, 1, 1, 3), "--tensor_parallel_degree is 3, which does not divide num_attention_heads"),
        (Degrees(99, 1, 1, 1), "--pipeline_parallel_degree: is 99, and the model has"),
    ):
        with pytest.raises(UserError, match=message):
            export(source, tmp_path / "static", CpuBackend(), source.path, degrees=degrees)
        assert not (tmp_path / "static").exists()
    with pytest.raises(UserError, match="--decoding_loop: is a program of one pipeline stage"):
        export(source, tmp_path / "x", CpuBackend(), source.path, decoding_loop=True, degrees=Degrees(2, 1, 1, 1))


def test_a_manifest_without_ranks_is_of_one() -> None:
    exported = ExportManifest("fp32", [[2, 0, 4], [2, 0, 4]], "", {})
    assert exported.degrees == Degrees(1, 1, 1, 1)
    assert exported.cache_shapes_of(0) == exported.cache_shapes
    cut = ExportManifest("fp32", [[1], [2], [3], [4]], "", {}, 1, 2, [0, 2])
    assert [cut.cache_shapes_of(stage) for stage in (0, 1)] == [[[1], [2]], [[3], [4]]]
    assert paddle.in_dynamic_mode()
