"""kill -9 of who publishes, applies and serves deltas, at any moment: no version is torn."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_serve.tests.clients import Clients

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Change, Delta, Version, deltas_in, following, write_delta
from recpipe.answers.manifest import read_manifest
from recpipe.checkpoint.table_io import newest
from recpipe.private_api.compiled import compiler
from tests.answers.test_deltas import SYNTHETIC, differences, trained
from tests.processes import Child

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here"),
]
KILLS = int(os.environ.get("RECPIPE_KILLS", "50"))
"""Of each of the three."""
START, LAST = 3, 23


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its package."""
    place = tmp_path_factory.mktemp("base")
    start = trained(list(SYNTHETIC), place / "run", START)
    return start, recpipe.package(start, place / "base.recpipe", reference=False, quiet=True)


def made_up(base: Path, folder: Path, number: int) -> list[Path]:
    """So many deltas of random rows."""
    manifest, draw, made = read_manifest(base), np.random.default_rng(0), []
    version = Version.of_package(base, manifest)
    for _ in range(number):
        rows = {}
        for name, about in manifest["tables"].items():
            ids = np.sort(draw.choice(about["rows"], about["rows"] // 2, replace=False))
            values = draw.normal(size=(len(ids), about["dimension"])).astype(np.float32)
            rows[name] = ids, "fp32", torch.from_numpy(values).view(torch.uint8)
        delta = write_delta(folder, version, Change(version.step + 1, 0.0, 0.0, rows, {}, {}))
        version = delta.version
        made.append(delta.directory)
    return made


def test_a_run_that_is_killed_again_and_again_publishes_what_it_ends_with(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    start, package = base
    draw, deltas = random.Random(1), tmp_path / "deltas"
    own = f"trainer.publish={{dir: {deltas}, base: {package}, every_steps: 1}}"
    words = (*SYNTHETIC, "trainer.max_epochs=2", own, "trainer.checkpoint_every=4", "overwrite=true")
    kept, killed = tmp_path / "run" / "checkpoints", 0
    for _ in range(KILLS):
        resume = kept if any(kept.glob("*.ckpt")) else start
        child = Child(
            tmp_path / "child",
            *words,
            "trainer.max_steps=100000",
            f"resume={resume}",
            f"hydra.run.dir={tmp_path}/run",
            merged=True,
        )
        child.until("publishing to")
        time.sleep(draw.uniform(0, 0.2))
        killed += child.process.is_alive()
        child.kill()
        version = Version.of_package(package, read_manifest(package))
        found = list(following(deltas, version))  # each is whole, and follows the one before
        assert len(found) == len(deltas_in(deltas))
        step = int(newest(kept).name[5:13]) if any(kept.glob("*.ckpt")) else START
        if step > LAST:
            shutil.rmtree(tmp_path / "run")
    assert killed > KILLS // 2
    end = trained(list(SYNTHETIC), tmp_path / "last", LAST, own, f"resume={start}")
    apply_deltas(package, [deltas], tmp_path / "made")
    whole = recpipe.package(end, tmp_path / "whole", reference=False, quiet=True)
    assert not differences(tmp_path / "made", whole)


def test_who_applies_and_is_killed_leaves_the_package_before_or_the_one_after(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    draw, target = random.Random(2), tmp_path / "target"
    deltas = made_up(base[1], tmp_path, 2)
    states = set()
    for _ in range(KILLS):
        if not target.exists() or read_manifest(target).get("applied", {}).get("sequence") == 2:
            shutil.rmtree(target, ignore_errors=True)
            apply_deltas(base[1], [deltas[0]], target)
        child = Child(tmp_path / "child", "apply", str(target), str(deltas[1]))
        time.sleep(draw.uniform(0, 3))
        child.kill()
        states.add(read_manifest(target)["applied"]["sequence"])
        score.verified(target)
    assert states == {1, 2}


def test_a_server_that_is_killed_starts_with_all_deltas_and_no_answer_is_torn(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    draw, package = random.Random(3), Path(shutil.copytree(base[1], tmp_path / "model.recpipe"))
    made, deltas = made_up(package, tmp_path, KILLS), tmp_path / "deltas"
    deltas.mkdir()
    scorers = [score.Scorer(package, mapped=True)]
    for number in range(KILLS):
        words = ("serve", str(package), "port=0", f"follow={deltas}", "poll_seconds=0.02")
        server = Child(tmp_path / "server", *words, merged=True)
        try:
            found = re.search(r"at (http\S+/v2/models/model);", server.until("golden"))
            assert found is not None
            next_one = apply_or_copy(package, made[: number + 1], tmp_path / "next")
            pair = [scorers[-1], score.Scorer(next_one, mapped=False)]
            with Clients(found[1], pair, count=2).asking() as clients:
                made[number].rename(deltas / made[number].name)
                server.until(f"delta {number + 1} answers")
                time.sleep(draw.uniform(0, 0.2))
                server.kill()
            assert not clients.wrong, clients.wrong[:3]
            scorers = pair
        finally:
            server.kill()


def apply_or_copy(package: Path, deltas: list[Path], target: Path) -> Path:
    """The package with these deltas, wherever they are now."""
    there = [d if d.exists() else d.parent / "deltas" / d.name for d in deltas]
    apply_deltas(package, there, target, overwrite=True)
    assert Delta.read(there[-1]).version.digest == read_manifest(target)["applied"]["digest"]
    return target
