"""A package on the SSD that follows deltas scores as each version's package does, with its bits."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_sdm.fresh import TieredVersions, changed_by, with_changed
from recpipe_sdm.plugin import SDM
from recpipe_sdm.rows import TieredRows
from recpipe_sdm.tables import Tiering
from recpipe_sdm.tests.test_scorer import batches, packed, scored
from recpipe_serve.fresh.reading import DeltaReader
from recpipe_serve.fresh.versions import Step
from recpipe_serve.tests.clients import Clients

from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Change, Version, write_delta
from recpipe.answers.manifest import read_manifest
from recpipe.answers.score import Scorer
from recpipe.common.words import Amount
from recpipe.errors import StoreError, UserError
from tests.processes import Child

__all__ = ["packed"]
DELTAS = 3


@pytest.fixture(scope="module")
def deltas(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of a part of the rows, and all parameters."""
    folder, draw = tmp_path_factory.mktemp("deltas"), np.random.default_rng(0)
    manifest, made = read_manifest(packed), []
    version = Version.of_package(packed, manifest)
    for _ in range(DELTAS):
        rows = {}
        for name, about in manifest["tables"].items():
            ids = np.sort(draw.choice(about["rows"], about["rows"] // 3, replace=False))
            values = draw.normal(size=(len(ids), about["dimension"])).astype(np.float32)
            rows[name] = ids, "fp32", torch.from_numpy(values).view(torch.uint8)
        dense = {
            name: value + 0.1 * torch.from_numpy(draw.normal(size=value.shape).astype(np.float32))
            for name, value in score.tensors(packed / "dense.safetensors").items()
            if value.is_floating_point()
        }
        now = time.time()
        delta = write_delta(folder, version, Change(version.step + 1, now, now, rows, {}, dense))
        version = delta.version
        made.append(delta.directory)
    return made


@pytest.fixture(scope="module")
def known(
    packed: Path, deltas: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[torch.Tensor]]:
    """The scores of each version's package."""
    folder, found = tmp_path_factory.mktemp("packages"), [scored(Scorer(packed))]
    for number, delta in enumerate(deltas):
        before = folder / str(number - 1) if number else packed
        apply_deltas(before, [delta], folder / str(number))
        found.append(scored(Scorer(folder / str(number))))
    return found


def versions_of(packed: Path, place: Path, tables: str, pooled: int = 0) -> TieredVersions:
    dram = 60_000 if tables == "*" else 120_000  # of others there are two copies
    how = Tiering(place, Amount(dram + pooled, False), tables, pooled=Amount(pooled, False), follows=True)
    return TieredVersions(packed, 8, True, how)


def require_same(versions: TieredVersions, known: list[list[torch.Tensor]], number: int) -> None:
    for own, other in zip(scored(versions.answering), known[number], strict=True):
        assert torch.equal(own, other), number


@pytest.mark.parametrize(("tables", "pooled"), [("*", 0), ("user", 10_000)])
def test_each_version_has_the_bits_of_its_package_also_while_rows_are_written(
    tables: str,
    pooled: int,
    packed: Path,
    deltas: list[Path],
    known: list[list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    versions = versions_of(packed, tmp_path, tables, pooled)
    tiers = versions.tables.tiers
    assert tiers.tiers, "or nothing is on the SSD"
    for number, delta in enumerate(deltas, 1):
        versions.add(versions.reader(DeltaReader, None).read(delta))
        require_same(versions, known, number - 1)
        versions.swap()
        require_same(versions, known, number)  # rows are beside those in DRAM
        assert versions.settle() > 0
        require_same(versions, known, number)
        assert all(tier.beside == 0 for tier in tiers.tiers)
    for number in (1, 3, 0, 2):  # back and forth
        versions.move(number)
        versions.swap()
        versions.settle()
        require_same(versions, known, number)
    tiers.close()


def test_batches_between_the_pieces_of_a_change_are_of_one_version(
    packed: Path,
    deltas: list[Path],
    known: list[list[torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While rows are put beside others and written, piece by piece; rows read ahead before are read again."""
    versions, at, pieces = versions_of(packed, tmp_path, "*"), [0], [0]
    every = list(batches())
    scatter, beside = type(versions.tables.tiers.tiers[0].store).scatter, TieredRows.put_beside

    def ask() -> None:
        pieces[0] += 1
        batch = pieces[0] % len(every)
        assert torch.equal(versions.answering(*every[batch]), known[at[0]][batch])

    def scattered(*own: object) -> None:
        ask()
        scatter(*own)  # type: ignore[arg-type]
        ask()

    def put(tier: TieredRows, values: torch.Tensor) -> object:
        found = beside(tier, values)
        ask()
        return found

    monkeypatch.setattr(type(versions.tables.tiers.tiers[0].store), "scatter", scattered)
    monkeypatch.setattr(TieredRows, "put_beside", put)
    for number, delta in enumerate(deltas, 1):
        versions.add(versions.reader(DeltaReader, None).read(delta))
        versions.swap()
        at[0] = number
        versions.settle()
    assert pieces[0] > 10
    versions.tables.tiers.close()


def test_rows_that_are_not_forgotten_are_old(
    packed: Path,
    deltas: list[Path],
    known: list[list[torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: what was read for a batch before a delta is found after it."""
    versions = versions_of(packed, tmp_path, "*")
    scored(versions.answering)
    monkeypatch.setattr(type(versions.tables.tiers.shared.index), "forget", lambda own, rows: None)
    versions.add(versions.reader(DeltaReader, None).read(deltas[0]))
    versions.swap()
    versions.settle()
    with pytest.raises(AssertionError):
        require_same(versions, known, 1)
    versions.tables.tiers.close()


def test_only_blocks_with_changed_rows_are_written(packed: Path, tmp_path: Path) -> None:
    versions = versions_of(packed, tmp_path / "rows", "*")
    (tmp_path / "d").mkdir()
    manifest = read_manifest(packed)
    before = Version.of_package(packed, manifest)
    ids = np.array([1, 2, 2900])
    rows = {"user": (ids, "fp32", torch.ones(3, manifest["tables"]["user"]["dimension"]).view(torch.uint8))}
    delta = write_delta(tmp_path / "d", before, Change(9, 0.0, 0.0, rows, {}, {}))
    versions.add(versions.reader(DeltaReader, None).read(delta.directory))
    versions.swap()
    assert versions.settle() == 2 * 4096, "two of the table's blocks"
    versions.tables.tiers.close()


def test_a_disk_that_fails_leaves_the_newest_rows_in_memory_and_they_are_written_later(
    packed: Path,
    deltas: list[Path],
    known: list[list[torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = versions_of(packed, tmp_path, "*")

    def full(*_: object) -> None:
        raise StoreError("ssd store: No space left on device")

    kind = type(versions.tables.tiers.tiers[0].store)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "scatter", full)
        versions.add(versions.reader(DeltaReader, None).read(deltas[0]))
        versions.swap()
        with pytest.raises(StoreError, match="No space left"):
            versions.settle()
        require_same(versions, known, 1)
        with pytest.raises(StoreError, match="No space left"):
            versions.add(versions.reader(DeltaReader, None).read(deltas[1]))
        require_same(versions, known, 1)
    versions.tables.tiers.close()


def test_steps_in_a_row_are_one_change() -> None:
    def rows(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.uint8).view(-1, 1)

    steps = [
        Step({"a": (torch.tensor([1, 4, 7]), rows(1, 1, 1)), "b": (torch.tensor([0]), rows(1))}, {}, {}),
        Step({"a": (torch.tensor([0, 4]), rows(2, 2))}, {}, {}),
    ]
    found = changed_by(steps)
    assert {n: [each.view(-1).tolist() for each in own] for n, own in found.items()} == {
        "a": [[0, 1, 4, 7], [2, 1, 2, 1]],
        "b": [[0], [1]],
    }
    assert with_changed(torch.tensor([3, 4, 9]), rows(8, 8, 8), found["a"]).view(-1).tolist() == [8, 2, 8]


def test_another_package_asks_for_a_new_server(packed: Path, tmp_path: Path) -> None:
    plugin = SDM(dram=60_000, tables="*", admission="lfu", directory=str(tmp_path), pooled=0)
    plugin.followed(packed, 4, False)
    with pytest.raises(UserError, match="start the server again"):
        plugin.followed(packed, 4, False)
    plugin.close()


@pytest.mark.soak
@pytest.mark.slow
def test_a_server_follows_with_rows_on_the_ssd_and_no_answer_is_of_two_versions(
    packed: Path, deltas: list[Path], tmp_path: Path
) -> None:
    package, folder = Path(shutil.copytree(packed, tmp_path / "model.recpipe")), tmp_path / "d"
    folder.mkdir()
    words = ("+plugin=sdm", "plugins.sdm.dram=60000", "port=0", f"follow={folder}", "poll_seconds=0.02")
    more = "rollback=true", "deadline_ms=60000"  # on a busy machine requests wait
    server = Child(tmp_path / "server", "serve", str(package), *words, *more, merged=True)
    try:
        found = re.search(r"at (http\S+/v2/models/model);", server.until("golden"))
        assert found is not None
        scorers = [Scorer(package)]
        for number, delta in enumerate(deltas, 1):
            apply_deltas(package, deltas[:number], tmp_path / str(number))
            scorers.append(Scorer(tmp_path / str(number)))
            with Clients(found[1], scorers[-2:], count=2).asking() as clients:
                shutil.copytree(delta, tmp_path / delta.name)
                (tmp_path / delta.name).rename(folder / delta.name)
                server.until(f"delta {number}: ")  # how much was written
            assert not clients.wrong, clients.wrong[:3]
            assert clients.by[1] > 0
        with Clients(found[1], [scorers[-1], scorers[1]], count=2).asking() as clients:
            body = json.dumps({"sequence": 1}).encode()
            with urllib.request.urlopen(f"{found[1]}/deltas", body, timeout=30) as answer:
                assert json.loads(answer.read())["answering"] == 1
            time.sleep(0.5)
        assert not clients.wrong, clients.wrong[:3]
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
