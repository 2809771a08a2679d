"""Sizes against memory: refused before anything is allocated, with the bytes and the keys; ssd is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpipe.common import machine
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.setup.footprint import dense_bytes
from tests.pipeline.samples import DENSE, collection_of, model_config, model_over
from tests.tables.samples import CPU, FEATURES

SMALL = ("data.samples=600", "data.batch_size=64", "trainer.progress=false", "trainer.logger=null")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB, whatever this machine has."""
    monkeypatch.setattr(machine, "there", lambda device: 8 << 20)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("model.embedding_dim=1024",),
            ("tables", "GiB", "8 MiB are there", "model.embedding_dim", "tiers=ssd"),
        ),
        (
            ("data.table_scale=0.001", "model.top=[9999999]"),
            ("dense part", "lower model.bottom and model.top"),
        ),
        (
            ("data.table_scale=0.001", "data.samples=80000", "data.batch_size=60000"),
            ("batches", "lower data.batch_size"),
        ),
        (("tiers.policy=lru", "tiers.store=host"), ("tables", "tiers=ssd")),
        (
            ("tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=90%"),
            ("cache", "lower tiers.resident_bytes"),
        ),
        (
            ("tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=1%", "data.tables={a: 3000000}"),
            ("row maps", "lower the rows"),
        ),
        (("data.pooling=1000", "data.table_scale=0.001"), ("generated ids", "lower data.pooling")),
    ],
    ids=["tables", "dense part", "batch", "host store", "cache", "row maps", "pooling"],
)
def test_what_cannot_fit_is_refused(
    tmp_path: Path, little_memory: None, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        run(compose([*SMALL, *overrides]), tmp_path)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "tiers").exists()


def test_tables_on_disk_may_be_larger_than_memory(tmp_path: Path, little_memory: None) -> None:
    disk = ("tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=5%", "trainer.max_steps=1")
    report = run(compose([*SMALL, *disk, "data.table_scale=0.3", "trainer.checkpoint_every=null"]), tmp_path)
    assert report["memory"]["cold_bytes"] > 8 << 20


def test_a_plan_takes_no_memory(tmp_path: Path, little_memory: None) -> None:
    run(compose([*SMALL, "task=plan", "model.embedding_dim=1024"]), tmp_path)


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
def test_dense_bytes_are_the_modules(name: str, tmp_path: Path) -> None:
    """All but the biases."""
    model = model_over(collection_of("resident", "sgd", tmp_path), name)
    weights = sum(p.nbytes for p in model.dense_parameters().values() if p.ndim == 2)
    assert dense_bytes(model_config(name), DENSE, len(FEATURES)) == 2 * weights


def test_this_machine_has_memory() -> None:
    assert 0 < machine.there(torch.device("cpu")) < 2**50


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (
        ("memory.max", "1000000"),
        ("memory.current", "400000"),
        ("memory.stat", "file 100000"),
    ):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    assert machine.there(CPU) == 700_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.there(CPU) == 250_000
    (tmp_path / "memory.max").write_text("max")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert machine.there(CPU) > 1_000_000
