"""Checkpoints with random damage: read, or refused with one line; never a traceback, never half loaded."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from recpipe.answers.plain import unshard
from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.checkpoint.table_io import TableCheckpointIO
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.training.module import RankingModule
from tests.checkpoint.older import as_npy
from tests.mutations import damage
from tests.resuming import STEP, before_training, going_on, saved
from tests.tables.samples import dump, identical

WAYS = {
    "lru": ("tiers.policy=lru", "optim.dense.name=Adam"),
    "sharded": ("tiers.sharded=true",),
    "lfu": ("tiers.policy=lfu",),
    "resident": ("optim=sgd",),
    **{f"plugin {name}": (f"+plugin={name}",) for name in ("slipstream", "fae", "hotline", "het")},
    "bagpipe": ("+plugin=bagpipe", "tiers.resident_bytes=50%"),
}
OLDER = ("lru", "resident")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for disks, no report."""
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: None)
    monkeypatch.setattr("recpipe.report.run_page.write", lambda *_: None)
    monkeypatch.setattr("recpipe.report.run_table.print_result", lambda *_: None)


def one_line(fault: UserError) -> None:
    text = str(fault)
    assert len(text) < 1000, text
    assert text.isprintable(), text


def damaged_copy(whole: Path, folder: Path, seed: int, way: str) -> tuple[Path, str]:
    """A copy of ``whole``, and what was done to it; every other one of ``OLDER`` has .npy files."""
    copied = Path(shutil.copytree(whole, folder / whole.name))
    if way in OLDER and seed % 2:
        as_npy(copied)
    return copied, damage(random.Random(seed), copied, STEP)


@pytest.mark.parametrize(
    "way",
    [
        "sharded",
        # Read by the same code as the files of a shard.
        pytest.param("lru", marks=pytest.mark.soak),
        pytest.param("plugin slipstream", marks=pytest.mark.soak),
    ],
)
def test_a_damaged_checkpoint_is_read_or_refused(tmp_path: Path, way: str) -> None:
    """Refused before a table is touched; ``unshard`` reads it or refuses it likewise."""
    whole = saved(tmp_path / "made", WAYS[way])
    outcomes: dict[str, int] = {"read": 0, "refused": 0}

    def work(module: RankingModule, io: TableCheckpointIO) -> None:
        before = dump(io.storage)
        for seed in range(50):
            copied, what = damaged_copy(whole, tmp_path / "bad", seed, way)
            try:
                io.load_checkpoint(copied)
                outcomes["read"] += 1
            except UserError as fault:
                one_line(fault)
                outcomes["refused"] += 1
                assert identical(dump(io.storage), before), what
            before = dump(io.storage)
            try:
                unshard(copied, tmp_path / "all.safetensors")
            except UserError as fault:
                one_line(fault)
            shutil.rmtree(tmp_path / "bad")

    before_training(tmp_path / "run", WAYS[way], work)
    assert outcomes["refused"] > 20, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("way", list(WAYS))
def test_a_run_goes_on_from_a_damaged_checkpoint_or_says_why_not(tmp_path: Path, way: str) -> None:
    """As above, and what is read trains: no later step stumbles over it."""
    whole = saved(tmp_path / "made", WAYS[way])
    for seed in range(100):
        copied, what = damaged_copy(whole, tmp_path / "bad", seed, way)
        try:
            run(compose(going_on([*WAYS[way], f"resume={copied}"])), tmp_path / "run")
        except UserError as fault:
            one_line(fault)
        except BaseException as fault:
            raise AssertionError(f"seed {seed}: {what}") from fault
        shutil.rmtree(tmp_path / "bad")
